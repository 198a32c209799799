"""The reassembler passes on what continues a stream, once, however chunks are repeated or divided, and notices gaps."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from tokenbus.client.wire.reassembler import BrokenStreamError, Duplicate, Gap, ReadyChunks, Reassembler
from tokenbus.protocol.wire import messages

ERROR, STOP = messages.FinishReason.ERROR, messages.FinishReason.STOP


def chunk(offset: int = 0, tokens: int = 0, text_offset: int = 0, text: str = "", **fields: object) -> messages.Chunk:
    return messages.Chunk(
        id="r",
        offset=offset,
        tokens=tokens,
        text_offset=text_offset,
        text=text,
        **fields,  # type: ignore[arg-type]
    )


def begun() -> Reassembler:
    """At token 2, byte 2 of attempt 1."""
    reassembler = Reassembler()
    reassembler.add(chunk(0, 2, 0, "ab", attempt=1))
    return reassembler


def test_chunks_that_continue_each_other_are_taken_and_counted() -> None:
    reassembler = Reassembler()
    for one in (chunk(), chunk(0, 1, 0, "né"), chunk(1, 1, 3), chunk(2, 3, 3, "😀"), chunk(5, 0, 7, "!")):
        assert reassembler.add(one) == ReadyChunks(one)
    assert (reassembler.attempt, reassembler.num_tokens, reassembler.text_bytes) == (0, 5, 8)


@pytest.mark.parametrize(
    "ahead",
    [
        chunk(3, 1, 2, "x", attempt=1),
        chunk(3, 1, 2, attempt=1),
        chunk(3, 1, 2, "x", attempt=1, finish_reason=STOP),
        chunk(5, 1, 5, "x", attempt=2),
        chunk(3, 0, 2, worker_id="w1", attempt=1),
        chunk(3, 0, 2, worker_id="w1", attempt=1, finish_reason=STOP),
    ],
)
def test_what_is_ahead_shows_a_gap_and_is_not_taken(ahead: messages.Chunk) -> None:
    reassembler = begun()
    assert reassembler.add(ahead) == Gap()
    assert (reassembler.num_tokens, reassembler.text_bytes) == (2, 2)
    assert reassembler.add(chunk(2, 1, 2, "c", attempt=ahead.attempt)) == ReadyChunks(
        chunk(2, 1, 2, "c", attempt=ahead.attempt)
    )


def test_a_first_chunk_that_is_missing_is_a_gap() -> None:
    assert Reassembler().add(chunk(1, 1, 1, "b")) == Gap()


def test_what_is_known_is_not_taken_again() -> None:
    reassembler = begun()
    for known in (chunk(0, 2, 0, "ab", attempt=1), chunk(1, 1, 1, "b", attempt=1), chunk(0, 1, 0, "a", attempt=1)):
        assert reassembler.add(known) == Duplicate()
    assert (reassembler.num_tokens, reassembler.text_bytes) == (2, 2)


def test_a_chunk_cut_anew_is_taken_from_what_is_known_on() -> None:
    reassembler = begun()
    taken = reassembler.add(chunk(0, 4, 0, "abçd", attempt=1, token_ids=[7, 8, 9, 10]))
    assert taken == ReadyChunks(chunk(2, 2, 2, "çd", attempt=1, token_ids=[9, 10]))
    assert (reassembler.num_tokens, reassembler.text_bytes) == (4, 5)


def test_a_terminal_that_repeats_all_that_is_known_ends_the_stream_all_the_same() -> None:
    reassembler = begun()
    assert reassembler.add(chunk(1, 1, 1, "b", attempt=1, finish_reason=STOP)) == ReadyChunks(
        chunk(2, 0, 2, "", attempt=1, finish_reason=STOP)
    )


@pytest.mark.parametrize("wrong", [chunk(2, 1, 3, "x"), chunk(2, 1, 1, ""), chunk(1, 2, 5, "x")])
def test_offsets_that_contradict_each_other_break_the_stream(wrong: messages.Chunk) -> None:
    reassembler = Reassembler()
    reassembler.add(chunk(0, 2, 0, "ab"))
    with pytest.raises(BrokenStreamError):
        reassembler.add(wrong)
    assert (reassembler.num_tokens, reassembler.text_bytes) == (2, 2)


def test_what_a_router_says_carries_nothing_and_its_offsets_mean_nothing() -> None:
    reassembler = begun()
    for one in (chunk(attempt=1, worker_id=None), chunk(attempt=1, worker_id=None, finish_reason=ERROR)):
        assert reassembler.add(one) == ReadyChunks(one)
    assert (reassembler.num_tokens, reassembler.text_bytes) == (2, 2)


def test_an_error_ends_the_stream_wherever_it_was() -> None:
    reassembler = begun()
    terminal = chunk(9, 0, 9, attempt=1, worker_id="w1", finish_reason=ERROR)
    assert reassembler.add(terminal) == ReadyChunks(terminal)


def test_chunks_of_an_earlier_attempt_are_ignored_whatever_they_carry() -> None:
    reassembler = Reassembler()
    reassembler.add(chunk(attempt=2))
    assert reassembler.add(chunk(0, 1, 0, "old", attempt=1)) == Duplicate()
    assert reassembler.add(chunk(7, 1, 9, "old", attempt=0, finish_reason=STOP)) == Duplicate()
    assert (reassembler.attempt, reassembler.num_tokens, reassembler.text_bytes) == (2, 0, 0)


def test_a_later_attempt_goes_on_where_the_stream_is() -> None:
    reassembler = begun()
    later = chunk(2, 1, 2, "c", attempt=3)
    assert reassembler.add(later) == ReadyChunks(later)
    assert (reassembler.attempt, reassembler.num_tokens, reassembler.text_bytes) == (3, 3, 3)


@pytest.mark.parametrize("first", [chunk(0, 3, 0, "abc", attempt=2), chunk(attempt=2, worker_id="w1")])
@pytest.mark.parametrize("keepalive", [[], [chunk(attempt=2, worker_id=None)]], ids=["", "after a router's keepalive"])
def test_a_later_attempt_that_begins_again_after_something_was_said_breaks_the_stream(
    first: messages.Chunk, keepalive: list[messages.Chunk]
) -> None:
    reassembler = begun()
    for one in keepalive:
        reassembler.add(one)
    with pytest.raises(BrokenStreamError):
        reassembler.add(first)


def test_a_stream_that_continues_an_earlier_one_begins_where_its_first_chunk_says() -> None:
    for first in (chunk(2, 0, 3, worker_id="w1"), chunk(2, 1, 3, "c")):
        reassembler = Reassembler(2)
        assert reassembler.add(chunk(worker_id=None)) == ReadyChunks(chunk(worker_id=None))
        assert reassembler.add(chunk(3, 1, 4, "d")) == Gap()
        assert reassembler.add(first) == ReadyChunks(first)
        assert reassembler.text_bytes == 3 + len(first.text)


def test_attempts_of_a_new_request_are_counted_anew_and_go_on_where_the_stream_is() -> None:
    reassembler = begun()
    reassembler.restart_attempts()
    again = chunk(2, 1, 2, "c", attempt=0)
    assert reassembler.add(again) == ReadyChunks(again)
    reassembler.restart_attempts()
    with pytest.raises(BrokenStreamError):
        reassembler.add(chunk(0, 3, 0, "abc", attempt=1))


def cut(text: str, ends: list[int], start: int, stop: int, last: bool) -> messages.Chunk:
    """Tokens `start` to `stop` of a completion whose tokens end at `ends`."""
    begin = ends[start - 1] if start else 0
    piece = text[begin : ends[stop - 1]] if stop > start else ""
    fields = {"finish_reason": STOP} if last else {}
    return chunk(start, stop - start, len(text[:begin].encode()), piece, **fields)


@given(data=st.data(), text=st.text(max_size=30))
@settings(max_examples=300)
def test_a_stream_with_losses_repeats_and_new_cuts_is_exact_once_everything_has_come(
    data: st.DataObject, text: str
) -> None:
    num_tokens = data.draw(st.integers(1, 12))
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=num_tokens, max_size=num_tokens)))
    ends[-1] = len(text)
    reassembler, said = Reassembler(), ""
    for _ in range(100):
        gapped = False
        at = data.draw(st.integers(0, reassembler.num_tokens))
        while at < num_tokens:
            stop = data.draw(st.integers(at + 1, num_tokens))
            one = cut(text, ends, at, stop, last=stop == num_tokens)
            if data.draw(st.integers(0, 3)):
                match reassembler.add(one):
                    case ReadyChunks(new):
                        assert not gapped
                        said += new.text
                        assert text.startswith(said)
                        if new.finish_reason is STOP:
                            assert said == text
                            return
                    case Gap():
                        gapped = True
            at = stop


# log probabilities of the prompt


def scored(prompt_offset: int, count: int = 0, **fields: object) -> messages.Chunk:
    one = messages.PromptLogprob(id=1, text="a", bytes=[97], logprob=-1.0, rank=1, top=[])
    logprobs = [msgspec.structs.replace(one, id=prompt_offset + place) for place in range(count)]
    return chunk(prompt_offset=prompt_offset, prompt_logprobs=logprobs or UNSET, worker_id="w", **fields)


def scored_ids(added: object) -> list[int] | None:
    return [one.id for one in added.chunk.prompt_logprobs or ()] if isinstance(added, ReadyChunks) else None


def test_log_probabilities_of_a_prompt_are_taken_once_and_in_order() -> None:
    reassembler = Reassembler(prompt_offset=2)
    assert scored_ids(reassembler.add(scored(2))) == []
    assert scored_ids(reassembler.add(scored(2, 3))) == [2, 3, 4]
    assert reassembler.add(scored(2, 3)) == Duplicate()
    assert scored_ids(reassembler.add(scored(3, 4))) == [5, 6]
    assert reassembler.prompt_offset == 7


def test_missing_log_probabilities_of_a_prompt_show_as_a_gap_in_whatever_comes_next() -> None:
    reassembler = Reassembler(prompt_offset=0)
    reassembler.add(scored(0, 2))
    for ahead in (scored(3, 1), scored(3), scored(5, tokens=1, text="a"), scored(5, finish_reason=STOP)):
        assert reassembler.add(ahead) == Gap()
    assert isinstance(reassembler.add(scored(9, finish_reason=ERROR)), ReadyChunks)


def test_an_attempt_that_begins_again_repeats_no_log_probability_of_a_prompt() -> None:
    reassembler = Reassembler(prompt_offset=0)
    reassembler.add(scored(0, 4, attempt=1))
    assert scored_ids(reassembler.add(scored(0, attempt=2))) == []
    assert reassembler.add(scored(0, 3, attempt=2)) == Duplicate()
    assert scored_ids(reassembler.add(scored(3, 3, attempt=2))) == [4, 5]


def test_a_whole_answer_brings_all_log_probabilities_of_its_prompt() -> None:
    reassembler = Reassembler(prompt_offset=1)
    whole = scored(1, 3, tokens=1, text="a", finish_reason=STOP)
    assert reassembler.add(whole) == ReadyChunks(whole)


def test_a_stream_that_continues_another_has_the_log_probabilities_of_its_prompt() -> None:
    reassembler = Reassembler(3, prompt_offset=0)
    assert isinstance(reassembler.add(scored(8, offset=3)), ReadyChunks)
    assert reassembler.prompt_offset == 8
