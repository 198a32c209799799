"""A replay buffer gives back exactly what was appended, from any token on."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.worker.contract import engine_output
from tokenbus.worker.streams.replay_buffer import ReplayBuffer, Segment

PIECES = st.lists(st.tuples(st.integers(1, 3), st.text(max_size=6)), max_size=30)


def buffer_of(pieces: list[tuple[int, str]]) -> ReplayBuffer:
    buffer = ReplayBuffer()
    for count, text in pieces:
        start = buffer.num_tokens
        buffer.append(list(range(start, start + count)), text)
    return buffer


def whole_of(buffer: ReplayBuffer) -> Segment:
    return buffer.segment(0, buffer.end)


def test_it_is_empty_at_first() -> None:
    buffer = ReplayBuffer()
    assert (buffer.num_tokens, buffer.end, list(buffer.segments(0, 100))) == (0, 0, [])
    assert whole_of(buffer) == Segment(0, 0, 0, "", [], [])


def test_a_segment_starts_at_the_byte_where_its_first_token_does() -> None:
    buffer = buffer_of([(1, "né"), (1, ""), (1, "😀"), (1, "!")])
    (segment,) = buffer.segments(2, 1_000)
    assert segment == Segment(2, 2, 3, "😀!", [2, 3], [])


def test_text_of_several_tokens_comes_with_the_last_of_them() -> None:
    buffer = buffer_of([(3, "abc")])
    assert next(buffer.segments(2, 1_000)).text == "abc"
    assert next(buffer.segments(0, 1_000)).num_tokens == 3


def test_what_comes_without_a_token_is_behind_the_last_one() -> None:
    call = engine_output.ToolCallPart(0, "{}", "c1", "f")
    buffer = buffer_of([(1, "a"), (1, "b")])
    buffer.append([], "c", reasoning="so", tool_calls=[call])
    assert [segment.text for segment in buffer.segments(0, 1_000, 2)] == ["ab"]
    last = buffer.segment(2, buffer.end)
    assert (last.num_tokens, last.text_offset, last.text, last.token_ids, last.reasoning) == (0, 2, "c", [], "so")
    assert [one.function.arguments for one in last.tool_calls if one.function] == ["{}"]
    assert whole_of(buffer).text == "abc"


@pytest.mark.parametrize("offset", [2, 7])
def test_after_the_last_token_there_is_nothing(offset: int) -> None:
    assert list(buffer_of([(2, "ab")]).segments(offset, 100)) == []


def likely(token_id: int, *alternatives: int) -> engine_output.Logprob:
    """With numbers that tell all of them apart."""
    return engine_output.Logprob(token_id, -token_id / 8, [(other, -other / 16) for other in alternatives])


def test_each_token_keeps_its_own_log_probability_and_those_of_its_alternatives() -> None:
    buffer = ReplayBuffer(num_alternatives=2)
    said = [likely(5, 5, 6), likely(7, 8, 9), likely(1, 2, 3)]
    buffer.append([5], "a", said[:1])
    buffer.append([7, 1], "b", said[1:])
    assert whole_of(buffer).logprobs == said
    assert [one for segment in buffer.segments(1, 1) for one in segment.logprobs] == said[1:]


def test_surplus_alternatives_are_dropped_and_too_few_are_a_fault() -> None:
    buffer = ReplayBuffer(num_alternatives=1)
    buffer.append([5], "a", [likely(5, 6, 7)])
    assert whole_of(buffer).logprobs == [likely(5, 6)]
    with pytest.raises(struct.error):
        buffer.append([5], "a", [likely(5)])


def test_a_token_without_its_log_probability_is_a_fault_if_those_are_kept() -> None:
    with pytest.raises(AssertionError):
        ReplayBuffer(num_alternatives=0).append([5], "a")


def test_log_probabilities_that_nobody_asked_for_are_not_kept() -> None:
    buffer = ReplayBuffer()
    buffer.append([5], "a", [likely(5, 6)])
    assert whole_of(buffer).logprobs == []


def test_memory_counts_text_tokens_and_log_probabilities() -> None:
    assert buffer_of([(1, "né"), (1, "")]).memory_bytes == 3 + 2 * 8
    buffer = ReplayBuffer(num_alternatives=1)
    buffer.append([5], "a", [likely(5, 6)])
    assert buffer.memory_bytes == 1 + 8 + 2 * 12


def test_log_probabilities_count_for_the_size_of_a_segment() -> None:
    buffer = ReplayBuffer(num_alternatives=0)
    for token_id in range(4):
        buffer.append([token_id], "a", [likely(token_id)])
    two = 2 * (6 + 11 + 2_700)
    assert [segment.num_tokens for segment in buffer.segments(0, two)] == [2, 2]
    assert [segment.num_tokens for segment in buffer.segments(0, two - 1)] == [1, 1, 1, 1]


@given(pieces=PIECES, max_bytes=st.integers(1, 200), data=st.data())
def test_the_segments_from_any_token_on_are_what_was_appended_from_there_on(
    pieces: list[tuple[int, str]], max_bytes: int, data: st.DataObject
) -> None:
    buffer = buffer_of(pieces)
    offset = data.draw(st.integers(0, buffer.num_tokens))
    segments = list(buffer.segments(offset, max_bytes))
    whole = whole_of(buffer)
    at, text_at = offset, None
    for segment in segments:
        assert segment.offset == at
        assert text_at is None or segment.text_offset == text_at
        assert segment.num_tokens == len(segment.token_ids) > 0
        size = 6 * len(segment.text.encode()) + 11 * segment.num_tokens
        assert size <= max_bytes or segment.num_tokens == 1
        at, text_at = segment.offset + segment.num_tokens, segment.text_offset + len(segment.text.encode())
    assert at == buffer.num_tokens
    assert [one for segment in segments for one in segment.token_ids] == whole.token_ids[offset:]
    if segments:
        assert whole.text.encode()[segments[0].text_offset :].decode() == "".join(p.text for p in segments)


def test_what_another_worker_has_published_can_be_published_again() -> None:
    buffer = ReplayBuffer(num_alternatives=1)
    said = [likely(5, 6), likely(7, 8), likely(9, 1)]
    buffer.append_resumed([5, 7], ["né", "b"], said[:2])
    buffer.append([9], "c", said[2:])
    assert whole_of(buffer) == Segment(0, 3, 0, "nébc", [5, 7, 9], said)


@given(texts=st.lists(st.text(max_size=4), min_size=1, max_size=8))
def test_what_another_worker_has_published_is_kept_as_if_it_had_been_published_here(texts: list[str]) -> None:
    token_ids = list(range(len(texts)))
    here, resumed = buffer_of([(1, text) for text in texts]), ReplayBuffer()
    resumed.append_resumed(token_ids, texts)
    for offset in token_ids:
        assert list(resumed.segments(offset, 20)) == list(here.segments(offset, 20))


def test_tokens_whose_log_probabilities_are_unknown_count_but_are_not_published_again() -> None:
    buffer = ReplayBuffer(num_alternatives=1)
    buffer.append_resumed([4, 5, 6], ["é", "b", "c"], [likely(6, 1)])
    buffer.append([7], "d", [likely(7, 1)])
    assert (buffer.num_tokens, buffer.text_offset(4)) == (4, 5)
    for offset in (0, 1, 2):
        (segment,) = buffer.segments(offset, 100_000)
        assert segment == Segment(2, 2, 3, "cd", [6, 7], [likely(6, 1), likely(7, 1)])
    assert next(buffer.segments(3, 100_000)).logprobs == [likely(7, 1)]
    with pytest.raises(AssertionError):
        whole_of(buffer)


def test_reasoning_and_calls_of_another_worker_come_with_the_log_probabilities_that_are_known() -> None:
    buffer = ReplayBuffer(1)
    parts = {
        0: engine_output.AnswerParts("why"),
        2: engine_output.AnswerParts("", (engine_output.ToolCallPart(0, "{", "id", "f"),)),
    }
    buffer.append_resumed([4, 5, 6], ["", "b", ""], [likely(5, 1), likely(6, 1)], parts)
    (segment,) = buffer.segments(0, 100_000)
    assert (segment.offset, segment.token_ids, segment.logprobs) == (1, [5, 6], [likely(5, 1), likely(6, 1)])
    assert (segment.text, segment.reasoning_offset, len(segment.tool_calls)) == ("b", 3, 1)


def test_what_another_worker_has_published_comes_first() -> None:
    with pytest.raises(AssertionError):
        buffer_of([(1, "a")]).append_resumed([8], ["e"])


def test_log_probabilities_are_no_matter_where_none_are_kept() -> None:
    buffer = ReplayBuffer()
    buffer.append_resumed([4], ["a"])
    assert next(buffer.segments(0, 100)).text == "a"
