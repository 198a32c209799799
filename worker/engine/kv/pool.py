"""Counts KV memory in blocks: what sequences use and may still need, and what is kept of those that have ended.

    total_blocks
    |-------------------------------------------------------|
    |  used by sequences  |  idle: cached, nobody's  |  free  |
                          |<- promised, not used yet ->|

A sequence is started when everything it may ever need can be promised; what is promised and not used yet may be cached
blocks, which are evicted when it is needed. Blocks are shared: a sequence adopts what others have computed of its
prompt, whether they run or have ended. The pool decides; what the lanes of the device have to do for it are moves.

Invariants: a lane carries a whole path from its root, so that whoever holds a block holds all before it. An idle lane
ends at a block that no other lane carries. The least recently used idle block is one that no lane goes on behind.
"""

from array import array
from collections import Counter, OrderedDict
from typing import NamedTuple

from tokenbus.protocol.wire import block_hash
from tokenbus.worker.engine.kv.ops import Discard, KvOp, Offload, Onload, Share, Truncate
from tokenbus.worker.engine.kv.prefix_tree import Block, Domain, PrefixTree, Root


class StoredBlock(NamedTuple):
    """A block that is held from now on, and the one before it."""

    parent: int
    hash: int


class KvEvents(NamedTuple):
    """Which blocks came and went, in the order in which a router must apply them: `removed`, then `stored`."""

    removed: list[int]
    stored: list[StoredBlock]


class _Allocation:
    """What one sequence holds: a path of shared blocks, and behind it blocks of its own that nobody else sees yet."""

    __slots__ = ("lane", "max_blocks", "num_private", "path", "root")

    def __init__(self, root: Root | None, lane: int, max_blocks: int) -> None:
        self.root = root
        """None for a sequence that neither reads nor leaves cache."""
        self.lane = lane
        self.max_blocks = max_blocks
        self.path: list[Block] = []
        self.num_private = 0

    @property
    def node(self) -> Block:
        """The last shared block."""
        assert self.root is not None
        return self.path[-1] if self.path else self.root

    @property
    def num_blocks(self) -> int:
        return len(self.path) + self.num_private

    @property
    def bit(self) -> int:
        return 1 << self.lane


class BlockPool:
    """`total_blocks` of `block_size` tokens on the device, and copies of `host_blocks` in host memory.

    Sizes are in tokens unless they say blocks. `num_lanes` are the lanes that running and cached sequences share."""

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
        assert total_blocks > 0, total_blocks
        assert block_size > 0, block_size
        assert overcommit >= 1, overcommit
        self.total_blocks = total_blocks
        self.block_size = block_size
        self._reservable_blocks = int(total_blocks * overcommit)
        self._can_share = can_share
        self._host_blocks = host_blocks
        self._tree = PrefixTree(block_size, fingerprint)
        self._allocations: dict[int, _Allocation] = {}
        self._free_lanes = list(reversed(range(num_lanes)))
        self._lane_ends: dict[int, Block] = {}
        """The last block of each idle lane."""
        self._num_lanes = num_lanes
        self._evictable: OrderedDict[Block, None] = OrderedDict()
        self._offloaded: OrderedDict[Block, None] = OrderedDict()
        self._used_blocks = 0
        self._resident_blocks = 0
        """Shared blocks that a lane carries."""
        self._last_number = 0
        self._offloads_left = 0
        self._onloads_left = 0
        self._kv_ops: list[KvOp] = []
        self._stored: dict[int, StoredBlock] = {}
        self._removed: list[int] = []
        self.evicted_blocks = 0
        """Blocks that had to go from the device, in all."""

    def __repr__(self) -> str:
        kept = f"{len(self._evictable)} idle, {len(self._offloaded)} saved"
        return f"<BlockPool {self._used_blocks} used, {self.reserved_blocks} promised, {kept} of {self.total_blocks}>"

    @property
    def used_blocks(self) -> int:
        """Blocks that sequences use, each counted once."""
        return self._used_blocks

    @property
    def evictable_blocks(self) -> int:
        """Cached blocks on the device that no sequence uses."""
        return len(self._evictable)

    @property
    def offloaded_blocks(self) -> int:
        """Copies in host memory."""
        return len(self._offloaded)

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - self._used_blocks - len(self._evictable)

    @property
    def reserved_blocks(self) -> int:
        """What has been promised and is not used yet."""
        return sum(allocation.max_blocks - allocation.num_blocks for allocation in self._allocations.values())

    def lane_of(self, seq_no: int) -> int:
        return self._allocations[seq_no].lane

    def can_ever_allocate(self, num_tokens: int) -> bool:
        return self._blocks(num_tokens) <= self.total_blocks

    def can_allocate(self, domain: Domain | None, token_ids: "array[int]", max_tokens: int, *, fully: bool) -> bool:
        """Whether a sequence can be started: `fully` says that no over-commitment may be used for it."""
        path = self._resident_path(domain, token_ids)
        wakes = sum(block.ref_count == 0 for block in path)
        needed = self._used_blocks + wakes + self.reserved_blocks + self._blocks(max_tokens) - len(path)
        return needed <= (self.total_blocks if fully else self._reservable_blocks)

    def allocate(self, seq_no: int, domain: Domain | None, max_tokens: int) -> int:
        """Promises room for `max_tokens` to a sequence and gives it an empty lane, which is returned.

        Without a domain it neither reads nor leaves cache."""
        assert seq_no not in self._allocations, seq_no
        root = self._tree.root(domain) if domain is not None and self._can_share else None
        if root is not None:
            root.ref_count += 1
        lane = self._take_lane()
        self._allocations[seq_no] = _Allocation(root, lane, self._blocks(max_tokens))
        return lane

    def reuse_prefix(self, seq_no: int, token_ids: "array[int]", num_computed: int) -> int:
        """Takes what others have computed of a sequence's tokens; returns how many of them it holds then.

        At least one token is left to be computed, since only that gives logits."""
        allocation = self._allocations[seq_no]
        if allocation.root is None:
            return num_computed
        adopted = self._reuse_blocks(allocation, token_ids)
        if allocation.num_private == 0:
            adopted = max(adopted, self._reuse_partial_block(allocation, token_ids))
        return max(num_computed, adopted)

    def next_block(self, seq_no: int, token_ids: "array[int]") -> tuple[Block, bytes] | None:
        """Which block a sequence will complete next, if it could be shared: equal for two that compute the same."""
        allocation = self._allocations[seq_no]
        if allocation.root is None or allocation.node.end + self.block_size > len(token_ids):
            return None
        return allocation.node, self._tokens(token_ids, allocation.node.end)

    def awaits_onload(self, seq_no: int, token_ids: "array[int]") -> bool:
        """Whether the next block of a sequence is in host memory, and only the time to fetch it was missing."""
        allocation = self._allocations[seq_no]
        if allocation.root is None or self._onloads_left > 0:
            return False
        if allocation.node.end + self.block_size >= len(token_ids):
            return False
        block = allocation.node.children.get(self._tokens(token_ids, allocation.node.end))
        return block is not None and not block.is_resident

    def allocate_blocks(self, seq_no: int, num_tokens: int) -> bool:
        """Has a sequence hold blocks for `num_tokens`, evicting cached ones; False, and no change, without room."""
        allocation = self._allocations[seq_no]
        needed = self._blocks(num_tokens) - allocation.num_blocks
        assert allocation.num_blocks + max(needed, 0) <= allocation.max_blocks, (seq_no, num_tokens)
        if needed > self.free_blocks + len(self._evictable):
            return False
        for _ in range(needed):
            self._take_block()
            allocation.num_private += 1
            self._used_blocks += 1
        return True

    def cache_blocks(self, seq_no: int, token_ids: "array[int]", num_computed: int) -> None:
        """Shows others the blocks that a sequence has completed."""
        allocation = self._allocations[seq_no]
        if allocation.root is None:
            return
        while allocation.node.end + self.block_size <= num_computed:
            self._complete(allocation, self._tokens(token_ids, allocation.node.end))

    def free(self, seq_no: int, token_ids: "array[int]", num_computed: int) -> None:
        """Takes everything back from a sequence; what it has computed stays cached until it is evicted."""
        allocation = self._allocations.pop(seq_no)
        self._used_blocks -= allocation.num_private
        tail = self._cache_partial_block(allocation, token_ids, num_computed)
        for block in reversed(allocation.path):
            block.ref_count -= 1
            if not block.ref_count:
                self._used_blocks -= 1
                self._make_evictable(block)
        self._retire_lane(allocation, tail)
        if allocation.root is not None:
            allocation.root.ref_count -= 1
            self._tree.prune(allocation.root)

    def set_transfer_limits(self, offloads: int, onloads: int) -> None:
        """Sets how many blocks may go to host memory and come back until this is called again."""
        self._offloads_left, self._onloads_left = offloads, onloads

    def trim_cached(self, most: int) -> None:
        """Evicts the least recently used idle blocks beyond `most`, as far as there is time to save them."""
        while len(self._evictable) > most and (self._offloads_left > 0 or not self._host_blocks):
            self._evict(next(iter(self._evictable)))

    def clear(self) -> None:
        """Forgets everything that no sequence uses."""
        self._offloads_left = 0
        while self._offloaded:
            self._drop_copy(next(iter(self._offloaded)))
        while self._evictable:
            self._evict(next(iter(self._evictable)))

    def take_kv_ops(self) -> list[KvOp]:
        """What the lanes have to do before the next step, in order; only once."""
        kv_ops, self._kv_ops = self._kv_ops, []
        return kv_ops

    def take_kv_events(self) -> KvEvents:
        """Which blocks came and went since the last time."""
        changes = KvEvents(self._removed, list(self._stored.values()))
        self._removed, self._stored = [], {}
        return changes

    def check_counts(self) -> None:
        """Asserts what counters and lanes say of each other; looks at each lane once and at no other block."""
        used = {allocation.lane for allocation in self._allocations.values()}
        assert len(used) == len(self._allocations)
        assert sorted([*used, *self._lane_ends, *self._free_lanes]) == list(range(self._num_lanes)), self
        for lane, block in self._lane_ends.items():
            assert (block.end_lane, block.lanes, block.ref_count) == (lane, 1 << lane, 0), block
            assert block in self._evictable, block
        for allocation in self._allocations.values():
            assert 0 <= allocation.num_private <= allocation.num_blocks <= allocation.max_blocks
            assert not allocation.path or allocation.path[-1].lanes & allocation.bit, allocation.path[-1]
        private = sum(allocation.num_private for allocation in self._allocations.values())
        assert self._used_blocks - private + len(self._evictable) == self._resident_blocks, self
        assert self._allocations or not self._used_blocks, self
        assert self.free_blocks >= 0, self
        assert len(self._offloaded) <= self._host_blocks

    def check_integrity(self) -> None:
        """Asserts what must hold between any two calls; looks at every block."""
        self.check_counts()
        everything = list(self._tree.all_blocks())
        resident = {block for block in everything if block.is_resident}
        assert len(resident) == self._resident_blocks
        in_use = {block for allocation in self._allocations.values() for block in allocation.path}
        assert resident == in_use | set(self._evictable)
        assert not in_use & set(self._evictable)
        assert self._used_blocks == len(in_use) + sum(
            allocation.num_private for allocation in self._allocations.values()
        )
        assert set(self._offloaded) == {block for block in everything if block.host_copy is not None}
        self._check_lanes(everything)
        seen: set[Block] = set()
        for block in self._evictable:
            assert not any(child.is_resident and child not in seen for child in block.children.values()), block
            seen.add(block)
        for block in everything:
            assert block.is_resident or block.host_copy is not None, block
            assert block.parent is not None
            assert block.start == block.parent.end
            assert self._tree.is_full(block) or not block.children

    def _check_lanes(self, everything: list[Block]) -> None:
        """The lanes and sequences that a block says it has are those whose paths it lies on."""
        assert self._lane_ends == {block.end_lane: block for block in everything if block.end_lane is not None}
        refs = Counter(block for allocation in self._allocations.values() for block in allocation.path)
        lanes = Counter[Block]()
        for allocation in self._allocations.values():
            assert len(set(allocation.path)) == len(allocation.path)
            lanes.update(dict.fromkeys(allocation.path, allocation.bit))
        for lane, end in self._lane_ends.items():
            lanes.update(dict.fromkeys(end.path(), 1 << lane))
        for block in everything:
            assert (block.ref_count, block.lanes) == (refs[block], lanes[block]), block

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _tokens(self, token_ids: "array[int]", start: int, end: int | None = None) -> bytes:
        return block_hash.pack_token_ids(token_ids[start : start + self.block_size if end is None else end])

    def _resident_path(self, domain: Domain | None, token_ids: "array[int]") -> list[Block]:
        if domain is None or not self._can_share:
            return []
        path: list[Block] = []
        root = self._tree.root(domain)
        block: Block | None = root
        while block is not None and block.end + self.block_size < len(token_ids):
            block = block.children.get(self._tokens(token_ids, block.end))
            if block is None or not block.is_resident:
                break
            path.append(block)
        self._tree.prune(root)
        return path

    # adopting

    def _reuse_blocks(self, allocation: _Allocation, token_ids: "array[int]") -> int:
        shared_from = allocation.node.end
        source = None
        passed_lanes: list[Block] = []
        while allocation.node.end + self.block_size < len(token_ids):
            block = allocation.node.children.get(self._tokens(token_ids, allocation.node.end))
            if block is None or not (block.is_resident or self._can_onload(block)):
                break
            self._drop_private(allocation)
            if block.is_resident:
                source = block.any_lane
                passed_lanes += [block] if block.end_lane is not None else []
                self._hold(allocation, block)
            else:
                self._share(allocation, source, shared_from)
                source = None
                if not self._onload(allocation, block):
                    break
        self._share(allocation, source, shared_from)
        for block in passed_lanes:
            self._free_lane_of(block)
        return allocation.node.end

    def _share(self, allocation: _Allocation, source: int | None, start: int) -> None:
        if source is not None:
            self._kv_ops.append(Share(source, allocation.lane, start, allocation.node.end))

    def _hold(self, allocation: _Allocation, block: Block) -> None:
        """Has a sequence use a block that a lane carries."""
        if not block.ref_count:
            del self._evictable[block]
            self._used_blocks += 1
        block.ref_count += 1
        block.lanes |= allocation.bit
        allocation.path.append(block)

    def _drop_private(self, allocation: _Allocation) -> None:
        """The block that a sequence has begun by itself is there, whole, from another."""
        if allocation.num_private:
            self._used_blocks -= allocation.num_private
            allocation.num_private = 0
            self._kv_ops.append(Truncate(allocation.lane, allocation.node.end))

    def _can_onload(self, block: Block) -> bool:
        return block.host_copy is not None and self._onloads_left > 0 and self.free_blocks + len(self._evictable) > 0

    def _onload(self, allocation: _Allocation, block: Block) -> bool:
        """Has a sequence use a block of which there is only a copy in host memory."""
        self._offloaded.move_to_end(block)
        self._take_block()
        if block.host_copy is None:  # pushed out by the copy of what was evicted for it
            return False
        self._onloads_left -= 1
        self._kv_ops.append(Onload(block.host_copy, allocation.lane, block.start, block.end))
        self._used_blocks += 1
        self._carry(allocation, block)
        return True

    def _carry(self, allocation: _Allocation, block: Block) -> None:
        """Has a sequence use a block that only its own lane carries from now on."""
        block.ref_count = 1
        block.lanes = allocation.bit
        self._resident_blocks += 1
        allocation.path.append(block)

    def _reuse_partial_block(self, allocation: _Allocation, token_ids: "array[int]") -> int:
        """Takes the beginning of a block or tail that then goes on differently; where it does, cells are shared too."""
        node = allocation.node
        wanted = self._tokens(token_ids, node.end, min(node.end + self.block_size, len(token_ids) - 1))
        found = node.longest_match(wanted)
        if found is None or allocation.num_blocks == allocation.max_blocks:
            return node.end
        block, count = found
        if not block.is_resident and not self._can_onload(block):
            return node.end
        was_idle = self._evictable.pop(block, 1) is None  # not to be evicted for its own beginning
        is_taken = False
        if self.free_blocks - was_idle + len(self._evictable) > 0:
            is_taken = self._copy_partial_block(allocation, block, count, int(was_idle))
        if was_idle:
            self._evictable[block] = None
        return node.end + count if is_taken else node.end

    def _copy_partial_block(self, allocation: _Allocation, block: Block, count: int, held_back: int) -> bool:
        end = block.start + count
        if block.host_copy is not None:
            self._offloaded.move_to_end(block)
        while self.free_blocks - held_back < 1:
            self._evict(next(iter(self._evictable)))
        if not block.is_resident and block.host_copy is None:
            return False
        if block.is_resident:
            self._kv_ops.append(Share(block.any_lane, allocation.lane, block.start, end))
        else:
            assert block.host_copy is not None
            self._onloads_left -= 1
            self._kv_ops.append(Onload(block.host_copy, allocation.lane, block.start, end))
        allocation.num_private = 1
        self._used_blocks += 1
        return True

    # completing

    def _complete(self, allocation: _Allocation, tokens: bytes) -> None:
        """A block of its own becomes one that all can see, or gives way to an equal one that was there first."""
        node = allocation.node
        block = node.children.get(tokens)
        allocation.num_private -= 1
        if block is not None and block.is_resident:
            self._kv_ops.append(Truncate(allocation.lane, block.start, block.end))
            self._kv_ops.append(Share(block.any_lane, allocation.lane, block.start, block.end))
            self._used_blocks -= 1
            passed = block.end_lane is not None
            self._hold(allocation, block)
            if passed:
                self._free_lane_of(block)
            return
        if block is None:
            for tail in node.proper_prefixes(tokens):
                self._drop_partial_block(tail)
            block = self._tree.add_block(node, tokens)
            self._stored[block.hash] = StoredBlock(node.hash, block.hash)
        self._carry(allocation, block)

    # leaving

    def _cache_partial_block(self, allocation: _Allocation, token_ids: "array[int]", num_computed: int) -> Block | None:
        """Keeps what a sequence has computed of a block that is not full; None where that is nothing, or known."""
        if allocation.root is None or num_computed <= allocation.node.end:
            return None
        node = allocation.node
        tokens = self._tokens(token_ids, node.end, num_computed)
        nearest = node.longest_match(tokens)
        if nearest is not None and nearest[1] == num_computed - node.end:
            return None
        for shorter in node.proper_prefixes(tokens):
            self._drop_partial_block(shorter)
        tail = self._tree.add_block(node, tokens)
        tail.lanes = allocation.bit
        self._resident_blocks += 1
        self._evictable[tail] = None
        return tail

    def _retire_lane(self, allocation: _Allocation, tail: Block | None) -> None:
        """A lane becomes one that carries cached blocks, if they are not carried by others."""
        last = tail or (allocation.path[-1] if allocation.path else None)
        if last is not None and last.lanes == allocation.bit:
            self._end_lane(last, allocation.lane)
            if tail is None:
                self._kv_ops.append(Truncate(allocation.lane, last.end))
            return
        for block in allocation.path:
            block.lanes &= ~allocation.bit
        self._free_lane(allocation.lane)

    def _make_evictable(self, block: Block) -> None:
        """Nobody uses a block any more. Called deepest first, so that the least recently used one is never a parent."""
        self._evictable[block] = None
        if block.host_copy is not None:
            self._offloaded.move_to_end(block)

    # evicting

    def _take_block(self) -> None:
        """Sees to it that one block is free."""
        if self.free_blocks < 1:
            self._evict(next(iter(self._evictable)))

    def _take_lane(self) -> int:
        if not self._free_lanes:
            block = next(iter(self._evictable))
            while not self._free_lanes:
                before = block.parent
                self._evict(block)
                assert before is not None
                block = before
        return self._free_lanes.pop()

    def _evict(self, block: Block) -> None:
        """Has an idle block leave the device, for host memory if there is room and time, else for good."""
        lane = block.end_lane
        assert lane is not None, block
        if block.host_copy is None and self._host_blocks and self._offloads_left > 0:
            self._offload(block, lane)
        self._take_off(block, lane)
        self.evicted_blocks += 1
        if block.host_copy is None:
            self._remove(block)

    def _drop_partial_block(self, tail: Block) -> None:
        """Lets a tail go whose tokens are the beginning of another child's."""
        if tail.host_copy is not None:
            del self._offloaded[tail]
            self._kv_ops.append(Discard(tail.host_copy))
            tail.host_copy = None
        if tail.end_lane is not None:
            self._take_off(tail, tail.end_lane)
        self._remove(tail)

    def _take_off(self, block: Block, lane: int) -> None:
        """The idle lane that ends at a block ends before it from now on; it is free if others carry the rest."""
        del self._evictable[block], self._lane_ends[lane]
        block.lanes, block.end_lane = 0, None
        self._resident_blocks -= 1
        before = block.parent
        assert before is not None
        if before.lanes == 1 << lane:
            self._end_lane(before, lane)
            self._truncate(lane, block.start)
            return
        for carried in before.path():
            carried.lanes &= ~(1 << lane)
        self._free_lane(lane)

    def _free_lane_of(self, block: Block) -> None:
        """Frees the idle lane that ends at a block which another lane carries too."""
        lane = block.end_lane
        assert lane is not None, block
        block.end_lane = None
        del self._lane_ends[lane]
        for carried in block.path():
            carried.lanes &= ~(1 << lane)
        self._free_lane(lane)

    def _end_lane(self, block: Block, lane: int) -> None:
        """An idle lane carries nothing beyond a block."""
        block.end_lane = lane
        self._lane_ends[lane] = block

    def _free_lane(self, lane: int) -> None:
        self._truncate(lane, 0)
        self._free_lanes.append(lane)

    def _truncate(self, lane: int, start: int) -> None:
        last = self._kv_ops[-1] if self._kv_ops else None
        if isinstance(last, Truncate) and last.lane == lane and last.end is None:
            self._kv_ops.pop()
        self._kv_ops.append(Truncate(lane, start))

    def _remove(self, block: Block) -> None:
        """A block that is nowhere any more, and with it the copies of what came behind it."""
        for behind in block.descendants():
            self._discard_copy(behind)
            self._unlink(behind)
        self._unlink(block)

    def _unlink(self, block: Block) -> None:
        assert block.parent is not None
        block.parent.remove_child(block)
        if self._tree.is_full(block) and self._stored.pop(block.hash, None) is None:
            self._removed.append(block.hash)
        if isinstance(block.parent, Root):
            self._tree.prune(block.parent)

    # host memory

    def _offload(self, block: Block, lane: int) -> None:
        while len(self._offloaded) >= self._host_blocks:
            self._drop_copy(next(iter(self._offloaded)))
        self._offloads_left -= 1
        self._last_number += 1
        block.host_copy = self._last_number
        self._offloaded[block] = None
        pending = None
        if self._kv_ops and isinstance(self._kv_ops[-1], Truncate) and self._kv_ops[-1].lane == lane:
            pending = self._kv_ops.pop()  # saved first, cut once
        self._kv_ops.append(Offload(block.host_copy, lane, block.start, block.end))
        if pending is not None:
            self._kv_ops.append(pending)

    def _drop_copy(self, block: Block) -> None:
        """Lets the oldest copy go; where it was all there was, the block goes, and what came behind it."""
        self._discard_copy(block)
        if not block.is_resident:
            self._remove(block)

    def _discard_copy(self, block: Block) -> None:
        assert block.host_copy is not None, block
        del self._offloaded[block]
        self._kv_ops.append(Discard(block.host_copy))
        block.host_copy = None
