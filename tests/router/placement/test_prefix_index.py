"""The prefix index agrees with a set of blocks for each worker, and stays within the advertised numbers."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenbus.router.placement.prefix_index import MatchLevel, PrefixIndex

A, B, C = 1, 2, 4


def chains(*depths: int) -> PrefixIndex:
    """Returns an index of workers that hold that many leading blocks each of the prompt 0, 1, 2, ..."""
    index = PrefixIndex()
    for depth in depths:
        row = index.add_worker(1_000)
        index.store(row, range(depth))
    return index


def test_levels_come_with_the_most_overlap_first() -> None:
    assert chains(3, 7, 3).match(range(10)) == [MatchLevel(7, B), MatchLevel(3, A | C)]


def test_a_worker_with_checkpoints_is_found_by_the_last_of_its_blocks() -> None:
    index = chains(3, 7)
    rows = [index.add_worker(10, has_checkpoints=True) for _ in range(3)]
    index.store(rows[0], [1, 4])
    index.store(rows[1], [6, 12])
    index.store(rows[2], [20])
    assert index.match(range(10)) == [MatchLevel(7, B | 1 << rows[1]), MatchLevel(5, 1 << rows[0]), MatchLevel(3, A)]
    index.remove(rows[0], [4])
    assert index.match(range(10))[1:] == [MatchLevel(3, A), MatchLevel(2, 1 << rows[0])]
    index.remove_worker(rows[1])
    assert index.match(range(8))[0] == MatchLevel(7, B)


def test_a_worker_may_come_to_hold_single_blocks() -> None:
    index = PrefixIndex()
    row = index.add_worker(10)
    index.store(row, [4])
    assert index.match(range(10)) == []
    index.update_worker(row, 10, has_checkpoints=True)
    assert index.match(range(10)) == [MatchLevel(5, A)]
    index.update_worker(row, 10)
    assert index.match(range(10)) == []


def test_a_prompt_without_a_full_block_matches_nobody() -> None:
    assert chains(3).match([]) == []


def test_a_block_after_a_gap_is_not_part_of_the_overlap() -> None:
    index = PrefixIndex()
    index.store(index.add_worker(10), [0, 1, 3, 4])
    assert index.match(range(2, 6)) == []
    assert index.match([0, 1]) == [MatchLevel(2, A)]


def test_blocks_beyond_the_advertised_number_are_ignored() -> None:
    index = PrefixIndex()
    row = index.add_worker(3)
    index.store(row, range(5))
    assert (index.num_blocks_of(row), index.num_refused) == (3, 2)
    index.remove(row, [0])
    index.store(row, [9])
    assert (index.num_blocks_of(row), index.num_refused) == (3, 2)


def test_a_block_that_is_stored_twice_counts_once_and_an_unknown_block_is_not_removed() -> None:
    index = chains(3)
    index.store(0, range(3))
    index.remove(0, [7, 8])
    assert index.num_blocks_of(0) == 3
    index.check_integrity()


def test_a_removed_worker_is_not_found_and_its_row_is_not_reused_before_it_is_swept() -> None:
    index = chains(5, 5)
    index.remove_worker(0)
    assert index.add_worker(10) == 2
    assert index.match(range(5)) == [MatchLevel(5, B)]
    while index.sweep():
        pass
    index.check_integrity()
    assert index.add_worker(10) == 0
    assert index.match(range(5)) == [MatchLevel(5, B)]
    index.remove_worker(1)
    while index.sweep():
        pass
    assert len(index) == 0


def test_a_worker_that_is_removed_during_a_sweep_is_swept_by_the_next_one() -> None:
    index = PrefixIndex()
    for _ in range(2):
        index.store(index.add_worker(20_000), range(10_000))
    index.remove_worker(0)
    assert index.sweep()
    index.remove_worker(1)
    while index.sweep():
        index.check_integrity()
    assert len(index) == 0


@settings(max_examples=300)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(0, 40))
def test_the_overlap_of_every_worker_is_found_exactly(depths: list[int], length: int) -> None:
    overlap = np.zeros(len(depths))
    for level in chains(*depths).match(range(length)):
        level.write_to(overlap)
    assert overlap.tolist() == [min(depth, length) for depth in depths]


NAMES = st.lists(st.integers(0, 30), max_size=12)


class AgainstATable(RuleBasedStateMachine):
    """Compares the index with a set of blocks for each worker, over any history."""

    @initialize()
    def begin(self) -> None:
        self.index = PrefixIndex()
        self.table: dict[int, set[int]] = {}
        self.most: dict[int, int] = {}

    @precondition(lambda self: len(self.table) < 5)
    @rule(most=st.integers(0, 20))
    def add_worker(self, most: int) -> None:
        row = self.index.add_worker(most)
        assert row not in self.table
        self.table[row], self.most[row] = set(), most

    @precondition(lambda self: self.table)
    @rule(data=st.data(), names=NAMES)
    def store(self, data: st.DataObject, names: list[int]) -> None:
        row = data.draw(st.sampled_from(sorted(self.table)))
        self.index.store(row, names)
        for name in names:
            if len(self.table[row]) < self.most[row]:
                self.table[row].add(name)

    @precondition(lambda self: self.table)
    @rule(data=st.data(), names=NAMES)
    def remove(self, data: st.DataObject, names: list[int]) -> None:
        row = data.draw(st.sampled_from(sorted(self.table)))
        self.index.remove(row, names)
        self.table[row] -= set(names)

    @precondition(lambda self: self.table)
    @rule(data=st.data())
    def remove_worker(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.table)))
        self.index.remove_worker(row)
        del self.table[row], self.most[row]

    @rule()
    def sweep(self) -> None:
        self.index.sweep()

    @invariant()
    def says_the_same(self) -> None:
        self.index.check_integrity()
        for row, names in self.table.items():
            assert set(self.index.blocks_of(row)) == names
            assert self.index.num_blocks_of(row) == len(names)
        holders = sum(1 << row for row, names in self.table.items() if 30 in names)
        assert self.index.match([30]) == ([MatchLevel(1, holders)] if holders else [])


TestAgainstATable = AgainstATable.TestCase
TestAgainstATable.settings = settings(max_examples=100, stateful_step_count=40)
