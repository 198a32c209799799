"""The block pool gives out the blocks there are, each of them once."""

import pytest

from tests.support.block_cache import Cache
from tokenbus.worker.engine.kv.pool import BlockPool


def test_a_pool_has_room_for_its_last_token_and_not_for_one_more() -> None:
    cache = Cache(total_blocks=4)
    assert cache.can_allocate(16)
    assert not cache.can_allocate(17)
    cache.allocate(1, "abcde")
    cache.compute(1, 5)
    assert cache.can_allocate(8)
    assert not cache.can_allocate(9)


def test_blocks_that_are_reserved_for_others_are_no_room() -> None:
    cache = Cache(total_blocks=4)
    assert cache.can_allocate(12, reserved_blocks=1)
    assert not cache.can_allocate(13, reserved_blocks=1)


def test_what_fits_an_empty_pool_can_be_allocated_some_day_and_one_token_more_never() -> None:
    cache = Cache(total_blocks=2)
    cache.allocate(1, "a")
    assert cache.allocate_blocks(1, 8)
    assert cache.pool.can_ever_allocate(8)
    assert not cache.pool.can_ever_allocate(9)


@pytest.mark.parametrize("is_running", [True, False])
def test_blocks_that_a_sequence_would_share_need_no_room(is_running: bool) -> None:
    cache = Cache(total_blocks=4)
    cache.allocate(1, "aaaabbbb")
    cache.compute(1, 8)
    if not is_running:
        cache.free(1)
    assert cache.can_allocate(16, "aaaabbbbc")
    assert not cache.can_allocate(17, "aaaabbbbc")
    assert cache.can_allocate(8, "other")
    assert cache.can_allocate(9, "other") is not is_running


def test_evictable_blocks_are_room_and_go_when_it_is_needed() -> None:
    cache = Cache(total_blocks=2)
    cache.run("aaaabbbb")
    assert cache.blocks == (0, 2, 0)
    assert cache.can_allocate(8, "cccc")
    cache.allocate(1, "cccc")
    assert cache.blocks == (0, 2, 0)
    cache.compute(1, 4)
    assert cache.blocks == (1, 1, 0)


def test_without_room_for_a_block_nothing_changes() -> None:
    cache = Cache(total_blocks=3)
    cache.allocate(1, "a" * 8)
    cache.allocate(2, "b" * 8)
    assert cache.allocate_blocks(1, 8)
    assert cache.allocate_blocks(2, 4)
    assert not cache.allocate_blocks(2, 5)
    assert cache.blocks == (3, 0, 0)
    cache.free(1)
    assert cache.allocate_blocks(2, 5)


@pytest.mark.parametrize(("num_tokens", "used"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_one_token_uses_a_whole_block(num_tokens: int, used: int) -> None:
    cache = Cache()
    cache.allocate(1, "a" * 12)
    cache.compute(1, num_tokens)
    assert cache.pool.cache.used_blocks == used


@pytest.mark.parametrize(("total_blocks", "block_size"), [(0, 16), (4, 0)])
def test_a_pool_without_blocks_cannot_be_made(total_blocks: int, block_size: int) -> None:
    with pytest.raises(AssertionError):
        BlockPool(total_blocks, block_size, 4)
