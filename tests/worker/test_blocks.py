"""The block pool counts what is promised and what is used, and never promises more than there is."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from worker.engine.blocks import BlockPool


def test_a_pool_promises_its_last_token_and_not_one_more() -> None:
    pool = BlockPool(total_blocks=4, block_size=16)
    assert pool.can_promise(64)
    assert not pool.can_promise(65)
    pool.promise(1, 64)
    assert pool.free_blocks == 0
    assert pool.can_promise(0)
    assert not pool.can_promise(1)
    with pytest.raises(AssertionError):
        pool.promise(2, 1)
    pool.check_integrity()


@pytest.mark.parametrize(("num_tokens", "blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_block_that_is_begun_is_promised_and_used_whole(num_tokens: int, blocks: int) -> None:
    pool = BlockPool(total_blocks=8, block_size=16)
    pool.promise(1, num_tokens)
    assert pool.free_blocks == 8 - blocks
    pool.use(1, num_tokens)
    assert pool.used_blocks == blocks


def test_what_fits_an_empty_pool_can_be_promised_some_day_and_one_token_more_never() -> None:
    pool = BlockPool(total_blocks=2, block_size=8)
    pool.promise(1, 16)
    assert pool.can_ever_promise(16)
    assert not pool.can_ever_promise(17)


def test_a_sequence_may_use_all_that_it_was_promised_and_not_a_block_more() -> None:
    pool = BlockPool(total_blocks=8, block_size=4)
    pool.promise(1, 8)
    pool.use(1, 8)
    assert pool.used_blocks == 2
    with pytest.raises(AssertionError):
        pool.use(1, 9)
    assert pool.used_blocks == 2
    pool.check_integrity()


def test_what_a_sequence_uses_never_shrinks() -> None:
    pool = BlockPool(total_blocks=8, block_size=4)
    pool.promise(1, 8)
    pool.use(1, 5)
    pool.use(1, 6)
    with pytest.raises(AssertionError):
        pool.use(1, 4)
    assert pool.used_blocks == 2


def test_promised_blocks_are_not_free_before_they_are_used_and_not_counted_as_used() -> None:
    pool = BlockPool(total_blocks=8, block_size=4)
    pool.promise(1, 12)
    assert (pool.free_blocks, pool.used_blocks) == (5, 0)
    pool.use(1, 4)
    assert (pool.free_blocks, pool.used_blocks) == (5, 1)


def test_a_release_gives_everything_back_and_leaves_the_neighbours_alone() -> None:
    pool = BlockPool(total_blocks=8, block_size=4)
    pool.promise(1, 12)
    pool.promise(2, 8)
    pool.use(1, 3)
    pool.use(2, 8)
    pool.release(1)
    assert (pool.free_blocks, pool.used_blocks) == (6, 2)
    pool.release(2)
    assert (pool.free_blocks, pool.used_blocks) == (8, 0)
    pool.check_integrity()


def test_a_sequence_is_promised_room_once() -> None:
    pool = BlockPool(total_blocks=8, block_size=4)
    pool.promise(1, 4)
    with pytest.raises(AssertionError):
        pool.promise(1, 4)
    assert pool.free_blocks == 7


def test_a_sequence_without_a_promise_can_neither_use_nor_release() -> None:
    pool = BlockPool(total_blocks=8, block_size=4)
    with pytest.raises(KeyError):
        pool.use(1, 1)
    with pytest.raises(KeyError):
        pool.release(1)
    pool.check_integrity()


@pytest.mark.parametrize(("total_blocks", "block_size"), [(0, 16), (4, 0)])
def test_a_pool_of_nothing_cannot_be_made(total_blocks: int, block_size: int) -> None:
    with pytest.raises(AssertionError):
        BlockPool(total_blocks, block_size)


class PoolHistory(RuleBasedStateMachine):
    """Holds the pool against two dicts and counting by hand."""

    holders = Bundle("holders")

    @initialize(total_blocks=st.integers(1, 12), block_size=st.integers(1, 7))
    def make(self, total_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(total_blocks, block_size)
        self.promised: dict[int, int] = {}
        self.used: dict[int, int] = {}
        self.last = 0

    def blocks(self, num_tokens: int) -> int:
        return len(range(0, num_tokens, self.pool.block_size))

    @property
    def free(self) -> int:
        return self.pool.total_blocks - sum(map(self.blocks, self.promised.values()))

    @rule(target=holders, num_tokens=st.integers(1, 60))
    def promise(self, num_tokens: int) -> object:
        fits = self.blocks(num_tokens) <= self.free
        assert self.pool.can_promise(num_tokens) == fits
        assert self.pool.can_ever_promise(num_tokens) == (self.blocks(num_tokens) <= self.pool.total_blocks)
        if not fits:
            return multiple()
        self.last += 1
        self.pool.promise(self.last, num_tokens)
        self.promised[self.last], self.used[self.last] = num_tokens, 0
        return self.last

    @rule(seq_no=holders, more=st.integers(0, 20))
    def use(self, seq_no: int, more: int) -> None:
        self.used[seq_no] = min(self.used[seq_no] + more, self.promised[seq_no])
        self.pool.use(seq_no, self.used[seq_no])

    @rule(seq_no=consumes(holders))
    def release(self, seq_no: int) -> None:
        self.pool.release(seq_no)
        del self.promised[seq_no], self.used[seq_no]

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_integrity()
        assert self.pool.free_blocks == self.free
        assert self.pool.used_blocks == sum(map(self.blocks, self.used.values()))

    def teardown(self) -> None:
        for seq_no in list(self.promised):
            self.release(seq_no)
            self.agrees_with_the_model()
        assert (self.pool.free_blocks, self.pool.used_blocks) == (self.pool.total_blocks, 0)


TestPoolHistory = PoolHistory.TestCase
TestPoolHistory.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
