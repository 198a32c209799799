"""The block pool promises what there is, shares what it can, keeps what it may, and forgets in the right order."""

from array import array

import pytest

from tokenbus.protocol.wire import block_hash
from tokenbus.worker.engine.kv.allocation import Allocation
from tokenbus.worker.engine.kv.ops import Discard, KvOp, Offload, Onload, Share, Truncate
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.kv.prefix_tree import Domain, KvEvents, StoredBlock

SIZE = 4
ACME = Domain("acme")


def ids(text: str) -> "array[int]":
    """A token for each character."""
    return array("I", map(ord, text))


def root_of(domain: Domain = ACME) -> int:
    return block_hash.root_hash(block_hash.PrefixDomain("", domain.adapters, domain.tenant, domain.cache_salt))


def names(text: str, domain: Domain = ACME) -> list[int]:
    """The hashes of the blocks of a text."""
    return block_hash.block_hashes(ids(text), SIZE, root_of(domain))


class Cache:
    """A pool with its sequences, whose tokens are texts; checked after every operation."""

    def __init__(
        self,
        total_blocks: int = 16,
        num_lanes: int = 4,
        *,
        host_blocks: int = 0,
        overcommit: float = 1.0,
        can_share: bool = True,
    ) -> None:
        self.pool = BlockPool(
            total_blocks, SIZE, num_lanes, host_blocks=host_blocks, overcommit=overcommit, can_share=can_share
        )
        self.allocations: dict[int, Allocation] = {}
        self._texts: dict[int, str] = {}
        self._computed: dict[int, int] = {}

    def can_allocate(self, num_tokens: int, text: str = "?", *, fully: bool = False) -> bool:
        can = self.pool.can_allocate(ACME, ids(text), num_tokens, fully=fully)
        self.pool.check_integrity()
        return can

    def allocate(self, seq_no: int, text: str, max_tokens: int | None = None, domain: Domain | None = ACME) -> int:
        self.allocations[seq_no] = self.pool.allocate(domain, max_tokens or len(text))
        self._texts[seq_no], self._computed[seq_no] = text, 0
        self.pool.check_integrity()
        return self.allocations[seq_no].lane

    def reuse_prefix(self, seq_no: int) -> int:
        token_ids = ids(self._texts[seq_no])
        self._computed[seq_no] = self.allocations[seq_no].reuse_prefix(token_ids, self._computed[seq_no])
        self.pool.check_integrity()
        return self._computed[seq_no]

    def hold(self, seq_no: int, num_tokens: int) -> bool:
        has_room = self.allocations[seq_no].allocate_blocks(num_tokens)
        self.pool.check_integrity()
        return has_room

    def compute(self, seq_no: int, num_tokens: int) -> None:
        """Computes so many of a sequence's tokens, as a step does."""
        assert self.hold(seq_no, num_tokens)
        self.allocations[seq_no].cache_blocks(ids(self._texts[seq_no]), num_tokens)
        self._computed[seq_no] = num_tokens
        self.pool.check_integrity()

    def end(self, seq_no: int) -> None:
        token_ids = ids(self._texts.pop(seq_no))
        self.pool.free(self.allocations.pop(seq_no), token_ids, self._computed.pop(seq_no))
        self.pool.check_integrity()

    def leave(self, text: str, domain: Domain | None = ACME) -> None:
        """A whole life: has a sequence compute a text and end."""
        self.allocate(99, text, domain=domain)
        self.reuse_prefix(99)
        self.compute(99, len(text))
        self.end(99)

    def found(self, text: str, domain: Domain | None = ACME) -> int:
        """How many tokens a new sequence need not compute; it stays, as number 100."""
        self.allocate(100, text, domain=domain)
        return self.reuse_prefix(100)

    def fill(self, num_blocks: int) -> None:
        """A stranger takes that many blocks of the device, as number 101; it needs a lane."""
        if 101 not in self._texts:
            self.allocate(101, "", max_tokens=SIZE * num_blocks, domain=None)
        assert self.hold(101, SIZE * num_blocks)

    def kv_ops(self) -> list[KvOp]:
        """Since the last time."""
        return self.pool.cache.ops.take()

    def changes(self) -> KvEvents:
        return self.pool.cache.tree.take_events()

    @property
    def counts(self) -> tuple[int, int, int]:
        """Blocks that are used, idle and free."""
        return self.pool.cache.used_blocks, self.pool.cache.evictable_blocks, self.pool.cache.free_blocks


# promises


def test_a_pool_promises_its_last_token_and_not_one_more() -> None:
    cache = Cache(total_blocks=4)
    assert cache.can_allocate(16)
    assert not cache.can_allocate(17)
    cache.allocate(1, "abcde", max_tokens=12)
    assert cache.pool.reserved_blocks == 3
    assert cache.can_allocate(4)
    assert not cache.can_allocate(5)


def test_with_over_commitment_more_is_promised_but_not_to_one_that_wants_it_fully() -> None:
    cache = Cache(total_blocks=4, overcommit=1.5)
    cache.allocate(1, "abcde", max_tokens=12)
    assert cache.can_allocate(12)
    assert not cache.can_allocate(13)
    assert cache.can_allocate(4, fully=True)
    assert not cache.can_allocate(5, fully=True)


def test_a_fraction_of_a_block_is_not_promised() -> None:
    cache = Cache(total_blocks=3, overcommit=1.5)
    assert cache.can_allocate(16)
    assert not cache.can_allocate(17)


@pytest.mark.parametrize("overcommit", [1.0, 4.0])
def test_what_fits_an_empty_pool_can_be_promised_some_day_and_one_token_more_never(overcommit: float) -> None:
    cache = Cache(total_blocks=2, overcommit=overcommit)
    cache.allocate(1, "a", max_tokens=8)
    assert cache.pool.can_ever_allocate(8)
    assert not cache.pool.can_ever_allocate(9)


@pytest.mark.parametrize("is_running", [True, False])
def test_blocks_that_a_sequence_would_share_are_not_promised_twice(is_running: bool) -> None:
    cache = Cache(total_blocks=4)
    cache.allocate(1, "aaaabbbb")
    cache.compute(1, 8)
    if not is_running:
        cache.end(1)
    assert cache.can_allocate(16, "aaaabbbbc")
    assert not cache.can_allocate(17, "aaaabbbbc")
    assert cache.can_allocate(8, "other", fully=True)
    assert cache.can_allocate(9, "other", fully=True) is not is_running


def test_what_is_promised_may_be_idle_blocks_and_these_are_evicted_when_it_is_needed() -> None:
    cache = Cache(total_blocks=2)
    cache.leave("aaaabbbb")
    assert cache.counts == (0, 2, 0)
    cache.allocate(1, "cccc", max_tokens=8)
    assert (cache.counts, cache.pool.reserved_blocks) == ((0, 2, 0), 2)
    cache.compute(1, 4)
    assert (cache.counts, cache.pool.reserved_blocks) == ((1, 1, 0), 1)


def test_where_too_much_was_promised_there_is_no_room_and_nothing_has_changed() -> None:
    cache = Cache(total_blocks=3, overcommit=2.0)
    cache.allocate(1, "a" * 8)
    cache.allocate(2, "b" * 8)
    assert cache.hold(1, 8)
    assert cache.hold(2, 4)
    assert not cache.hold(2, 5)
    assert (cache.counts, cache.pool.reserved_blocks) == ((3, 0, 0), 1)
    cache.end(1)
    assert cache.hold(2, 5)


def test_a_sequence_may_use_all_that_it_was_promised_and_not_a_block_more() -> None:
    cache = Cache(total_blocks=8)
    cache.allocate(1, "a", max_tokens=8)
    assert cache.hold(1, 8)
    with pytest.raises(AssertionError):
        cache.allocations[1].allocate_blocks(9)


@pytest.mark.parametrize(("num_tokens", "used"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_block_that_is_begun_is_used_whole(num_tokens: int, used: int) -> None:
    cache = Cache()
    cache.allocate(1, "a" * 12)
    cache.compute(1, num_tokens)
    assert cache.pool.cache.used_blocks == used
    assert cache.pool.reserved_blocks == 3 - used


@pytest.mark.parametrize(("total_blocks", "block_size", "overcommit"), [(0, 16, 1.0), (4, 0, 1.0), (4, 16, 0.99)])
def test_a_pool_of_nothing_or_that_promises_less_than_it_has_cannot_be_made(
    total_blocks: int, block_size: int, overcommit: float
) -> None:
    with pytest.raises(AssertionError):
        BlockPool(total_blocks, block_size, 4, overcommit=overcommit)


# sharing


def test_a_block_that_a_running_sequence_has_completed_is_shared() -> None:
    cache = Cache()
    cache.allocate(1, "aaaabbbbc")
    cache.compute(1, 9)
    assert cache.found("aaaabbbbd") == 8
    assert cache.kv_ops() == [Share(0, 1, 0, 8)]
    assert cache.counts == (3, 0, 13)


def test_a_block_that_is_not_complete_is_not_shared_while_its_sequence_runs() -> None:
    cache = Cache()
    cache.allocate(1, "aaaabbbbc")
    cache.compute(1, 7)
    assert cache.found("aaaabbbbd") == 4
    assert cache.kv_ops() == [Share(0, 1, 0, 4)]


def test_the_blocks_of_a_sequence_that_has_ended_are_shared_and_its_lane_is_free() -> None:
    cache = Cache(num_lanes=2)
    cache.leave("aaaabbbb")
    assert cache.kv_ops() == [Truncate(0, 8)]
    assert cache.found("aaaabbbbd") == 8
    assert cache.kv_ops() == [Share(0, 1, 0, 8), Truncate(0, 0)]
    assert cache.allocate(1, "e") == 0
    assert cache.kv_ops() == []


def test_a_sequence_that_takes_the_middle_of_a_cached_lane_leaves_the_rest_there() -> None:
    cache = Cache(num_lanes=2)
    cache.leave("aaaabbbbcccc")
    assert cache.found("aaaabbbbdddd") == 8
    assert cache.kv_ops() == [Truncate(0, 12), Share(0, 1, 0, 8)]
    assert cache.counts == (2, 1, 13)


def test_one_token_is_always_left_to_be_computed() -> None:
    cache = Cache()
    cache.leave("aaaabbbb")
    cache.kv_ops()
    assert cache.found("aaaabbbb") == 7
    assert cache.kv_ops() == [Share(0, 1, 0, 4), Share(0, 1, 4, 7)]


def test_a_prompt_of_one_token_finds_nothing() -> None:
    cache = Cache()
    cache.leave("aaaa")
    assert cache.found("a") == 0


@pytest.mark.parametrize("common", [1, 2, 3])
def test_the_beginning_of_a_block_is_adopted_to_the_token(common: int) -> None:
    cache = Cache()
    cache.leave("aaaabcde")
    cache.kv_ops()
    text = "aaaa" + "bcde"[:common] + "xxxx"
    assert cache.found(text) == 4 + common
    assert cache.kv_ops() == [Share(0, 1, 0, 4), Share(0, 1, 4, 4 + common)]
    assert cache.counts == (2, 1, 13)


def test_of_a_block_that_begins_otherwise_nothing_is_adopted() -> None:
    cache = Cache()
    cache.leave("aaaabcde")
    cache.kv_ops()
    assert cache.found("aaaaxcde") == 4
    assert cache.kv_ops() == [Share(0, 1, 0, 4)]


def test_of_several_beginnings_the_longest_is_adopted() -> None:
    cache = Cache(num_lanes=5)
    for text in ("bxxx", "bcxx", "bcdx", "cccc"):
        cache.leave(text)
    cache.kv_ops()
    assert cache.found("bcde?") == 3
    assert cache.kv_ops() == [Share(2, 4, 0, 3)]


def test_a_beginning_becomes_a_block_of_its_own_when_it_is_complete() -> None:
    cache = Cache()
    cache.leave("aaaabcde")
    cache.changes()
    assert cache.found("aaaabcxx") == 6
    cache.compute(100, 8)
    assert cache.changes() == KvEvents([], [StoredBlock(*names("aaaabcxx"))])


def test_a_beginning_is_given_up_for_the_whole_block() -> None:
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
    assert cache.counts == (2, 0, 14)


def test_an_adopted_beginning_needs_a_block_and_is_left_where_there_is_none() -> None:
    for total_blocks, found in ((2, 0), (3, 2)):
        cache = Cache(total_blocks=total_blocks, overcommit=4.0)
        cache.allocate(1, "aaaa" + "bbbb")
        cache.compute(1, 8)
        assert cache.found("aaxxx") == found


def test_a_block_is_never_evicted_for_its_own_beginning() -> None:
    cache = Cache(total_blocks=1)
    cache.leave("aaaa")
    cache.kv_ops()
    assert cache.found("aaxx") == 0
    assert cache.kv_ops() == []
    assert cache.counts == (0, 1, 0)


def test_two_that_completed_the_same_block_share_one() -> None:
    cache = Cache()
    cache.allocate(1, "aaaabbbbc")
    cache.allocate(2, "aaaabbbbd")
    cache.compute(1, 8)
    cache.compute(2, 5)
    assert cache.kv_ops() == [Truncate(1, 0, 4), Share(0, 1, 0, 4)]
    assert cache.counts == (3, 0, 13)
    cache.compute(2, 8)
    assert cache.kv_ops() == [Truncate(1, 4, 8), Share(0, 1, 4, 8)]
    assert cache.counts == (2, 0, 14)


def test_one_that_completed_a_block_of_an_ended_sequence_shares_it_and_frees_its_lane() -> None:
    cache = Cache()
    cache.allocate(1, "aaaab")
    cache.allocate(2, "aaaac")
    cache.compute(1, 4)
    cache.end(1)
    cache.compute(2, 4)
    assert cache.kv_ops() == [Truncate(0, 4), Truncate(1, 0, 4), Share(0, 1, 0, 4), Truncate(0, 0)]
    assert cache.counts == (1, 0, 15)


def test_equal_blocks_behind_different_ones_are_not_the_same() -> None:
    cache = Cache()
    cache.leave("aaaacccc")
    cache.kv_ops()
    assert cache.found("bbbbcccc") == 0
    assert cache.kv_ops() == []


@pytest.mark.parametrize(
    "other", [Domain("other"), Domain("acme", "salt"), Domain("acme", "", (block_hash.Adapter("lora", 1.0),)), None]
)
def test_other_tenants_salts_and_adapters_find_nothing(other: Domain | None) -> None:
    cache = Cache()
    cache.leave("aaaabbbb")
    cache.kv_ops()
    assert cache.found("aaaabbbbc", other) == 0
    assert cache.kv_ops() == []


def test_a_sequence_of_no_domain_leaves_nothing() -> None:
    cache = Cache()
    cache.leave("aaaabbbb", None)
    assert cache.counts == (0, 0, 16)
    assert cache.kv_ops() == [Truncate(0, 0)]
    assert cache.changes() == KvEvents([], [])
    assert cache.found("aaaabbbb") == 0


def test_a_pool_that_cannot_share_neither_finds_nor_leaves_anything() -> None:
    cache = Cache(can_share=False)
    cache.leave("aaaabbbb")
    assert cache.counts == (0, 0, 16)
    assert cache.found("aaaabbbbc") == 0
    assert cache.changes() == KvEvents([], [])
    assert cache.kv_ops() == [Truncate(0, 0)]


# tails


def test_a_tail_is_kept_and_found_again() -> None:
    cache = Cache()
    cache.leave("aaaabb")
    assert cache.kv_ops() == []
    assert cache.counts == (0, 2, 14)
    assert cache.found("aaaabbcc") == 6
    assert cache.kv_ops() == [Share(0, 1, 0, 4), Share(0, 1, 4, 6)]


def test_a_tail_goes_when_a_block_that_begins_with_it_is_complete() -> None:
    cache = Cache()
    cache.leave("aaaabb")
    cache.found("aaaabbcc")
    cache.kv_ops()
    cache.compute(100, 8)
    assert cache.kv_ops() == [Truncate(0, 0)]
    assert cache.counts == (2, 0, 14)


def test_a_longer_tail_takes_the_place_of_a_shorter_one() -> None:
    cache = Cache()
    cache.leave("aaaab")
    cache.leave("aaaabb")
    assert cache.counts == (0, 2, 14)
    assert cache.found("aaaabbb") == 6


def test_a_tail_that_is_the_beginning_of_what_is_there_is_not_kept() -> None:
    for known in ("aaaabb", "aaaabbbb"):
        cache = Cache(num_lanes=2)
        cache.leave(known)
        cache.allocate(1, "aaaab")
        cache.reuse_prefix(1)
        cache.compute(1, 5)
        cache.kv_ops()
        cache.end(1)
        assert cache.kv_ops() == [Truncate(1, 0)]
        assert cache.counts == (0, 2, 14)


def test_what_was_held_but_not_computed_is_not_kept() -> None:
    cache = Cache()
    cache.allocate(1, "aaaabbbb")
    cache.compute(1, 4)
    cache.hold(1, 8)
    cache.end(1)
    assert cache.counts == (0, 1, 15)
    assert cache.kv_ops() == [Truncate(0, 4)]


def test_a_sequence_that_ends_before_it_computed_anything_leaves_its_lane_empty() -> None:
    cache = Cache()
    cache.allocate(1, "aaaa")
    cache.end(1)
    assert cache.counts == (0, 0, 16)
    assert cache.kv_ops() == [Truncate(0, 0)]


# evicting


def test_the_least_recently_used_block_goes_first_and_of_a_chain_its_end() -> None:
    cache = Cache(total_blocks=4)
    cache.leave("aaaabbbb")
    cache.leave("ccccdddd")
    cache.kv_ops()
    cache.changes()
    (a, b), (c, d) = names("aaaabbbb"), names("ccccdddd")
    cache.allocate(101, "", max_tokens=16, domain=None)
    for num_blocks, gone, cut in (
        (1, b, Truncate(0, 4)),
        (2, a, Truncate(0, 0)),
        (3, d, Truncate(1, 4)),
        (4, c, Truncate(1, 0)),
    ):
        cache.fill(num_blocks)
        assert cache.kv_ops() == [cut]
        assert cache.changes() == KvEvents([gone], [])
    assert cache.pool.cache.evicted_blocks == 4


def test_what_was_used_again_goes_last() -> None:
    cache = Cache(total_blocks=5)
    cache.leave("aaaabbbb")
    cache.leave("ccccdddd")
    cache.leave("aaaabbbb")
    assert cache.counts == (0, 4, 1)
    cache.changes()
    cache.fill(3)
    assert cache.changes().removed == names("ccccdddd")[::-1]


def test_several_cuts_of_one_lane_are_one_move() -> None:
    cache = Cache(total_blocks=4)
    cache.leave("aaaabbbbcccc")
    cache.kv_ops()
    cache.fill(4)
    assert cache.kv_ops() == [Truncate(0, 0)]


def test_blocks_that_sequences_use_are_never_evicted() -> None:
    cache = Cache(total_blocks=3, overcommit=2.0)
    cache.allocate(1, "aaaabbbb")
    cache.compute(1, 8)
    cache.allocate(2, "cccccccc")
    assert cache.hold(2, 4)
    assert not cache.hold(2, 8)
    assert cache.pool.cache.evicted_blocks == 0


def test_the_part_of_an_idle_lane_that_others_carry_stays_where_it_is() -> None:
    cache = Cache(num_lanes=3)
    cache.allocate(1, "aaaabbbb")
    cache.compute(1, 8)
    cache.allocate(2, "aaaacccc")
    cache.reuse_prefix(2)
    cache.compute(2, 8)
    cache.end(1)
    cache.end(2)
    cache.changes()
    cache.kv_ops()
    cache.pool.cache.trim(2)
    assert cache.kv_ops() == [Truncate(0, 0)]
    assert cache.changes() == KvEvents([names("aaaabbbb")[1]], [])
    assert cache.found("aaaaccccd") == 8


def test_where_lanes_run_out_the_least_recently_used_idle_one_is_emptied() -> None:
    cache = Cache(num_lanes=2)
    cache.leave("aaaabbbb")
    cache.leave("cccc")
    cache.kv_ops()
    cache.changes()
    assert cache.allocate(1, "d") == 0
    assert cache.kv_ops() == [Truncate(0, 0)]
    assert cache.changes() == KvEvents(names("aaaabbbb")[::-1], [])
    assert cache.counts == (0, 1, 15)


def test_a_lane_whose_blocks_others_carry_too_is_free_after_its_own_ones() -> None:
    cache = Cache(num_lanes=2)
    cache.allocate(1, "aaaabbbb")
    cache.compute(1, 8)
    cache.allocate(2, "aaaacccc")
    cache.reuse_prefix(2)
    cache.compute(2, 8)
    cache.end(1)
    cache.end(2)
    cache.kv_ops()
    cache.changes()
    assert cache.allocate(3, "d") == 0
    assert cache.kv_ops() == [Truncate(0, 0)]
    assert cache.changes() == KvEvents([names("aaaabbbb")[1]], [])


@pytest.mark.parametrize(("most", "removed"), [(0, 3), (2, 1), (3, 0), (4, 0)])
def test_idle_blocks_beyond_the_limit_go(most: int, removed: int) -> None:
    cache = Cache()
    cache.leave("aaaabbbbcccc")
    cache.changes()
    cache.pool.cache.trim(most)
    cache.pool.check_integrity()
    assert cache.changes().removed == names("aaaabbbbcccc")[::-1][:removed]


# host memory


def saving(total_blocks: int = 3, host_blocks: int = 8, saves: int = 99, restores: int = 99) -> Cache:
    """A cache with host memory in which "aaaabbbb" had to go from the device."""
    cache = Cache(total_blocks, num_lanes=2, host_blocks=host_blocks)
    cache.leave("aaaabbbb")
    cache.pool.cache.host.set_limits(saves, restores)
    cache.kv_ops()
    cache.changes()
    cache.fill(total_blocks)
    return cache


def test_what_has_to_go_from_the_device_is_saved_and_comes_back() -> None:
    cache = saving()
    assert cache.kv_ops() == [Offload(1, 0, 4, 8), Offload(2, 0, 0, 4), Truncate(0, 0)]
    assert (cache.counts, len(cache.pool.cache.host)) == ((3, 0, 0), 2)
    cache.end(101)
    assert cache.kv_ops() == [Truncate(1, 0)]
    assert cache.found("aaaabbbbc") == 8
    assert cache.kv_ops() == [Onload(2, 1, 0, 4), Onload(1, 1, 4, 8)]
    assert (cache.counts, len(cache.pool.cache.host)) == ((2, 0, 1), 2)
    assert cache.changes() == KvEvents([], [])


def test_a_block_with_a_copy_is_not_saved_again() -> None:
    cache = saving()
    cache.end(101)
    cache.found("aaaabbbbc")
    cache.end(100)
    cache.kv_ops()
    cache.fill(3)
    assert cache.kv_ops() == [Truncate(1, 0)]
    assert len(cache.pool.cache.host) == 2


def test_the_beginning_of_a_copy_comes_back_to_the_token() -> None:
    cache = saving()
    cache.end(101)
    cache.kv_ops()
    assert cache.found("aaaabbxx") == 6
    assert cache.kv_ops() == [Onload(2, 1, 0, 4), Onload(1, 1, 4, 6)]


def test_the_oldest_copy_is_forgotten_first() -> None:
    cache = saving(host_blocks=1)
    assert cache.kv_ops() == [Offload(1, 0, 4, 8), Truncate(0, 4), Discard(1), Offload(2, 0, 0, 4), Truncate(0, 0)]
    assert cache.changes() == KvEvents(names("aaaabbbb")[1:], [])
    assert len(cache.pool.cache.host) == 1


def two_copies() -> Cache:
    """A cache that has forgotten all but the copies of "xxxx", number 1, and "yyyy", number 2; there is no room for a
    third."""
    cache = Cache(total_blocks=4, num_lanes=4, host_blocks=2)
    cache.pool.cache.host.set_limits(99, 99)
    cache.leave("xxxx")
    cache.leave("yyyy")
    cache.fill(4)
    assert [op for op in cache.kv_ops() if isinstance(op, Offload)] == [Offload(1, 0, 0, 4), Offload(2, 1, 0, 4)]
    cache.end(101)
    cache.changes()
    return cache


def save_another(cache: Cache) -> list[KvOp]:
    """What is forgotten for a third copy."""
    cache.leave("zzzz")
    cache.kv_ops()
    cache.fill(cache.pool.cache.free_blocks + 1)
    return [op for op in cache.kv_ops() if isinstance(op, Discard)]


def test_a_copy_that_nobody_used_again_is_forgotten_in_its_turn() -> None:
    cache = two_copies()
    assert save_another(cache) == [Discard(1)]
    assert cache.changes().removed == names("xxxx")


def test_a_copy_that_was_brought_back_is_forgotten_last() -> None:
    cache = two_copies()
    cache.allocate(1, "xxxxa")
    assert cache.reuse_prefix(1) == 4
    assert save_another(cache) == [Discard(2)]
    assert cache.changes().removed == names("yyyy")


def test_a_copy_whose_beginning_was_brought_back_is_forgotten_last() -> None:
    cache = two_copies()
    cache.allocate(1, "xxaaa")
    assert cache.reuse_prefix(1) == 2
    assert save_another(cache) == [Discard(2)]
    assert cache.changes().removed == names("yyyy")


def test_a_copy_of_a_block_that_was_used_until_now_is_forgotten_last() -> None:
    cache = two_copies()
    for seq_no, text in ((1, "xxxxa"), (2, "yyyya")):
        cache.allocate(seq_no, text)
        assert cache.reuse_prefix(seq_no) == 4
    cache.end(1)
    cache.leave("zzzz")
    cache.kv_ops()
    cache.pool.cache.trim(1)
    cache.pool.cache.trim(0)
    cache.pool.check_integrity()
    assert [op for op in cache.kv_ops() if isinstance(op, Discard)] == [Discard(2)]


def test_beginnings_that_come_back_take_their_time_too() -> None:
    cache = two_copies()
    cache.pool.cache.host.set_limits(offloads=0, onloads=1)
    cache.allocate(1, "xxaaa")
    cache.allocate(2, "yyaaa")
    assert (cache.reuse_prefix(1), cache.reuse_prefix(2)) == (2, 0)


@pytest.mark.parametrize("saves", [0, 1])
def test_what_there_is_no_time_to_save_is_gone_and_so_are_the_copies_behind_it(saves: int) -> None:
    cache = saving(saves=saves)
    assert cache.kv_ops() == ([Offload(1, 0, 4, 8), Truncate(0, 0), Discard(1)] if saves else [Truncate(0, 0)])
    assert cache.changes() == KvEvents(names("aaaabbbb")[::-1], [])
    assert len(cache.pool.cache.host) == 0


@pytest.mark.parametrize(("saves", "idle"), [(0, 3), (1, 2), (3, 0), (4, 0)])
def test_idle_blocks_beyond_the_limit_stay_until_there_is_time_to_save_them(saves: int, idle: int) -> None:
    cache = Cache(host_blocks=8)
    cache.leave("aaaabbbbcccc")
    cache.changes()
    cache.pool.cache.host.set_limits(saves, 0)
    cache.pool.cache.trim(0)
    cache.pool.check_integrity()
    assert (cache.pool.cache.evictable_blocks, len(cache.pool.cache.host)) == (idle, 3 - idle)
    assert cache.changes() == KvEvents([], [])


def test_no_more_blocks_come_back_than_there_is_time_for_and_the_others_are_awaited() -> None:
    cache = saving()
    cache.end(101)
    cache.kv_ops()
    cache.pool.cache.host.set_limits(offloads=0, onloads=1)
    assert cache.found("aaaabbbbc") == 4
    assert cache.kv_ops() == [Onload(2, 1, 0, 4)]
    assert cache.allocations[100].awaits_onload(ids("aaaabbbbc"))
    cache.pool.cache.host.set_limits(offloads=0, onloads=1)
    assert not cache.allocations[100].awaits_onload(ids("aaaabbbbc"))
    assert cache.reuse_prefix(100) == 8
    assert cache.kv_ops() == [Onload(1, 1, 4, 8)]
    assert not cache.allocations[100].awaits_onload(ids("aaaabbbbc"))


def test_a_copy_that_would_complete_the_prompt_is_not_awaited() -> None:
    cache = saving()
    cache.end(101)
    cache.pool.cache.host.set_limits(offloads=0, onloads=0)
    cache.found("aaaa")
    assert not cache.allocations[100].awaits_onload(ids("aaaa"))
    assert cache.allocations[100].awaits_onload(ids("aaaab"))


def test_nothing_comes_back_where_there_is_no_room_for_it() -> None:
    cache = saving(total_blocks=3)
    cache.allocate(1, "aaaabbbbc", max_tokens=9)
    cache.kv_ops()
    assert cache.reuse_prefix(1) == 0
    assert cache.kv_ops() == []


def test_the_tail_of_a_lane_is_saved_and_comes_back_like_a_block() -> None:
    cache = Cache(total_blocks=2, num_lanes=2, host_blocks=2)
    cache.leave("aaaabb")
    cache.pool.cache.host.set_limits(9, 9)
    cache.fill(2)
    assert cache.kv_ops() == [Offload(1, 0, 4, 6), Offload(2, 0, 0, 4), Truncate(0, 0)]
    cache.end(101)
    cache.kv_ops()
    assert cache.found("aaaabbcc") == 6
    assert cache.kv_ops() == [Onload(2, 1, 0, 4), Onload(1, 1, 4, 6)]


# what a router is told


def test_new_blocks_are_told_once_with_the_blocks_before_them() -> None:
    cache = Cache()
    cache.allocate(1, "aaaabbbbcc")
    cache.compute(1, 3)
    assert cache.changes() == KvEvents([], [])
    a, b = names("aaaabbbb")
    cache.compute(1, 10)
    assert cache.changes() == KvEvents([], [StoredBlock(root_of(), a), StoredBlock(a, b)])
    assert cache.changes() == KvEvents([], [])


def test_a_block_that_others_complete_too_is_no_news() -> None:
    cache = Cache()
    cache.allocate(1, "aaaab")
    cache.allocate(2, "aaaac")
    cache.compute(1, 4)
    cache.changes()
    cache.compute(2, 4)
    cache.end(1)
    cache.end(2)
    assert cache.changes() == KvEvents([], [])


def test_a_block_that_came_and_went_in_between_is_in_neither_list() -> None:
    cache = Cache()
    cache.leave("aaaabbbb")
    cache.pool.cache.clear()
    assert cache.changes() == KvEvents([], [])


def test_a_block_that_went_and_came_back_is_removed_first_and_then_stored() -> None:
    cache = Cache()
    cache.leave("aaaa")
    cache.changes()
    cache.pool.cache.clear()
    cache.leave("aaaa")
    (a,) = names("aaaa")
    assert cache.changes() == KvEvents([a], [StoredBlock(root_of(), a)])


def test_tails_are_never_told() -> None:
    cache = Cache()
    cache.leave("aaa")
    assert cache.counts == (0, 1, 15)
    assert cache.changes() == KvEvents([], [])
    cache.pool.cache.clear()
    assert cache.changes() == KvEvents([], [])


def test_a_block_is_told_gone_only_when_its_copy_is_gone_too() -> None:
    cache = saving()
    assert cache.changes() == KvEvents([], [])
    cache.pool.cache.clear()
    cache.pool.check_integrity()
    assert sorted(cache.changes().removed) == sorted(names("aaaabbbb"))


# forgetting


def test_clearing_forgets_what_no_sequence_uses_and_only_that() -> None:
    cache = Cache()
    cache.leave("aaaabbbb")
    cache.leave("ccccdddd")
    cache.allocate(1, "aaaae")
    cache.reuse_prefix(1)
    cache.kv_ops()
    cache.changes()
    cache.pool.cache.clear()
    cache.pool.check_integrity()
    assert cache.counts == (1, 0, 15)
    assert cache.kv_ops() == [Truncate(0, 0), Truncate(1, 0)]
    assert cache.changes() == KvEvents([names("aaaabbbb")[1], *names("ccccdddd")[::-1]], [])


def test_clearing_forgets_copies_also_of_blocks_that_are_used() -> None:
    cache = saving()
    cache.end(101)
    cache.found("aaaabbbbc")
    cache.kv_ops()
    cache.pool.cache.clear()
    cache.pool.check_integrity()
    assert set(cache.kv_ops()) == {Discard(1), Discard(2)}
    assert (cache.counts, len(cache.pool.cache.host)) == ((2, 0, 1), 0)
    assert cache.changes() == KvEvents([], [])


def test_clearing_saves_nothing() -> None:
    cache = Cache(host_blocks=8)
    cache.leave("aaaabbbb")
    cache.pool.cache.host.set_limits(9, 9)
    cache.kv_ops()
    cache.pool.cache.clear()
    cache.pool.check_integrity()
    assert cache.kv_ops() == [Truncate(0, 0)]
    assert len(cache.pool.cache.host) == 0


# next blocks


def test_two_that_would_compute_the_same_block_next_say_so() -> None:
    cache = Cache()
    for seq_no, text in enumerate(("aaaab", "aaaac", "bbbbb")):
        cache.allocate(seq_no, text)
    one, two, other = (cache.allocations[n].next_block(ids(text)) for n, text in enumerate(("aaaab", "aaaac", "bbbbb")))
    assert one == two
    assert one is not None
    assert other != one
    cache.compute(0, 4)
    assert cache.allocations[0].next_block(ids("aaaab")) is None


def test_what_nobody_else_could_use_is_no_next_block() -> None:
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
