"""A snapshot lists exactly the blocks that events have published."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.protocol.wire import internal
from tokenbus.worker.broker.event_log import PublishedBlocks, to_runs

ROOT = 1


def run(parent: int, *hashes: int) -> internal.BlockRun:
    return internal.BlockRun(parent=parent, hashes=list(hashes))


def published(*stored: tuple[int, int]) -> PublishedBlocks:
    one = PublishedBlocks()
    one.apply([], stored)
    return one


def pairs_of(runs: list[internal.BlockRun]) -> list[tuple[int, int]]:
    """Every block behind the one before it, as a reader of runs sees them."""
    return [pair for one in runs for pair in zip([one.parent, *one.hashes], one.hashes, strict=False)]


def test_there_are_no_blocks_at_first() -> None:
    assert PublishedBlocks().runs() == []


def test_blocks_that_follow_one_another_are_one_run() -> None:
    assert published((ROOT, 2), (2, 3), (3, 4)).runs() == [run(ROOT, 2, 3, 4)]


def test_a_fork_starts_a_run_and_so_does_another_root() -> None:
    assert published((ROOT, 2), (2, 3), (2, 4), (4, 5), (9, 6)).runs() == [run(ROOT, 2, 3), run(2, 4, 5), run(9, 6)]


def test_a_removed_block_may_be_stored_again_in_the_same_report() -> None:
    one = published((ROOT, 2), (2, 3))
    one.apply([3, 2], [(ROOT, 2)])
    assert list(one.pairs()) == [(ROOT, 2)]


def test_a_known_block_cannot_be_stored_and_an_unknown_one_cannot_be_removed() -> None:
    one = published((ROOT, 2))
    with pytest.raises(AssertionError):
        one.apply([], [(ROOT, 2)])
    with pytest.raises(KeyError):
        one.apply([3], [])
    assert list(one.pairs()) == [(ROOT, 2)]


def test_there_are_no_blocks_after_clearing() -> None:
    one = published((ROOT, 2), (2, 3))
    one.clear()
    assert one.runs() == []


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**64 - 1)), max_size=30))
def test_runs_hold_exactly_the_pairs_that_they_were_made_of(steps: list[tuple[int, int]]) -> None:
    """Each block follows one of the last four, or a root."""
    pairs: list[tuple[int, int]] = []
    for back, name in steps:
        parent = pairs[-back][1] if 0 < back <= len(pairs) else ROOT
        pairs.append((parent, name))
    runs = list(to_runs(pairs))
    assert pairs_of(runs) == pairs
    assert all(one.hashes for one in runs)
    assert all(after.parent != before.hashes[-1] for before, after in zip(runs, runs[1:], strict=False))


@given(st.data())
def test_parents_always_come_first(data: st.DataObject) -> None:
    one, parents = PublishedBlocks(), dict[int, int]()
    for name in range(2, data.draw(st.integers(2, 40))):
        leaves = sorted(set(parents) - set(parents.values()))
        gone = data.draw(st.sampled_from([None, *leaves]))
        if gone is not None:
            one.apply([gone], [])
            del parents[gone]
        parent = data.draw(st.sampled_from([ROOT, *parents]))
        one.apply([], [(parent, name)])
        parents[name] = parent
    seen = {ROOT}
    for parent, name in one.pairs():
        assert parent in seen
        seen.add(name)
    assert pairs_of(one.runs()) == list(one.pairs())
    assert {name: parent for parent, name in one.pairs()} == parents
