"""Packed log probabilities come out as they went in, also when packed tokens were put together or cut apart."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.worker.contract import engine_output
from tokenbus.worker.streams import replay_buffer

PAIRS = st.tuples(st.integers(0, 2**32 - 1), st.floats(max_value=0, allow_nan=False))


@st.composite
def likely_tokens(draw: st.DrawFn) -> tuple[int, list[engine_output.Logprob]]:
    count = draw(st.integers(0, 20))
    tops = st.lists(PAIRS, min_size=count, max_size=count)
    tokens = st.builds(lambda own, top: engine_output.Logprob(own[0], own[1], top), PAIRS, tops)
    return count, draw(st.lists(tokens, max_size=5))


@given(likely_tokens())
def test_they_come_out_exactly_as_they_went_in(found: tuple[int, list[engine_output.Logprob]]) -> None:
    count, logprobs = found
    assert replay_buffer.unpack_logprobs(replay_buffer.pack_logprobs(logprobs, count), count) == logprobs


@given(likely_tokens(), st.data())
def test_packed_tokens_can_be_put_together(found: tuple[int, list[engine_output.Logprob]], data: st.DataObject) -> None:
    count, logprobs = found
    at = data.draw(st.integers(0, len(logprobs)))
    together = replay_buffer.pack_logprobs(logprobs[:at], count) + replay_buffer.pack_logprobs(logprobs[at:], count)
    assert replay_buffer.unpack_logprobs(together, count) == logprobs


def test_each_token_takes_twelve_bytes_and_twelve_for_each_alternative() -> None:
    assert len(replay_buffer.pack_logprobs([engine_output.Logprob(1, -0.5, [(1, -0.5), (2, -1.0)])], 2)) == 36


@pytest.mark.parametrize("size", [1, 11, 12, 23, 25, 35])
def test_data_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} bytes"):
        replay_buffer.unpack_foreign_logprobs(bytes(size), num_alternatives=1)


@pytest.mark.parametrize("logprob", [1e-300, float("inf"), float("nan")])
def test_numbers_that_are_no_log_probability_are_refused(logprob: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        replay_buffer.unpack_foreign_logprobs(struct.pack("<Id", 1, logprob), num_alternatives=0)
