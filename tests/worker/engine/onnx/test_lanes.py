"""Lanes with memory of their own hold the same tokens as lanes that share memory would."""

from hypothesis import given
from hypothesis import strategies as st

from tokenbus.worker.engine.kv.ops import Share, Truncate
from tokenbus.worker.engine.onnx.kv_cache import Copy, LaneLengths, LaneTransfer, Shrink
from tokenbus.worker.engine.onnx.static_cache import RowTable

NUM_LANES = 6


def test_a_share_is_a_copy() -> None:
    lanes = LaneLengths(2)
    lanes.grow(0, 0, 10)
    assert lanes.resolve([Share(0, 1, 0, 8)]) == [Copy(0, 1, 0, 8)]
    assert lanes.lengths == [10, 8]


def test_a_lane_that_is_emptied_after_sharing_hands_its_memory_over() -> None:
    lanes = LaneLengths(3)
    lanes.grow(0, 0, 10)
    assert lanes.resolve([Share(0, 1, 0, 8), Share(0, 2, 0, 8), Truncate(0, 0)]) == [
        Copy(0, 1, 0, 8),
        LaneTransfer(0, 2, 8),
    ]
    assert lanes.lengths == [0, 8, 8]


def test_a_block_that_another_has_computed_too_is_not_copied() -> None:
    lanes = LaneLengths(2)
    lanes.grow(0, 0, 8)
    lanes.grow(1, 0, 10)
    assert lanes.resolve([Truncate(1, 0, 8), Share(0, 1, 0, 8), Truncate(0, 0)]) == [Shrink(0, 0)]
    assert lanes.lengths == [0, 10]


def test_truncating_beyond_a_lanes_length_does_nothing() -> None:
    lanes = LaneLengths(1)
    lanes.grow(0, 0, 8)
    assert lanes.resolve([Truncate(0, 8)]) == []


@st.composite
def _histories(draw: st.DrawFn) -> list[tuple[list[int], list[list[int]]]]:
    """The lengths of all lanes before each step, and the lanes that decode in it, in up to three groups."""
    steps = []
    for _ in range(draw(st.integers(1, 12))):
        lengths = draw(st.lists(st.sampled_from([0, 0, 1, 3, 7]), min_size=NUM_LANES, max_size=NUM_LANES))
        filled = [lane for lane, length in enumerate(lengths) if length]
        decoding = draw(st.lists(st.sampled_from(filled), unique=True)) if filled else []
        cuts = sorted(draw(st.lists(st.integers(0, len(decoding)), min_size=2, max_size=2)))
        steps.append((lengths, [decoding[: cuts[0]], decoding[cuts[0] : cuts[1]], decoding[cuts[1] :]]))
    return steps


@given(_histories())
def test_gathering_rows_loses_no_token_and_leaves_no_hole(history: list[tuple[list[int], list[list[int]]]]) -> None:
    lengths = [0] * NUM_LANES
    rows = RowTable(NUM_LANES, lengths)
    memory: list[list[str]] = [[] for _ in range(NUM_LANES + 1)]
    for step, (wanted, groups) in enumerate(history):
        for lane, length in enumerate(wanted):
            if not lengths[lane] and length:
                rows.claim_first_free_row(lane)
            lengths[lane] = length
            memory[rows.row_of(lane)][:] = [f"{lane}.{step}.{place}" for place in range(length)]
        for copy in rows.gather(groups):
            memory[copy.target][: copy.num_tokens] = memory[copy.source][: copy.num_tokens]
        rows.check_integrity()
        first = 0
        for lanes in groups:
            assert sorted(map(rows.row_of, lanes)) == list(range(first, first + len(lanes)))
            first += len(lanes)
        for lane, length in enumerate(lengths):
            expected = [f"{lane}.{step}.{place}" for place in range(length)]
            assert memory[rows.row_of(lane)][:length] == expected


def test_an_empty_lane_claims_the_first_free_row() -> None:
    lengths = [5, 0, 0, 0]
    rows = RowTable(4, lengths)
    rows.claim_first_free_row(3)
    assert rows.row_of(3) == 1
    lengths[3] = 4
    assert rows.gather([[0, 3]]) == []


def test_rows_that_are_all_full_are_exchanged_through_the_spare_one() -> None:
    rows = RowTable(3, [5, 6, 7])
    assert [(copy.source, copy.target) for copy in rows.gather([[2]])] == [(0, 3), (2, 0), (3, 2)]
