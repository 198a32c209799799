"""The order takes what continues a stream, ignores earlier attempts, and notices whatever is missing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client.order import BrokenStreamError, Order
from protocol import messages


def chunk(offset: int = 0, tokens: int = 0, text_offset: int = 0, text: str = "", **fields: object) -> messages.Chunk:
    return messages.Chunk(
        id="r",
        offset=offset,
        tokens=tokens,
        text_offset=text_offset,
        text=text,
        **fields,  # type: ignore[arg-type]
    )


def test_chunks_that_continue_each_other_are_taken_and_counted() -> None:
    order = Order()
    assert all(
        order.take(one)
        for one in (chunk(), chunk(0, 1, 0, "né"), chunk(1, 1, 3), chunk(2, 3, 3, "😀"), chunk(5, 0, 7, "!"))
    )
    assert (order.attempt, order.num_tokens, order.text_bytes) == (0, 5, 8)


@pytest.mark.parametrize(
    "wrong",
    [
        chunk(3, 1, 2, "x"),
        chunk(1, 1, 2, "x"),
        chunk(2, 1, 3, "x"),
        chunk(2, 1, 1, "x"),
        chunk(0, 2, 0, "ab"),
        chunk(3, 1, 2),
        chunk(2, 0, 3, "x"),
        chunk(3, 1, 2, "x", finish_reason=messages.FinishReason.STOP),
    ],
)
def test_a_gap_or_a_repetition_of_tokens_or_text_breaks_the_stream(wrong: messages.Chunk) -> None:
    order = Order()
    order.take(chunk(0, 2, 0, "ab"))
    with pytest.raises(BrokenStreamError, match="token 2, byte 2 was to come"):
        order.take(wrong)
    assert (order.num_tokens, order.text_bytes) == (2, 2)


def test_a_first_chunk_that_is_missing_breaks_the_stream() -> None:
    with pytest.raises(BrokenStreamError):
        Order().take(chunk(1, 1, 1, "b"))


def test_what_carries_nothing_may_come_with_the_offsets_of_whoever_sent_it() -> None:
    order = Order()
    order.take(chunk(0, 2, 0, "ab"))
    assert order.take(chunk())
    assert order.take(chunk(finish_reason=messages.FinishReason.ERROR))
    assert (order.num_tokens, order.text_bytes) == (2, 2)


def test_chunks_of_an_earlier_attempt_are_ignored_whatever_they_carry() -> None:
    order = Order()
    order.take(chunk(attempt=2))
    assert not order.take(chunk(0, 1, 0, "old", attempt=1))
    assert not order.take(chunk(7, 1, 9, "old", attempt=0, finish_reason=messages.FinishReason.STOP))
    assert (order.attempt, order.num_tokens, order.text_bytes) == (2, 0, 0)


def test_a_later_attempt_goes_on_where_the_stream_is() -> None:
    order = Order()
    order.take(chunk(0, 2, 0, "ab", attempt=1))
    assert order.take(chunk(2, 1, 2, "c", attempt=3))
    assert (order.attempt, order.num_tokens, order.text_bytes) == (3, 3, 3)


def test_a_later_attempt_that_begins_again_after_something_was_said_breaks_the_stream() -> None:
    order = Order()
    order.take(chunk(0, 2, 0, "ab"))
    with pytest.raises(BrokenStreamError):
        order.take(chunk(0, 1, 0, "a", attempt=1))


@given(
    pieces=st.lists(st.tuples(st.integers(0, 3), st.text(max_size=4)), min_size=1, max_size=12),
    lost=st.sets(st.integers(0, 11)),
)
@settings(max_examples=200, deadline=None)
def test_a_stream_is_taken_up_to_the_first_chunk_behind_one_that_was_lost(
    pieces: list[tuple[int, str]], lost: set[int]
) -> None:
    stream, tokens, text_bytes = [], 0, 0
    for count, text in pieces:
        stream.append(chunk(tokens, count, text_bytes, text))
        tokens, text_bytes = tokens + count, text_bytes + len(text.encode())
    order, missing = Order(), False
    for place, one in enumerate(stream):
        carries = bool(one.tokens or one.text)
        if place in lost:
            missing = missing or carries
        elif missing and carries:
            with pytest.raises(BrokenStreamError):
                order.take(one)
            return
        else:
            assert order.take(one)
    if not missing:
        assert (order.num_tokens, order.text_bytes) == (tokens, text_bytes)
