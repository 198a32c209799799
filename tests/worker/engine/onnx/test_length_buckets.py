"""Sequences decode in batches with no more padding than is allowed."""

from hypothesis import given
from hypothesis import strategies as st

from tokenbus.worker.engine.onnx.dynamic_cache import bucket_by_length

lanes = st.dictionaries(st.integers(0, 40), st.integers(1, 300), max_size=20)


def paddings(lengths: dict[int, int], batch: list[int]) -> int:
    longest = max(lengths[lane] for lane in batch)
    return sum(longest - lengths[lane] for lane in batch)


@given(lanes, st.integers(0, 1_000))
def test_every_lane_is_in_exactly_one_batch_and_none_is_empty(lengths: dict[int, int], most: int) -> None:
    batches = bucket_by_length(lengths, most)
    assert sorted(lane for batch in batches for lane in batch) == sorted(lengths)
    assert all(batches)


@given(lanes, st.integers(0, 1_000))
def test_no_batch_has_more_paddings_than_it_may_and_none_could_take_the_next_lane(
    lengths: dict[int, int], most: int
) -> None:
    batches = bucket_by_length(lengths, most)
    for batch in batches:
        assert paddings(lengths, batch) <= most
    for batch, later in zip(batches, batches[1:], strict=False):
        assert paddings(lengths, [*batch, later[0]]) > most


@given(lanes)
def test_without_paddings_a_batch_is_all_lanes_of_one_length(lengths: dict[int, int]) -> None:
    batches = bucket_by_length(lengths, 0)
    assert [{lengths[lane] for lane in batch} for batch in batches] == [
        {length} for length in sorted(set(lengths.values()), reverse=True)
    ]


@given(lanes)
def test_with_paddings_enough_there_is_one_batch(lengths: dict[int, int]) -> None:
    assert len(bucket_by_length(lengths, 300 * 20)) == bool(lengths)


@given(lanes, st.integers(0, 1_000))
def test_the_same_lanes_come_to_the_same_batches_in_whatever_order(lengths: dict[int, int], most: int) -> None:
    assert bucket_by_length(dict(reversed(lengths.items())), most) == bucket_by_length(lengths, most)


def test_a_batch_is_full_at_its_last_padding_and_not_one_before() -> None:
    lengths = {0: 10, 1: 7, 2: 8}
    assert bucket_by_length(lengths, 5) == [[0, 2, 1]]
    assert bucket_by_length(lengths, 4) == [[0, 2], [1]]
    assert bucket_by_length(lengths, 1) == [[0], [2, 1]]
