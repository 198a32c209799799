"""The block pool: gives sequences the device's KV memory, counted in blocks.

    total_blocks
    |---------------------------------------------------|
    |     used      |      evictable      |    free     |
                    |<-- reserved -->|

A sequence starts if there is room for what it is expected to use, beside what the scheduler has reserved for running
ones. Evictable blocks count as room: they are evicted when needed. A reservation is an estimate, not a limit: a
sequence may take more blocks while there are any.

Other engines get cached blocks, and give some, as copies in host memory:

    export    resident --offload--> copy --read--> another engine
    put       another engine --write--> copy, which sequences then reuse like any other
"""

import contextlib
from array import array
from collections import Counter
from collections.abc import Iterator

from tokenbus.protocol.wire import block_hash
from tokenbus.worker.contract.contract import CheckpointSizes
from tokenbus.worker.engine.kv.allocation import Allocation, CheckpointedAllocation
from tokenbus.worker.engine.kv.checkpoints import Checkpoints
from tokenbus.worker.engine.kv.prefix_cache import PrefixCache
from tokenbus.worker.engine.kv.prefix_tree import Block, Domain
from tokenbus.worker.engine.kv.retention import DEFAULT_LIMITS, NO_HINT, CacheHint, RetentionLimits, SessionKey


class BlockPool:
    """`total_blocks` of `block_size` tokens on the device, and copies of up to `host_blocks` in host memory.

    Sizes are in tokens unless they say blocks. `num_lanes` are the lanes that running and cached sequences share. The
    pool only decides: the KV ops tell the device's lanes what to do. With `checkpoint_sizes`, sequences share
    checkpoints and no blocks. Prefixes of fewer than `min_prefix_tokens` are not cached."""

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
        checkpoint_sizes: CheckpointSizes | None = None,
        limits: RetentionLimits = DEFAULT_LIMITS,
        min_prefix_tokens: int = 0,
    ) -> None:
        self._can_share = can_share and checkpoint_sizes is None
        self.cache = PrefixCache(
            total_blocks,
            block_size,
            num_lanes,
            host_blocks,
            fingerprint,
            writes_through=writes_through,
            limits=limits,
            min_prefix_tokens=min_prefix_tokens,
        )
        self.checkpoints: Checkpoints | None = None
        if checkpoint_sizes is not None:
            self.checkpoints = Checkpoints(
                checkpoint_sizes, block_size, total_blocks, self.cache.ops, fingerprint, limits
            )
        self.prefixes: PrefixCache | Checkpoints = self.cache if self.checkpoints is None else self.checkpoints
        """The part of it that holds what sequences leave."""
        self._allocations: set[Allocation] = set()

    def __repr__(self) -> str:
        return f"<BlockPool of {len(self._allocations)} sequences, {self.cache!r}>"

    def can_ever_allocate(self, num_tokens: int) -> bool:
        return self.cache.num_blocks(num_tokens) <= self.cache.total_blocks

    def can_allocate(
        self, domain: Domain | None, token_ids: "array[int]", num_tokens: int, reserved_blocks: int = 0
    ) -> bool:
        """Whether there is room for `num_tokens` of a sequence beside the blocks reserved for others."""
        # Blocks that it would share need no room, but those that are evictable now would then be in use.
        shared = self.cache.tree.resident_path(domain, token_ids) if domain is not None else []
        pinned = sum(not block.ref_count for block in shared)
        needed = self.cache.num_blocks(num_tokens) - len(shared)
        return self.cache.used_blocks + pinned + reserved_blocks + needed <= self.cache.total_blocks

    def allocate(self, domain: Domain | None, *, is_new: bool = True, hint: CacheHint = NO_HINT) -> Allocation:
        """Gives a sequence a lane; without a domain it neither uses nor leaves cached blocks. A sequence is not new if
        it was preempted, or continues after its engine has died. What it leaves is kept as `hint` says."""
        allocation: Allocation
        if self.checkpoints is not None:
            allocation = CheckpointedAllocation(self.cache, self.checkpoints, domain, hint)
        else:
            root = self.cache.tree.make_root(domain) if domain is not None and self._can_share else None
            allocation = Allocation(self.cache, root, is_new=is_new, hint=hint)
        self._allocations.add(allocation)
        return allocation

    def free(self, allocation: Allocation, token_ids: "array[int]", num_computed: int) -> None:
        """Takes everything back from a sequence; what it has computed stays cached until it is evicted."""
        self._allocations.remove(allocation)
        allocation.free(token_ids, num_computed)

    def retain_session(self, session: SessionKey, ttl_s: float) -> None:
        """Keeps what a session has left for `ttl_s` from now on; with 0, what it alone has used is evicted first."""
        if ttl_s:
            self.prefixes.keep_session(session, ttl_s)
        else:
            self.prefixes.end_session(session)

    def drop(self, allocation: Allocation, *, trusts_others: bool) -> None:
        """Takes everything back from a sequence; nothing of it becomes cached. Unless `trusts_others`, what it has
        reused is dropped too, if no other sequence uses it."""
        self._allocations.remove(allocation)
        allocation.drop(trusts_others=trusts_others)

    def clear(self) -> None:
        """Drops everything cached that no sequence uses."""
        self.cache.clear()
        if self.checkpoints is not None:
            self.checkpoints.clear()

    def export(
        self, domain: Domain, token_ids: "array[int]", first: int, max_blocks: int, *, is_last: bool = False
    ) -> tuple[int, list[int]]:
        """Returns how many blocks of a prefix are cached, and the copies of up to `max_blocks` from block `first` on,
        which are fewer if there is no room. Blocks without a copy get one, by ops that must be applied before the
        copies are read. Once the last is returned, the prefix's blocks become the first to be evicted."""
        cache = self.cache
        path = cache.tree.known_path(domain, token_ids)
        copies: list[int] = []
        cache.host.set_limits(offloads=max_blocks, onloads=0)
        with self._in_use(path):
            for block in path[first : first + max_blocks]:
                if block.host_copy is None:
                    if not cache.make_room_for_copy():
                        break
                    cache.host.offload(block, block.any_lane)
                assert block.host_copy is not None
                copies.append(block.host_copy)
        cache.host.set_limits(offloads=0, onloads=0)
        if is_last:
            cache.demote(path)
        return len(path), copies

    def put(self, domain: Domain, token_ids: "array[int]", first: int, num_blocks: int) -> list[int | None]:
        """Adds blocks of a prefix, from block `first` on, as copies whose content the caller has. Returns the id of
        each copy, or None for a known block. The list ends early if there is no room for another copy, and is empty if
        an earlier block is missing or the prefix is too short to be cached."""
        cache = self.cache
        path = cache.tree.known_path(domain, token_ids)[: first + num_blocks]
        is_long_enough = (first + num_blocks) * cache.block_size >= cache.min_prefix_tokens
        if not self._can_share or len(path) < first or not is_long_enough:
            return []
        copies: list[int | None] = [None] * (len(path) - first)
        root = cache.tree.make_root(domain)
        root.ref_count += 1  # making room may remove the last block of this domain
        node: Block = path[-1] if path else root
        with self._in_use(path):  # the ancestors of the new blocks must not be discarded for them
            while len(copies) < num_blocks and (end := node.end + cache.block_size) <= len(token_ids):
                if not cache.make_room_for_copy():
                    break
                tokens = block_hash.pack_token_ids(token_ids[node.end : end])
                for partial in node.proper_prefixes(tokens):
                    cache.remove_partial(partial)
                node = cache.tree.insert(node, tokens)
                copies.append(cache.host.adopt(node))
                node.ref_count += 1
                path.append(node)
        root.ref_count -= 1
        cache.tree.prune(root)
        return copies

    @contextlib.contextmanager
    def _in_use(self, path: list[Block]) -> Iterator[None]:
        """Keeps the copies of a path, which may grow meanwhile, and makes them the last to be discarded: those at its
        beginning last of all, since the others are useless without them."""
        for block in path:
            block.ref_count += 1
        yield
        for block in reversed(path):
            block.ref_count -= 1
            self.cache.host.touch(block)

    def check_counts(self) -> None:
        """Asserts that counters and lanes agree, in time proportional to the number of lanes."""
        allocations = self._allocations
        lanes = {allocation.lane for allocation in allocations}
        assert len(lanes) == len(allocations)
        for allocation in allocations:
            assert 0 <= allocation.num_private <= allocation.num_blocks, allocation
            assert not allocation.path or allocation.path[-1].lanes >> allocation.lane & 1, allocation
        assert self.cache.num_private == sum(allocation.num_private for allocation in allocations)
        assert allocations or not self.cache.used_blocks, self  # nothing is used without a user
        self.cache.check_counts(lanes)
        if self.checkpoints is not None:
            self.checkpoints.check_counts()

    def check_integrity(self) -> None:
        """Asserts everything that must hold between any two calls; looks at every block."""
        self.check_counts()
        paths = {allocation.lane: allocation.path for allocation in self._allocations}
        self.cache.check_integrity(paths)
        if self.checkpoints is not None:
            self.checkpoints.check_integrity()
        users = Counter(block for path in paths.values() for block in path)
        assert all(block.ref_count == users[block] for block in self.cache.tree.all_blocks())
