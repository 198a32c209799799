"""The block pool reserves the blocks there are, each of them once."""

import pytest

from tests.support.block_cache import Cache
from tokenbus.worker.engine.kv.pool import BlockPool


def test_a_pool_reserves_its_last_token_and_not_one_more() -> None:
    cache = Cache(total_blocks=4)
    assert cache.can_allocate(16)
    assert not cache.can_allocate(17)
    cache.allocate(1, "abcde", max_tokens=12)
    assert cache.pool.reserved_blocks == 3
    assert cache.can_allocate(4)
    assert not cache.can_allocate(5)


def test_overcommitment_reserves_more_but_not_for_a_full_reservation() -> None:
    cache = Cache(total_blocks=4, overcommit=1.5)
    cache.allocate(1, "abcde", max_tokens=12)
    assert cache.can_allocate(12)
    assert not cache.can_allocate(13)
    assert cache.can_allocate(4, fully=True)
    assert not cache.can_allocate(5, fully=True)


def test_a_fraction_of_a_block_is_not_reserved() -> None:
    cache = Cache(total_blocks=3, overcommit=1.5)
    assert cache.can_allocate(16)
    assert not cache.can_allocate(17)


@pytest.mark.parametrize("overcommit", [1.0, 4.0])
def test_what_fits_an_empty_pool_can_be_allocated_some_day_and_one_token_more_never(overcommit: float) -> None:
    cache = Cache(total_blocks=2, overcommit=overcommit)
    cache.allocate(1, "a", max_tokens=8)
    assert cache.pool.can_ever_allocate(8)
    assert not cache.pool.can_ever_allocate(9)


@pytest.mark.parametrize("is_running", [True, False])
def test_blocks_that_a_sequence_would_share_are_not_reserved_twice(is_running: bool) -> None:
    cache = Cache(total_blocks=4)
    cache.allocate(1, "aaaabbbb")
    cache.compute(1, 8)
    if not is_running:
        cache.free(1)
    assert cache.can_allocate(16, "aaaabbbbc")
    assert not cache.can_allocate(17, "aaaabbbbc")
    assert cache.can_allocate(8, "other", fully=True)
    assert cache.can_allocate(9, "other", fully=True) is not is_running


def test_reserved_blocks_may_be_evictable_ones_which_go_when_they_are_needed() -> None:
    cache = Cache(total_blocks=2)
    cache.run("aaaabbbb")
    assert cache.blocks == (0, 2, 0)
    cache.allocate(1, "cccc", max_tokens=8)
    assert (cache.blocks, cache.pool.reserved_blocks) == ((0, 2, 0), 2)
    cache.compute(1, 4)
    assert (cache.blocks, cache.pool.reserved_blocks) == ((1, 1, 0), 1)


def test_without_room_for_a_reservation_nothing_changes() -> None:
    cache = Cache(total_blocks=3, overcommit=2.0)
    cache.allocate(1, "a" * 8)
    cache.allocate(2, "b" * 8)
    assert cache.allocate_blocks(1, 8)
    assert cache.allocate_blocks(2, 4)
    assert not cache.allocate_blocks(2, 5)
    assert (cache.blocks, cache.pool.reserved_blocks) == ((3, 0, 0), 1)
    cache.free(1)
    assert cache.allocate_blocks(2, 5)


def test_a_sequence_may_use_its_whole_reservation_and_not_a_block_more() -> None:
    cache = Cache(total_blocks=8)
    cache.allocate(1, "a", max_tokens=8)
    assert cache.allocate_blocks(1, 8)
    with pytest.raises(AssertionError):
        cache.allocations[1].allocate_blocks(9)


@pytest.mark.parametrize(("num_tokens", "used"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_one_token_uses_a_whole_block(num_tokens: int, used: int) -> None:
    cache = Cache()
    cache.allocate(1, "a" * 12)
    cache.compute(1, num_tokens)
    assert cache.pool.cache.used_blocks == used
    assert cache.pool.reserved_blocks == 3 - used


@pytest.mark.parametrize(("total_blocks", "block_size", "overcommit"), [(0, 16, 1.0), (4, 0, 1.0), (4, 16, 0.99)])
def test_a_pool_without_blocks_or_with_overcommitment_below_one_cannot_be_made(
    total_blocks: int, block_size: int, overcommit: float
) -> None:
    with pytest.raises(AssertionError):
        BlockPool(total_blocks, block_size, 4, overcommit=overcommit)
