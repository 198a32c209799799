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
from tokenbus.worker.engine.kv.prefix_tree import Domain


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
        writes_through: bool = False,
        overcommit: float = 1.0,
    ) -> None:
        assert overcommit >= 1, overcommit
        self._reservable_blocks = int(total_blocks * overcommit)
        self._can_share = can_share
        self.cache = PrefixCache(
            total_blocks, block_size, num_lanes, host_blocks, fingerprint, writes_through=writes_through
        )
        self._allocations: set[Allocation] = set()

    def __repr__(self) -> str:
        return f"<BlockPool {self.reserved_blocks} reserved, {self.cache!r}>"

    @property
    def reserved_blocks(self) -> int:
        """Blocks that are reserved and not used yet."""
        return sum(allocation.max_blocks - allocation.num_blocks for allocation in self._allocations)

    def can_ever_allocate(self, num_tokens: int) -> bool:
        return self.cache.num_blocks(num_tokens) <= self.cache.total_blocks

    def can_allocate(self, domain: Domain | None, token_ids: "array[int]", max_tokens: int, *, fully: bool) -> bool:
        """Whether a sequence can be started; `fully` rules out over-commitment."""
        # Blocks that it would share need no room, but those that are evictable now would be in use then.
        shared = self.cache.tree.resident_path(domain, token_ids) if domain is not None else []
        pinned = sum(not block.ref_count for block in shared)
        needed = self.cache.num_blocks(max_tokens) - len(shared)
        limit = self.cache.total_blocks if fully else self._reservable_blocks
        return self.cache.used_blocks + pinned + self.reserved_blocks + needed <= limit

    def allocate(self, domain: Domain | None, max_tokens: int) -> Allocation:
        """Reserves room for `max_tokens` for a sequence; without a domain it neither uses nor leaves cached blocks."""
        root = self.cache.tree.make_root(domain) if domain is not None and self._can_share else None
        allocation = Allocation(self.cache, root, self.cache.num_blocks(max_tokens))
        self._allocations.add(allocation)
        return allocation

    def free(self, allocation: Allocation, token_ids: "array[int]", num_computed: int) -> None:
        """Takes everything back from a sequence; what it has computed stays cached until it is evicted."""
        self._allocations.remove(allocation)
        allocation.free(token_ids, num_computed)

    def check_counts(self) -> None:
        """Asserts what counters and lanes say of each other, in time proportional to the number of lanes."""
        allocations = self._allocations
        lanes = {allocation.lane for allocation in allocations}
        assert len(lanes) == len(allocations)
        for allocation in allocations:
            assert 0 <= allocation.num_private <= allocation.num_blocks <= allocation.max_blocks, allocation
            assert not allocation.path or allocation.path[-1].lanes >> allocation.lane & 1, allocation
        assert self.cache.num_private == sum(allocation.num_private for allocation in allocations)
        assert allocations or not self.cache.used_blocks, self  # nothing is used without a user
        self.cache.check_counts(lanes)

    def check_integrity(self) -> None:
        """Asserts everything that must hold between any two calls; looks at every block."""
        self.check_counts()
        paths = {allocation.lane: allocation.path for allocation in self._allocations}
        self.cache.check_integrity(paths)
        users = Counter(block for path in paths.values() for block in path)
        assert all(block.ref_count == users[block] for block in self.cache.tree.all_blocks())
