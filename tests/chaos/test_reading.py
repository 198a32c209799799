"""A stream is right if its client has read exactly the undisturbed text, and one terminal at its end."""

from typing import Any

import pytest

from tests.chaos.reading import UNSEALED, Expected, Failure, Piece, Reading, Usage, expected_of
from tokenbus.protocol.wire import errors

TEXTS = ("Gr", "üße", " an", " alle")
STORY = expected_of((text, ()) for text in TEXTS)


def pieces(*texts: str, **fields: Any) -> list[Piece]:
    """Returns a head and a piece for each text."""
    offsets = [len("".join(texts[:number]).encode()) for number in range(len(texts))]
    head = Piece(worker_id="w", **fields)
    return [
        head,
        *(Piece(tokens=1, text=text, text_offset=at, **fields) for text, at in zip(texts, offsets, strict=True)),
    ]


def end(text_offset: int = len(STORY.text), completion_tokens: int = 4, reason: str = "length") -> Piece:
    return Piece(text_offset=text_offset, worker_id="w", finish_reason=reason, usage=Usage(completion_tokens))


HOLED = [*pieces(*TEXTS)[:2], *pieces(*TEXTS)[4:]]
"""What a client reads that was away for the second and third text."""


def read(*told: Piece, expected: Expected = STORY) -> Reading:
    """Reads these pieces, one per second."""
    reading = Reading(expected, 0.0)
    for number, piece in enumerate(told, 1):
        reading.add(piece, float(number))
    return reading


def test_a_shorter_stream_has_the_first_tokens_of_the_text() -> None:
    assert STORY.first(2).text == "Grüße".encode()
    assert STORY.first(4) == STORY
    assert not read(*pieces("Gr", "üße"), end(7, 2), expected=STORY.first(2)).problem


def test_the_undisturbed_text_with_its_terminal_is_right() -> None:
    reading = read(*pieces(*TEXTS), end())
    assert (reading.end, reading.problem, reading.has_hole, reading.num_tokens) == ("length", "", False, 4)


def test_a_whole_answer_in_its_terminal_is_right() -> None:
    reading = read(Piece(text="Grüße an alle", tokens=4, finish_reason="length", worker_id="w", usage=Usage(4)))
    assert (reading.end, reading.problem) == ("length", "")


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ([*pieces("Gr", "gott")], "came b'gott' in place of"),
        ([*pieces("Gr", "üße"), Piece(text="üße", text_offset=2)], "came again"),
        ([*pieces(*TEXTS, "!")], "came b'!' in place of b''"),
        ([*pieces(*TEXTS[:3]), end(text_offset=10)], "it ended at byte 10 of 15"),
        ([*pieces(*TEXTS), end(completion_tokens=5)], "not 4 tokens"),
        ([*pieces(*TEXTS), end(), Piece(text="", worker_id="w")], "came Piece"),
        ([*pieces(*TEXTS), end(), end()], "came Piece"),
        ([*pieces("Gr"), Piece(attempt=2, worker_id="v", text_offset=1)], "came again"),
        ([*HOLED, Piece(text="üße", text_offset=2), Piece(text="üße", text_offset=2)], "came again"),
        ([*HOLED, Piece(text=" alle", text_offset=10)], "came again"),
        ([*HOLED, Piece(text="Gr")], "came again"),
        ([*HOLED, Piece(attempt=2, text="üße", text_offset=2)], "came again"),
    ],
    ids=[
        *("another", "repeated", "too long", "too short", "miscounted", "goes on", "two ends", "a head behind the end"),
        *("refilled twice", "repeated after a hole", "repeated before a hole", "refilled by another attempt"),
    ],
)
def test_anything_else_is_wrong(told: list[Piece], problem: str) -> None:
    assert problem in read(*told).problem


@pytest.mark.parametrize(
    "told",
    [[*pieces(*TEXTS)[:3], *pieces(*TEXTS)[4:], end()], [*pieces(*TEXTS)[:4], end()]],
    ids=["amid", "at the end"],
)
def test_a_lost_message_leaves_a_hole_and_nothing_wrong(told: list[Piece]) -> None:
    reading = read(*told)
    assert (reading.has_hole, reading.end) == (True, "length")
    assert "ended" not in reading.problem


@pytest.mark.parametrize("first", [2, 3])
def test_a_worker_may_go_back_into_a_hole_once(first: int) -> None:
    again = pieces(*TEXTS)[first:]
    reading = read(*HOLED, Piece(worker_id="w", text_offset=again[0].text_offset), *again, end())
    assert (reading.has_hole, reading.end, reading.problem) == (True, "length", "")


def test_messages_of_a_router_that_knows_no_offsets_are_no_repetition() -> None:
    keepalive = Piece(attempt=1, text_offset=0)
    assert not read(*pieces(*TEXTS), keepalive, end()).problem


def test_a_stream_may_go_on_with_another_token_only_at_a_near_tie() -> None:
    tokens = [("One ", [-0.1, -3.0]), ("bear", [-0.7, -0.71]), (" ran", [-0.1, -4.0]), (" off", [-0.2, -5.0])]
    expected = expected_of(tokens)
    assert (expected.text, expected.num_tokens) == (b"One bear ran off", 4)
    assert expected.near_ties == set(range(4, 12))  # " ran" too: what begins like "bear" may differ only after it
    parted = read(*pieces("One ", "bees", " fly"), end(12), expected=expected)
    assert (parted.has_parted, parted.problem) == (True, "")
    assert read(*pieces("One ", "bear", " ran", " on"), expected=expected).problem
    assert read(*pieces("Two ", "bear"), expected=expected).problem


def test_only_the_pause_before_another_attempt_is_a_gap() -> None:
    before, after = pieces(*TEXTS)[:3], pieces(*TEXTS, attempt=2)[3:]
    head = Piece(attempt=2, worker_id="v", text_offset=after[0].text_offset)
    reading = Reading(STORY, 10.0)
    for piece, now in zip([*before, head, *after], (11.0, 12.0, 12.5, 15.0, 16.0, 16.1), strict=True):
        reading.add(piece, now)
    assert reading.gaps_s == [3.5]
    assert (reading.longest_silence_s, reading.problem) == (3.5, "")


def test_an_attempt_that_is_the_first_to_speak_ends_no_gap() -> None:
    assert read(*pieces(*TEXTS, attempt=2)).gaps_s == []


def test_a_router_that_cannot_know_the_text_is_told_apart_from_all_other_losses() -> None:
    text = errors.make_error(errors.Code.WORKER_LOST).message
    lost = {"finish_reason": "error", "error": Failure("worker_lost", text)}
    assert read(Piece(**lost)).end == UNSEALED
    assert read(Piece(worker_id="w", **lost)).end == "worker_lost"
    assert read(Piece(finish_reason="error", error=Failure("worker_lost", "no other worker"))).end == "worker_lost"
    assert read(*pieces(*TEXTS)).end is None
