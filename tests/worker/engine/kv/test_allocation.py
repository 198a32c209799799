"""A sequence reuses what others have computed, to the token, and nothing of other domains."""

import pytest

from tests.support.block_cache import Cache, hashes, ids
from tokenbus.protocol.wire import block_hash
from tokenbus.worker.engine.kv.ops import Share, Truncate
from tokenbus.worker.engine.kv.prefix_tree import Domain, KvEvents, StoredBlock


def test_a_block_that_a_running_sequence_has_completed_is_shared() -> None:
    cache = Cache()
    cache.allocate(1, "aaaabbbbc")
    cache.compute(1, 9)
    assert cache.reused("aaaabbbbd") == 8
    assert cache.kv_ops() == [Share(0, 1, 0, 8)]
    assert cache.blocks == (3, 0, 13)


def test_a_block_that_is_not_complete_is_not_shared_while_its_sequence_runs() -> None:
    cache = Cache()
    cache.allocate(1, "aaaabbbbc")
    cache.compute(1, 7)
    assert cache.reused("aaaabbbbd") == 4
    assert cache.kv_ops() == [Share(0, 1, 0, 4)]


def test_the_blocks_of_a_sequence_that_has_ended_are_shared_and_its_lane_is_free() -> None:
    cache = Cache(num_lanes=2)
    cache.run("aaaabbbb")
    assert cache.kv_ops() == [Truncate(0, 8)]
    assert cache.reused("aaaabbbbd") == 8
    assert cache.kv_ops() == [Share(0, 1, 0, 8), Truncate(0, 0)]
    assert cache.allocate(1, "e") == 0
    assert cache.kv_ops() == []


def test_a_sequence_that_takes_the_middle_of_a_cached_lane_leaves_the_rest_there() -> None:
    cache = Cache(num_lanes=2)
    cache.run("aaaabbbbcccc")
    assert cache.reused("aaaabbbbdddd") == 8
    assert cache.kv_ops() == [Truncate(0, 12), Share(0, 1, 0, 8)]
    assert cache.blocks == (2, 1, 13)


def test_one_token_is_always_left_to_be_computed() -> None:
    cache = Cache()
    cache.run("aaaabbbb")
    cache.kv_ops()
    assert cache.reused("aaaabbbb") == 7
    assert cache.kv_ops() == [Share(0, 1, 0, 4), Share(0, 1, 4, 7)]


def test_a_prompt_of_one_token_finds_nothing() -> None:
    cache = Cache()
    cache.run("aaaa")
    assert cache.reused("a") == 0


@pytest.mark.parametrize("common", [1, 2, 3])
def test_the_first_tokens_of_a_block_are_reused(common: int) -> None:
    cache = Cache()
    cache.run("aaaabcde")
    cache.kv_ops()
    text = "aaaa" + "bcde"[:common] + "xxxx"
    assert cache.reused(text) == 4 + common
    assert cache.kv_ops() == [Share(0, 1, 0, 4), Share(0, 1, 4, 4 + common)]
    assert cache.blocks == (2, 1, 13)


def test_a_block_that_begins_differently_is_not_reused() -> None:
    cache = Cache()
    cache.run("aaaabcde")
    cache.kv_ops()
    assert cache.reused("aaaaxcde") == 4
    assert cache.kv_ops() == [Share(0, 1, 0, 4)]


def test_the_longest_of_several_matches_is_reused() -> None:
    cache = Cache(num_lanes=5)
    for text in ("bxxx", "bcxx", "bcdx", "cccc"):
        cache.run(text)
    cache.kv_ops()
    assert cache.reused("bcde?") == 3
    assert cache.kv_ops() == [Share(2, 4, 0, 3)]


def test_a_reused_start_becomes_a_new_block_when_it_is_complete() -> None:
    cache = Cache()
    cache.run("aaaabcde")
    cache.events()
    assert cache.reused("aaaabcxx") == 6
    cache.compute(100, 8)
    assert cache.events() == KvEvents([], [StoredBlock(*hashes("aaaabcxx"))])


def test_a_half_computed_block_is_dropped_for_the_whole_one() -> None:
    cache = Cache()
    cache.allocate(1, "aaaabbbbc")
    cache.allocate(2, "aaaabbbbd")
    cache.compute(1, 4)
    assert cache.reuse_prefix(2) == 4
    cache.compute(2, 6)
    cache.compute(1, 8)
    cache.kv_ops()
    assert cache.reuse_prefix(2) == 8
    assert cache.kv_ops() == [Truncate(1, 4), Share(0, 1, 4, 8)]
    assert cache.blocks == (2, 0, 14)


def test_a_reused_start_needs_a_free_block() -> None:
    for total_blocks, found in ((2, 0), (3, 2)):
        cache = Cache(total_blocks=total_blocks)
        cache.allocate(1, "aaaa" + "bbbb")
        cache.compute(1, 8)
        assert cache.reused("aaxxx") == found


def test_a_block_is_never_evicted_for_its_own_first_tokens() -> None:
    cache = Cache(total_blocks=1)
    cache.run("aaaa")
    cache.kv_ops()
    assert cache.reused("aaxx") == 0
    assert cache.kv_ops() == []
    assert cache.blocks == (0, 1, 0)


def test_two_that_completed_the_same_block_share_one() -> None:
    cache = Cache()
    cache.allocate(1, "aaaabbbbc")
    cache.allocate(2, "aaaabbbbd")
    cache.compute(1, 8)
    cache.compute(2, 5)
    assert cache.kv_ops() == [Truncate(1, 0, 4), Share(0, 1, 0, 4)]
    assert cache.blocks == (3, 0, 13)
    cache.compute(2, 8)
    assert cache.kv_ops() == [Truncate(1, 4, 8), Share(0, 1, 4, 8)]
    assert cache.blocks == (2, 0, 14)


def test_completing_a_cached_block_shares_it_and_frees_its_idle_lane() -> None:
    cache = Cache()
    cache.allocate(1, "aaaab")
    cache.allocate(2, "aaaac")
    cache.compute(1, 4)
    cache.free(1)
    cache.compute(2, 4)
    assert cache.kv_ops() == [Truncate(0, 4), Truncate(1, 0, 4), Share(0, 1, 0, 4), Truncate(0, 0)]
    assert cache.blocks == (1, 0, 15)


def test_equal_blocks_behind_different_ones_are_not_the_same() -> None:
    cache = Cache()
    cache.run("aaaacccc")
    cache.kv_ops()
    assert cache.reused("bbbbcccc") == 0
    assert cache.kv_ops() == []


@pytest.mark.parametrize(
    "other", [Domain("other"), Domain("acme", "salt"), Domain("acme", "", (block_hash.Adapter("lora", 1.0),)), None]
)
def test_other_tenants_salts_and_adapters_share_nothing(other: Domain | None) -> None:
    cache = Cache()
    cache.run("aaaabbbb")
    cache.kv_ops()
    assert cache.reused("aaaabbbbc", other) == 0
    assert cache.kv_ops() == []


def test_a_sequence_without_a_domain_caches_nothing() -> None:
    cache = Cache()
    cache.run("aaaabbbb", None)
    assert cache.blocks == (0, 0, 16)
    assert cache.kv_ops() == [Truncate(0, 0)]
    assert cache.events() == KvEvents([], [])
    assert cache.reused("aaaabbbb") == 0


def test_a_pool_that_cannot_share_caches_nothing() -> None:
    cache = Cache(can_share=False)
    cache.run("aaaabbbb")
    assert cache.blocks == (0, 0, 16)
    assert cache.reused("aaaabbbbc") == 0
    assert cache.events() == KvEvents([], [])
    assert cache.kv_ops() == [Truncate(0, 0)]


def test_a_partial_block_is_cached_and_reused() -> None:
    cache = Cache()
    cache.run("aaaabb")
    assert cache.kv_ops() == []
    assert cache.blocks == (0, 2, 14)
    assert cache.reused("aaaabbcc") == 6
    assert cache.kv_ops() == [Share(0, 1, 0, 4), Share(0, 1, 4, 6)]


def test_a_partial_block_is_removed_when_a_block_that_begins_with_it_is_complete() -> None:
    cache = Cache()
    cache.run("aaaabb")
    cache.reused("aaaabbcc")
    cache.kv_ops()
    cache.compute(100, 8)
    assert cache.kv_ops() == [Truncate(0, 0)]
    assert cache.blocks == (2, 0, 14)


def test_a_longer_partial_block_replaces_a_shorter_one() -> None:
    cache = Cache()
    cache.run("aaaab")
    cache.run("aaaabb")
    assert cache.blocks == (0, 2, 14)
    assert cache.reused("aaaabbb") == 6


def test_a_partial_block_with_which_a_known_one_begins_is_not_cached() -> None:
    for known in ("aaaabb", "aaaabbbb"):
        cache = Cache(num_lanes=2)
        cache.run(known)
        cache.allocate(1, "aaaab")
        cache.reuse_prefix(1)
        cache.compute(1, 5)
        cache.kv_ops()
        cache.free(1)
        assert cache.kv_ops() == [Truncate(1, 0)]
        assert cache.blocks == (0, 2, 14)


def test_blocks_that_were_not_computed_are_not_cached() -> None:
    cache = Cache()
    cache.allocate(1, "aaaabbbb")
    cache.compute(1, 4)
    cache.allocate_blocks(1, 8)
    cache.free(1)
    assert cache.blocks == (0, 1, 15)
    assert cache.kv_ops() == [Truncate(0, 4)]


def test_a_sequence_that_ends_before_it_computed_anything_leaves_its_lane_empty() -> None:
    cache = Cache()
    cache.allocate(1, "aaaa")
    cache.free(1)
    assert cache.blocks == (0, 0, 16)
    assert cache.kv_ops() == [Truncate(0, 0)]


def test_two_sequences_that_compute_the_same_block_next_have_equal_next_blocks() -> None:
    cache = Cache()
    for seq_no, text in enumerate(("aaaab", "aaaac", "bbbbb")):
        cache.allocate(seq_no, text)
    one, two, other = (cache.allocations[n].next_block(ids(text)) for n, text in enumerate(("aaaab", "aaaac", "bbbbb")))
    assert one == two
    assert one is not None
    assert other != one
    cache.compute(0, 4)
    assert cache.allocations[0].next_block(ids("aaaab")) is None


def test_a_block_that_cannot_be_shared_is_no_next_block() -> None:
    cache = Cache()
    cache.allocate(1, "aaaa", domain=None)
    cache.allocate(2, "aaaa", domain=Domain("other"))
    cache.allocate(3, "aaa")
    cache.allocate(4, "aaaa")
    blocks_next = [
        cache.allocations[n].next_block(ids(text)) for n, text in ((1, "aaaa"), (2, "aaaa"), (3, "aaa"), (4, "aaaa"))
    ]
    assert blocks_next[0] is None
    assert blocks_next[2] is None
    assert blocks_next[1] != blocks_next[3]


def test_what_is_shorter_than_a_least_prefix_leaves_nothing_and_one_token_more_leaves_all() -> None:
    cache = Cache(host_blocks=8, writes_through=True, min_prefix_tokens=10)
    cache.run("aaaabbbbc")
    assert cache.blocks == (0, 0, 16)
    assert cache.pool.prefixes.take_events() == KvEvents([], [])
    assert not cache.pool.cache.has_unsaved
    cache.run("aaaabbbbcc")
    assert cache.blocks == (0, 3, 13)
    assert [one.hash for one in cache.pool.prefixes.take_events().stored] == hashes("aaaabbbb")
    assert cache.reused("aaaabbbbccd") == 10


def test_a_short_prompt_reuses_the_beginning_of_a_long_prefix() -> None:
    cache = Cache(min_prefix_tokens=10)
    cache.run("aaaabbbbcccc")
    cache.kv_ops()
    assert cache.reused("aaaabbx") == 6


def test_sequences_that_compute_the_same_side_by_side_share_it_once_it_is_long_enough() -> None:
    cache = Cache(min_prefix_tokens=10)
    cache.allocate(1, "aaaabbbbccccd")
    cache.allocate(2, "aaaabbbbccccd")
    for number in (1, 2):
        cache.compute(number, 9)
    assert cache.blocks == (6, 0, 10)
    for number in (1, 2):
        cache.compute(number, 12)
    assert cache.blocks == (3, 0, 13)


def test_blocks_of_a_prefix_that_is_too_short_are_not_taken_from_others() -> None:
    cache = Cache(host_blocks=8, min_prefix_tokens=10)
    text = ids("aaaabbbbcccc")
    assert cache.pool.put(Domain("acme"), text, 0, 2) == []
    assert len(cache.pool.put(Domain("acme"), text, 0, 3)) == 3
