"""Cached blocks go in the order of their last use, and routers are told."""

import pytest

from tests.support.block_cache import ACME, Cache, hashes, ids, offloaded_cache, root_of
from tokenbus.worker.engine.kv.ops import Discard, Truncate
from tokenbus.worker.engine.kv.prefix_tree import KvEvents, StoredBlock


def test_the_least_recently_used_block_is_evicted_first_and_of_a_path_its_end() -> None:
    cache = Cache(total_blocks=4)
    cache.run("aaaabbbb")
    cache.run("ccccdddd")
    cache.kv_ops()
    cache.events()
    (a, b), (c, d) = hashes("aaaabbbb"), hashes("ccccdddd")
    cache.allocate(101, "", domain=None)
    for num_blocks, gone, cut in (
        (1, b, Truncate(0, 4)),
        (2, a, Truncate(0, 0)),
        (3, d, Truncate(1, 4)),
        (4, c, Truncate(1, 0)),
    ):
        cache.fill(num_blocks)
        assert cache.kv_ops() == [cut]
        assert cache.events() == KvEvents([gone], [])
    assert cache.pool.cache.evicted_blocks == 4


def test_blocks_that_were_used_again_are_evicted_last() -> None:
    cache = Cache(total_blocks=5)
    cache.run("aaaabbbb")
    cache.run("ccccdddd")
    cache.run("aaaabbbb")
    assert cache.blocks == (0, 4, 1)
    cache.events()
    cache.fill(3)
    assert cache.events().removed == hashes("ccccdddd")[::-1]


def test_several_truncations_of_one_lane_are_one_op() -> None:
    cache = Cache(total_blocks=4)
    cache.run("aaaabbbbcccc")
    cache.kv_ops()
    cache.fill(4)
    assert cache.kv_ops() == [Truncate(0, 0)]


def test_blocks_that_sequences_use_are_never_evicted() -> None:
    cache = Cache(total_blocks=3)
    cache.allocate(1, "aaaabbbb")
    cache.compute(1, 8)
    cache.allocate(2, "cccccccc")
    assert cache.allocate_blocks(2, 4)
    assert not cache.allocate_blocks(2, 8)
    assert cache.pool.cache.evicted_blocks == 0


def test_the_part_of_an_idle_lane_that_others_carry_stays_where_it_is() -> None:
    cache = Cache(num_lanes=3)
    cache.allocate(1, "aaaabbbb")
    cache.compute(1, 8)
    cache.allocate(2, "aaaacccc")
    cache.reuse_prefix(2)
    cache.compute(2, 8)
    cache.free(1)
    cache.free(2)
    cache.events()
    cache.kv_ops()
    cache.pool.cache.trim(2)
    assert cache.kv_ops() == [Truncate(0, 0)]
    assert cache.events() == KvEvents([hashes("aaaabbbb")[1]], [])
    assert cache.reused("aaaaccccd") == 8


def test_where_lanes_run_out_the_least_recently_used_idle_one_is_emptied() -> None:
    cache = Cache(num_lanes=2)
    cache.run("aaaabbbb")
    cache.run("cccc")
    cache.kv_ops()
    cache.events()
    assert cache.allocate(1, "d") == 0
    assert cache.kv_ops() == [Truncate(0, 0)]
    assert cache.events() == KvEvents(hashes("aaaabbbb")[::-1], [])
    assert cache.blocks == (0, 1, 15)


def test_a_lane_whose_blocks_others_carry_too_is_free_after_its_own_ones() -> None:
    cache = Cache(num_lanes=2)
    cache.allocate(1, "aaaabbbb")
    cache.compute(1, 8)
    cache.allocate(2, "aaaacccc")
    cache.reuse_prefix(2)
    cache.compute(2, 8)
    cache.free(1)
    cache.free(2)
    cache.kv_ops()
    cache.events()
    assert cache.allocate(3, "d") == 0
    assert cache.kv_ops() == [Truncate(0, 0)]
    assert cache.events() == KvEvents([hashes("aaaabbbb")[1]], [])


@pytest.mark.parametrize(("most", "removed"), [(0, 3), (2, 1), (3, 0), (4, 0)])
def test_evictable_blocks_beyond_the_limit_are_evicted(most: int, removed: int) -> None:
    cache = Cache()
    cache.run("aaaabbbbcccc")
    cache.events()
    cache.pool.cache.trim(most)
    cache.pool.check_integrity()
    assert cache.events().removed == hashes("aaaabbbbcccc")[::-1][:removed]


def test_new_blocks_are_announced_once_with_the_blocks_before_them() -> None:
    cache = Cache()
    cache.allocate(1, "aaaabbbbcc")
    cache.compute(1, 3)
    assert cache.events() == KvEvents([], [])
    a, b = hashes("aaaabbbb")
    cache.compute(1, 10)
    assert cache.events() == KvEvents([], [StoredBlock(root_of(), a), StoredBlock(a, b)])
    assert cache.events() == KvEvents([], [])


def test_a_block_that_others_complete_too_is_not_announced_again() -> None:
    cache = Cache()
    cache.allocate(1, "aaaab")
    cache.allocate(2, "aaaac")
    cache.compute(1, 4)
    cache.events()
    cache.compute(2, 4)
    cache.free(1)
    cache.free(2)
    assert cache.events() == KvEvents([], [])


def test_a_block_that_came_and_went_in_between_is_in_neither_list() -> None:
    cache = Cache()
    cache.run("aaaabbbb")
    cache.pool.cache.clear()
    assert cache.events() == KvEvents([], [])


def test_a_block_that_went_and_came_back_is_removed_first_and_then_stored() -> None:
    cache = Cache()
    cache.run("aaaa")
    cache.events()
    cache.pool.cache.clear()
    cache.run("aaaa")
    (a,) = hashes("aaaa")
    assert cache.events() == KvEvents([a], [StoredBlock(root_of(), a)])


def test_partial_blocks_are_never_announced() -> None:
    cache = Cache()
    cache.run("aaa")
    assert cache.blocks == (0, 1, 15)
    assert cache.events() == KvEvents([], [])
    cache.pool.cache.clear()
    assert cache.events() == KvEvents([], [])


def test_a_block_is_removed_only_when_its_copy_is_gone_too() -> None:
    cache = offloaded_cache()
    assert cache.events() == KvEvents([], [])
    cache.pool.cache.clear()
    cache.pool.check_integrity()
    assert sorted(cache.events().removed) == sorted(hashes("aaaabbbb"))


def test_clearing_removes_only_blocks_that_no_sequence_uses() -> None:
    cache = Cache()
    cache.run("aaaabbbb")
    cache.run("ccccdddd")
    cache.allocate(1, "aaaae")
    cache.reuse_prefix(1)
    cache.kv_ops()
    cache.events()
    cache.pool.cache.clear()
    cache.pool.check_integrity()
    assert cache.blocks == (1, 0, 15)
    assert cache.kv_ops() == [Truncate(0, 0), Truncate(1, 0)]
    assert cache.events() == KvEvents([hashes("aaaabbbb")[1], *hashes("ccccdddd")[::-1]], [])


def test_clearing_discards_copies_of_used_blocks_too() -> None:
    cache = offloaded_cache()
    cache.free(101)
    cache.reused("aaaabbbbc")
    cache.kv_ops()
    cache.pool.cache.clear()
    cache.pool.check_integrity()
    assert set(cache.kv_ops()) == {Discard(1), Discard(2)}
    assert (cache.blocks, len(cache.pool.cache.host)) == ((2, 0, 1), 0)
    assert cache.events() == KvEvents([], [])


def test_clearing_offloads_nothing() -> None:
    cache = Cache(host_blocks=8)
    cache.run("aaaabbbb")
    cache.pool.cache.host.set_limits(9, 9)
    cache.kv_ops()
    cache.pool.cache.clear()
    cache.pool.check_integrity()
    assert cache.kv_ops() == [Truncate(0, 0)]
    assert len(cache.pool.cache.host) == 0


def given(cache: Cache, text: str, *, is_last: bool) -> None:
    """Another worker gets all blocks of a text."""
    cache.pool.export(ACME, ids(text), 0, 99, is_last=is_last)
    cache.pool.check_integrity()


@pytest.mark.parametrize("is_last", [True, False])
def test_a_conversation_that_another_worker_has_is_evicted_first(is_last: bool) -> None:
    cache = Cache(total_blocks=4)
    cache.run("aaaa")
    cache.run("bbbbbbbb")
    cache.events()
    given(cache, "bbbb", is_last=is_last)
    cache.fill(3)
    (a,), (b, c) = hashes("aaaa"), hashes("bbbbbbbb")
    assert cache.events().removed == ([c, b] if is_last else [a, c])


def test_what_other_conversations_begin_with_is_not_given_away_with_one_of_them() -> None:
    cache = Cache(total_blocks=5)
    for text in ("ssssaaaa", "ssssbbbb", "cccc"):
        cache.run(text)
    cache.events()
    given(cache, "ssss", is_last=True)
    given(cache, "ssssbbbb", is_last=True)
    cache.fill(2)
    assert cache.events().removed == [hashes("ssssbbbb")[1]]
    assert cache.reused("ssssaaaax") == 8


def test_copies_of_what_another_worker_has_are_discarded_first() -> None:
    cache = Cache(total_blocks=4, num_lanes=4, host_blocks=2)
    cache.pool.cache.host.set_limits(99, 99)
    for text in ("xxxx", "yyyy"):
        cache.run(text)
    cache.pool.cache.trim(0)
    cache.events()
    given(cache, "yyyy", is_last=True)
    cache.pool.cache.host.set_limits(99, 99)
    cache.run("zzzz")
    cache.pool.cache.trim(0)
    cache.pool.check_integrity()
    assert cache.events().removed == hashes("yyyy")


def test_prompts_that_were_continued_stay_when_others_are_seen_once() -> None:
    cache = Cache(total_blocks=15, num_lanes=15)
    cache.run("aaaabbbb")
    cache.run("aaaabbbbcccc")  # two of its three blocks were cached
    for text in ("dddd", "eeee", "ffff"):
        cache.run(text * 4)
    cache.fill(12)
    assert cache.reused("aaaabbbbccccx") == 12


def test_a_prompt_of_which_little_was_cached_is_not_continued() -> None:
    cache = Cache(total_blocks=15, num_lanes=15)
    cache.run("aaaa")
    cache.run("aaaabbbbcccc")
    for text in ("dddd", "eeee", "ffff"):
        cache.run(text * 4)
    cache.fill(12)
    assert cache.reused("aaaabbbbccccx") == 0


def test_a_prompt_that_comes_back_from_host_memory_piece_by_piece_is_continued() -> None:
    cache = Cache(total_blocks=16, num_lanes=16, host_blocks=16)
    cache.run("aaaabbbbcccc")
    cache.pool.cache.host.set_limits(offloads=9, onloads=0)
    cache.pool.cache.trim(0)
    cache.allocate(1, "aaaabbbbccccd")
    for reused in (4, 8, 12):
        cache.pool.cache.host.set_limits(offloads=0, onloads=1)
        assert cache.reuse_prefix(1) == reused
    cache.compute(1, 13)
    cache.free(1)
    assert all(block.is_continued for block in cache.pool.cache.tree.all_blocks())


def test_what_a_preempted_sequence_finds_again_continues_nothing() -> None:
    cache = Cache(total_blocks=16, num_lanes=16)
    cache.run("aaaabbbbc")
    pool = cache.pool
    allocation = pool.allocate(ACME, is_new=False)
    assert allocation.reuse_prefix(ids("aaaabbbbc"), 0) == 8
    pool.free(allocation, ids("aaaabbbbc"), 8)
    assert not any(block.is_continued for block in pool.cache.tree.all_blocks())


def test_blocks_that_came_from_elsewhere_continue_nothing_until_they_are_used_again() -> None:
    cache = Cache(total_blocks=16, num_lanes=16, host_blocks=16)
    cache.pool.put(ACME, ids("aaaabbbb"), 0, 2)
    for expected in (False, True):
        cache.pool.cache.host.set_limits(offloads=9, onloads=9)
        cache.run("aaaabbbb")
        assert [block.is_continued for block in cache.pool.cache.tree.all_blocks()] == [expected] * 2


def test_an_idle_copy_goes_for_one_of_a_running_stream_however_often_it_was_continued() -> None:
    cache = Cache(total_blocks=32, num_lanes=8, host_blocks=10, writes_through=True)
    host = cache.pool.cache.host
    for text in ("aaaabbbb", "aaaabbbbc"):
        cache.run(text)
    cache.allocate(1, "d" * 64)
    cache.compute(1, 64)
    host.set_limits(offloads=20, onloads=0)
    cache.pool.cache.write_through()
    assert len(host) == 10
    assert sum(block.ref_count > 0 for block in host) == 10
