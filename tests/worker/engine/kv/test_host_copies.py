"""Blocks that have to leave the device are copied to host memory, and come back."""

import pytest

from tests.support.block_cache import Cache, hashes, ids, offloaded_cache
from tokenbus.worker.engine.kv.ops import Discard, KvOp, Offload, Onload, Truncate
from tokenbus.worker.engine.kv.prefix_tree import BlockLabel, Domain, KvEvents


def test_evicted_blocks_are_offloaded_and_onloaded_again() -> None:
    cache = offloaded_cache()
    assert cache.kv_ops() == [Offload(1, 0, 4, 8), Offload(2, 0, 0, 4), Truncate(0, 0)]
    assert (cache.blocks, len(cache.pool.cache.host)) == ((3, 0, 0), 2)
    cache.free(101)
    assert cache.kv_ops() == [Truncate(1, 0)]
    assert cache.reused("aaaabbbbc") == 8
    assert cache.kv_ops() == [Onload(2, 1, 0, 4), Onload(1, 1, 4, 8)]
    assert (cache.blocks, len(cache.pool.cache.host)) == ((2, 0, 1), 2)
    assert cache.events() == KvEvents([], [])


def test_a_block_with_a_copy_is_not_offloaded_again() -> None:
    cache = offloaded_cache()
    cache.free(101)
    cache.reused("aaaabbbbc")
    cache.free(100)
    cache.kv_ops()
    cache.fill(3)
    assert cache.kv_ops() == [Truncate(1, 0)]
    assert len(cache.pool.cache.host) == 2


def test_the_first_tokens_of_a_copy_are_onloaded() -> None:
    cache = offloaded_cache()
    cache.free(101)
    cache.kv_ops()
    assert cache.reused("aaaabbxx") == 6
    assert cache.kv_ops() == [Onload(2, 1, 0, 4), Onload(1, 1, 4, 6)]


def test_the_oldest_copy_is_discarded_first() -> None:
    cache = offloaded_cache(host_blocks=1)
    assert cache.kv_ops() == [Offload(1, 0, 4, 8), Truncate(0, 4), Discard(1), Offload(2, 0, 0, 4), Truncate(0, 0)]
    assert cache.events() == KvEvents(hashes("aaaabbbb")[1:], [])
    assert len(cache.pool.cache.host) == 1


def two_copies() -> Cache:
    """A cache with nothing but the copies of "xxxx", number 1, and "yyyy", number 2, and no room for a third."""
    cache = Cache(total_blocks=4, num_lanes=4, host_blocks=2)
    cache.pool.cache.host.set_limits(99, 99)
    cache.run("xxxx")
    cache.run("yyyy")
    cache.fill(4)
    assert [op for op in cache.kv_ops() if isinstance(op, Offload)] == [Offload(1, 0, 0, 4), Offload(2, 1, 0, 4)]
    cache.free(101)
    cache.events()
    return cache


def offload_another(cache: Cache) -> list[KvOp]:
    """Makes a third copy; returns what is discarded for it."""
    cache.run("zzzz")
    cache.kv_ops()
    cache.fill(cache.pool.cache.free_blocks + 1)
    return [op for op in cache.kv_ops() if isinstance(op, Discard)]


def test_a_copy_that_nobody_used_again_is_discarded_in_its_turn() -> None:
    cache = two_copies()
    assert offload_another(cache) == [Discard(1)]
    assert cache.events().removed == hashes("xxxx")


def test_a_copy_that_was_onloaded_is_discarded_last() -> None:
    cache = two_copies()
    cache.allocate(1, "xxxxa")
    assert cache.reuse_prefix(1) == 4
    assert offload_another(cache) == [Discard(2)]
    assert cache.events().removed == hashes("yyyy")


def test_a_copy_of_which_some_tokens_were_onloaded_is_discarded_last() -> None:
    cache = two_copies()
    cache.allocate(1, "xxaaa")
    assert cache.reuse_prefix(1) == 2
    assert offload_another(cache) == [Discard(2)]
    assert cache.events().removed == hashes("yyyy")


@pytest.mark.parametrize(("freed", "discarded"), [((2, 1), 2), ((1,), 1)])
def test_a_copy_of_a_block_that_was_used_until_now_is_discarded_last_and_of_one_in_use_never(
    freed: tuple[int, ...], discarded: int
) -> None:
    cache = two_copies()
    for seq_no, text in ((1, "xxxxa"), (2, "yyyya")):
        cache.allocate(seq_no, text)
        assert cache.reuse_prefix(seq_no) == 4
    for seq_no in freed:
        cache.free(seq_no)
    cache.run("zzzz")
    cache.kv_ops()
    cache.pool.cache.trim(0)
    cache.pool.check_integrity()
    assert [op for op in cache.kv_ops() if isinstance(op, Discard)] == [Discard(discarded)]


def test_onloads_of_first_tokens_count_towards_the_limit() -> None:
    cache = two_copies()
    cache.pool.cache.host.set_limits(offloads=0, onloads=1)
    cache.allocate(1, "xxaaa")
    cache.allocate(2, "yyaaa")
    assert (cache.reuse_prefix(1), cache.reuse_prefix(2)) == (2, 0)


@pytest.mark.parametrize("offloads", [0, 1])
def test_a_block_that_cannot_be_offloaded_in_time_is_gone_with_the_copies_behind_it(offloads: int) -> None:
    cache = offloaded_cache(offloads=offloads)
    assert cache.kv_ops() == ([Offload(1, 0, 4, 8), Truncate(0, 0), Discard(1)] if offloads else [Truncate(0, 0)])
    assert cache.events() == KvEvents(hashes("aaaabbbb")[::-1], [])
    assert len(cache.pool.cache.host) == 0


@pytest.mark.parametrize(("offloads", "evictable"), [(0, 3), (1, 2), (3, 0), (4, 0)])
def test_evictable_blocks_beyond_the_limit_stay_until_they_can_be_offloaded(offloads: int, evictable: int) -> None:
    cache = Cache(host_blocks=8)
    cache.run("aaaabbbbcccc")
    cache.events()
    cache.pool.cache.host.set_limits(offloads, 0)
    cache.pool.cache.trim(0)
    cache.pool.check_integrity()
    assert (cache.pool.cache.evictable_blocks, len(cache.pool.cache.host)) == (evictable, 3 - evictable)
    assert cache.events() == KvEvents([], [])


def test_no_more_blocks_are_onloaded_than_the_limit_and_the_others_are_awaited() -> None:
    cache = offloaded_cache()
    cache.free(101)
    cache.kv_ops()
    cache.pool.cache.host.set_limits(offloads=0, onloads=1)
    assert cache.reused("aaaabbbbc") == 4
    assert cache.kv_ops() == [Onload(2, 1, 0, 4)]
    assert cache.allocations[100].awaits_onload(ids("aaaabbbbc"))
    cache.pool.cache.host.set_limits(offloads=0, onloads=1)
    assert not cache.allocations[100].awaits_onload(ids("aaaabbbbc"))
    assert cache.reuse_prefix(100) == 8
    assert cache.kv_ops() == [Onload(1, 1, 4, 8)]
    assert not cache.allocations[100].awaits_onload(ids("aaaabbbbc"))


def without_budget(prompt: str) -> Cache:
    """Returns a cache in a step that can onload nothing of a prompt."""
    cache = offloaded_cache()
    cache.free(101)
    cache.pool.cache.host.set_limits(offloads=0, onloads=0)
    assert cache.reused(prompt) == 0
    return cache


@pytest.mark.parametrize("prompt", ["aaa", "aaaa", "aaaab"])
def test_a_copy_of_all_that_is_left_but_the_last_token_is_awaited(prompt: str) -> None:
    cache = without_budget(prompt)
    assert cache.allocations[100].awaits_onload(ids(prompt))
    cache.pool.cache.host.set_limits(offloads=0, onloads=1)
    assert cache.reuse_prefix(100) == len(prompt) - 1
    cache.pool.cache.host.set_limits(offloads=0, onloads=0)
    assert not cache.allocations[100].awaits_onload(ids(prompt))


@pytest.mark.parametrize("prompt", ["a", "aaxxx", "aaxx"])
def test_the_first_tokens_of_a_copy_are_not_awaited_where_more_is_to_be_computed(prompt: str) -> None:
    cache = without_budget(prompt)
    assert not cache.allocations[100].awaits_onload(ids(prompt))


def test_nothing_is_onloaded_without_room_for_it() -> None:
    cache = offloaded_cache(total_blocks=3)
    cache.allocate(1, "aaaabbbbc")
    cache.kv_ops()
    assert cache.reuse_prefix(1) == 0
    assert cache.kv_ops() == []


def test_a_partial_block_is_offloaded_and_onloaded_like_a_full_one() -> None:
    cache = Cache(total_blocks=2, num_lanes=2, host_blocks=2)
    cache.run("aaaabb")
    cache.pool.cache.host.set_limits(9, 9)
    cache.fill(2)
    assert cache.kv_ops() == [Offload(1, 0, 4, 6), Offload(2, 0, 0, 4), Truncate(0, 0)]
    cache.free(101)
    cache.kv_ops()
    assert cache.reused("aaaabbcc") == 6
    assert cache.kv_ops() == [Onload(2, 1, 0, 4), Onload(1, 1, 4, 6)]


def written_through(host_blocks: int = 8, text: str = "aaaabbbbcc") -> Cache:
    """A cache that copies what is complete, with a sequence that has computed a text."""
    cache = Cache(host_blocks=host_blocks, writes_through=True)
    cache.allocate(1, text)
    cache.compute(1, len(text))
    cache.pool.cache.host.set_limits(offloads=99, onloads=99)
    cache.kv_ops()
    return cache


def test_complete_blocks_are_copied_while_their_sequence_runs() -> None:
    cache = written_through()
    cache.pool.cache.write_through()
    assert cache.kv_ops() == [Offload(1, 0, 0, 4), Offload(2, 0, 4, 8)]
    cache.pool.cache.write_through()
    assert cache.kv_ops() == []


def test_no_more_are_copied_than_the_limit_and_the_rest_follows() -> None:
    cache = written_through()
    cache.pool.cache.host.set_limits(offloads=1, onloads=0)
    cache.pool.cache.write_through()
    assert cache.kv_ops() == [Offload(1, 0, 0, 4)]
    cache.pool.cache.host.set_limits(offloads=1, onloads=0)
    cache.pool.cache.write_through()
    assert cache.kv_ops() == [Offload(2, 0, 4, 8)]


def test_a_block_that_is_gone_before_it_could_be_copied_is_forgotten() -> None:
    cache = written_through()
    cache.free(1)
    cache.pool.cache.clear()
    cache.kv_ops()
    cache.pool.cache.host.set_limits(offloads=99, onloads=99)
    cache.pool.cache.write_through()
    assert cache.kv_ops() == []


def test_the_beginning_of_a_running_stream_does_not_go_for_its_end() -> None:
    cache = written_through(host_blocks=2, text="aaaabbbbccccdddd")
    cache.pool.cache.write_through()
    assert cache.kv_ops() == [Offload(1, 0, 0, 4), Offload(2, 0, 4, 8)]


def test_copies_that_nobody_uses_go_for_those_of_running_streams() -> None:
    cache = written_through(host_blocks=2)
    cache.pool.cache.write_through()
    cache.free(1)
    cache.kv_ops()
    cache.allocate(2, "xxxxyyyyz")
    cache.compute(2, 9)
    cache.pool.cache.write_through()
    assert [op for op in cache.kv_ops() if isinstance(op, Offload | Discard)] == [
        Discard(2),
        Offload(3, 1, 0, 4),
        Discard(1),
        Offload(4, 1, 4, 8),
    ]


def recovered(labels: list[tuple[int, BlockLabel]], host_blocks: int = 8) -> tuple[Cache, dict[int, str]]:
    """An empty cache that has been given copies of another one."""
    cache = Cache(host_blocks=host_blocks)
    rejected = cache.pool.cache.recover(labels)
    cache.pool.check_integrity()
    cache.pool.cache.host.set_limits(offloads=99, onloads=99)
    return cache, rejected


def labels_of(text: str = "aaaabbbbcc") -> list[tuple[int, BlockLabel]]:
    cache = written_through(text=text)
    cache.pool.cache.write_through()
    return cache.pool.cache.host.take_labels()


def test_recovered_copies_are_reused_and_reported_like_others() -> None:
    cache, rejected = recovered(labels_of())
    assert not rejected
    assert [stored.hash for stored in cache.events().stored] == hashes("aaaabbbb")
    assert cache.reused("aaaabbbbcccc") == 8
    assert cache.kv_ops() == [Onload(1, 0, 0, 4), Onload(2, 0, 4, 8)]


def test_recovered_copies_are_not_reused_in_another_domain() -> None:
    cache, _ = recovered(labels_of())
    cache.allocate(1, "aaaabbbbcccc", domain=Domain("acme", "salt"))
    assert cache.reuse_prefix(1) == 0
    cache.allocate(2, "aaaabbbbcccc", domain=Domain("other"))
    assert cache.reuse_prefix(2) == 0


def test_a_copy_without_the_one_before_is_rejected() -> None:
    (_, second) = labels_of()
    cache, rejected = recovered([second])
    assert rejected == {2: "orphan"}
    assert not cache.events().stored


def test_copies_of_the_same_block_and_those_at_the_wrong_place_are_rejected() -> None:
    (_, first), (_, second) = labels_of()
    cache, rejected = recovered([(1, first), (2, first), (3, second._replace(start=8)), (4, second)])
    assert rejected == {2: "duplicate", 3: "misplaced"}
    assert cache.reused("aaaabbbbcccc") == 8
    assert cache.kv_ops() == [Onload(1, 0, 0, 4), Onload(4, 0, 4, 8)]


def test_the_copy_that_was_made_first_goes_first() -> None:
    one, two = labels_of("aaaabbbbcc")
    cache, _ = recovered([one, two], host_blocks=2)
    assert cache.pool.cache.host.first.hash == hashes("aaaabbbb")[0]
