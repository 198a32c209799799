"""The block pool: reserves the device's KV memory, counted in blocks, for sequences.

    total_blocks
    |-----------------------------------------------|
    |     used      |    evictable    |    free     |
                    |<------ reserved, not used yet ------>|

A sequence starts when everything it may ever need can be reserved. What is reserved and not used yet may be evictable
blocks, which go when it is needed; with over-commitment it may be more than there is.
"""

from array import array
from collections import Counter

from tokenbus.worker.engine.kv.allocation import Allocation
from tokenbus.worker.engine.kv.prefix_cache import PrefixCache
from tokenbus.worker.engine.kv.prefix_tree import Block, Domain


class BlockPool:
    """`total_blocks` of `block_size` tokens on the device, and copies of up to `host_blocks` in host memory.

    Sizes are in tokens unless they say blocks. `num_lanes` are the lanes that running and cached sequences share. The
    pool only decides: the KV ops say what the lanes of the device have to do."""

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        num_lanes: int,
        *,
        fingerprint: str = "",
        can_share: bool = True,
        host_blocks: int = 0,
        overcommit: float = 1.0,
    ) -> None:
        assert overcommit >= 1, overcommit
        self.total_blocks = total_blocks
        self.block_size = block_size
        self._reservable_blocks = int(total_blocks * overcommit)
        self._can_share = can_share
        self.cache = PrefixCache(total_blocks, block_size, num_lanes, host_blocks, fingerprint)
        self._allocations: dict[int, Allocation] = {}

    def __repr__(self) -> str:
        return f"<BlockPool {self.reserved_blocks} reserved, {self.cache!r}>"

    @property
    def reserved_blocks(self) -> int:
        """Blocks that are reserved and not used yet."""
        return sum(allocation.max_blocks - allocation.num_blocks for allocation in self._allocations.values())

    def lane_of(self, seq_no: int) -> int:
        return self._allocations[seq_no].lane

    def can_ever_allocate(self, num_tokens: int) -> bool:
        return self._num_blocks(num_tokens) <= self.total_blocks

    def can_allocate(self, domain: Domain | None, token_ids: "array[int]", max_tokens: int, *, fully: bool) -> bool:
        """Whether a sequence can be started; `fully` rules out over-commitment."""
        # Blocks that it would share need no room, but those that are evictable now would be in use then.
        shared = self.cache.tree.resident_path(domain, token_ids) if domain is not None else []
        pinned = sum(not block.ref_count for block in shared)
        needed = self._num_blocks(max_tokens) - len(shared)
        limit = self.total_blocks if fully else self._reservable_blocks
        return self.cache.used_blocks + pinned + self.reserved_blocks + needed <= limit

    def allocate(self, seq_no: int, domain: Domain | None, max_tokens: int) -> int:
        """Reserves room for `max_tokens` for a sequence and gives it an empty lane, which is returned.

        Without a domain it neither uses nor leaves cached blocks."""
        assert seq_no not in self._allocations, seq_no
        root = self.cache.tree.make_root(domain) if domain is not None and self._can_share else None
        allocation = Allocation(self.cache, root, self._num_blocks(max_tokens))
        self._allocations[seq_no] = allocation
        return allocation.lane

    def reuse_prefix(self, seq_no: int, token_ids: "array[int]", num_computed: int) -> int:
        """Takes over what others have computed of a sequence's tokens; returns how many it holds then.

        At least one token is left to be computed, since only that gives logits."""
        allocation = self._allocations[seq_no]
        if allocation.root is None:
            return num_computed
        allocation.reuse_blocks(token_ids)
        reused = allocation.node.end
        if allocation.num_private == 0:
            reused += allocation.reuse_start_of_block(token_ids)
        return max(num_computed, reused)

    def next_block(self, seq_no: int, token_ids: "array[int]") -> tuple[Block, bytes] | None:
        """The block that a sequence completes next, if it can be shared: equal for two that compute the same."""
        allocation = self._allocations[seq_no]
        if allocation.root is None:
            return None
        tokens = allocation.next_tokens(token_ids, len(token_ids))
        return None if tokens is None else (allocation.node, tokens)

    def awaits_onload(self, seq_no: int, token_ids: "array[int]") -> bool:
        """Whether the next block of a sequence is in host memory, and only the time to copy it back was missing."""
        allocation = self._allocations[seq_no]
        if allocation.root is None or self.cache.host.can_onload:
            return False
        tokens = allocation.next_tokens(token_ids, len(token_ids) - 1)
        block = allocation.node.children.get(tokens) if tokens is not None else None
        return block is not None and not block.lanes

    def allocate_blocks(self, seq_no: int, num_tokens: int) -> bool:
        """Gives a sequence blocks for `num_tokens`, evicting cached ones; False, and no change, without room."""
        allocation = self._allocations[seq_no]
        needed = self._num_blocks(num_tokens) - allocation.num_blocks
        if needed <= 0:
            return True
        assert allocation.num_blocks + needed <= allocation.max_blocks, (seq_no, num_tokens)
        if not self.cache.make_room(needed):
            return False
        allocation.add_private(needed)
        return True

    def cache_blocks(self, seq_no: int, token_ids: "array[int]", num_computed: int) -> None:
        """Lets others find the blocks that a sequence has completed."""
        allocation = self._allocations[seq_no]
        if allocation.root is not None:
            allocation.cache_blocks(token_ids, num_computed)

    def free(self, seq_no: int, token_ids: "array[int]", num_computed: int) -> None:
        """Takes everything back from a sequence; what it has computed stays cached until it is evicted."""
        self._allocations.pop(seq_no).free(token_ids, num_computed)

    def check_counts(self) -> None:
        """Asserts what counters and lanes say of each other, in time proportional to the number of lanes."""
        allocations = self._allocations.values()
        lanes = {allocation.lane for allocation in allocations}
        assert len(lanes) == len(allocations)
        for allocation in allocations:
            assert 0 <= allocation.num_private <= allocation.num_blocks <= allocation.max_blocks, allocation
            assert not allocation.path or allocation.path[-1].lanes >> allocation.lane & 1, allocation
        assert self.cache.num_private == sum(allocation.num_private for allocation in allocations)
        assert allocations or not self.cache.used_blocks, self
        self.cache.check_counts(lanes)

    def check_integrity(self) -> None:
        """Asserts everything that must hold between any two calls; looks at every block."""
        self.check_counts()
        paths = {allocation.lane: allocation.path for allocation in self._allocations.values()}
        self.cache.check_integrity(paths)
        users = Counter(block for path in paths.values() for block in path)
        assert all(block.ref_count == users[block] for block in self.cache.tree.all_blocks())

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
