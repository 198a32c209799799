"""The prefix cache: the device's blocks, which computed blocks are kept, and which are evicted first.

    total_blocks
    |-------------------------------------------------------|
    |  private  |  resident: used  |  evictable  |   free   |

A block of the prefix tree is in one of three states; an `Allocation` uses and frees it, everything else happens here:

    used <---use, free---> evictable     lanes of the device carry both: they are resident
     ^                        |
     |                      evict        without room or time for a copy the block is gone at once
     |                        v
     '--------onload------ offloaded     there is only a copy in host memory
                              |
                           discard       when its copy comes first, or a block before it is gone
                              v
                             gone

A resident block may keep a copy from an earlier stay, so that evicting it again costs nothing.

Blocks are evicted in eviction order. Sequences free their blocks deepest first, so no lane continues past the first
block of the order: it is the last block of an idle lane, and evicting it shortens the lane by one block.
"""

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Listing

from tokenbus.worker.engine.kv.eviction_order import EvictionOrder
from tokenbus.worker.engine.kv.host_copies import HostCopies
from tokenbus.worker.engine.kv.lane_map import LaneMap
from tokenbus.worker.engine.kv.ops import OpQueue
from tokenbus.worker.engine.kv.prefix_tree import Block, BlockLabel, KvEvents, PrefixTree, Root
from tokenbus.worker.engine.kv.retention import DEFAULT_LIMITS, Retention, RetentionLimits, SessionKey

_MAX_PASSED_OVER = 64
"""The most copies of blocks in use that are skipped in the search for one to discard."""


class PrefixCache:
    """The prefix tree with the lanes and copies of its blocks, and the order in which they are evicted."""

    def __init__(
        self,
        total_blocks: int,
        block_size: int,
        num_lanes: int,
        host_blocks: int,
        fingerprint: str,
        *,
        writes_through: bool = False,
        limits: RetentionLimits = DEFAULT_LIMITS,
        min_prefix_tokens: int = 0,
    ) -> None:
        assert total_blocks > 0, total_blocks
        assert block_size > 0, block_size
        self.total_blocks = total_blocks
        self.block_size = block_size
        self.min_prefix_tokens = min_prefix_tokens
        """Sequences with fewer computed tokens leave nothing cached."""
        self.num_private = 0
        """Blocks of sequences that are not in the tree."""
        self.ops = OpQueue()
        self.tree = PrefixTree(block_size, fingerprint)
        self.lanes = LaneMap(num_lanes, self.ops)
        self.host = HostCopies(host_blocks, self.ops)
        self._evictable = EvictionOrder(total_blocks)
        """Resident blocks that no sequence uses."""
        self.retention: Retention[Block] = Retention(
            max(total_blocks, host_blocks), limits, lambda block: 1, self._requeue
        )
        self._writes_through = writes_through and host_blocks > 0
        self._unsaved: dict[Block, None] = {}
        """Full resident blocks to be copied to host memory although they need not leave the device."""
        self.evicted_blocks = 0
        """Blocks that had to leave the device, in total."""

    def __repr__(self) -> str:
        used = f"{self.used_blocks} used, {self.evictable_blocks} evictable"
        return f"<PrefixCache {used} of {self.total_blocks}, {self.lanes!r}, {self.host!r}>"

    @property
    def evictable_blocks(self) -> int:
        """Resident blocks that no sequence uses."""
        return len(self._evictable)

    @property
    def used_blocks(self) -> int:
        """Blocks that sequences use, each counted once."""
        return self.lanes.num_resident - len(self._evictable) + self.num_private

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - self.lanes.num_resident - self.num_private

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def make_room(self, count: int) -> bool:
        """Evicts blocks until `count` are free; if too few can be evicted, changes nothing and returns False."""
        missing = count - self.free_blocks
        if missing > len(self._evictable):
            return False
        for _ in range(missing):
            self._evict(self._evictable.first)
        return True

    def can_onload(self, block: Block) -> bool:
        """Whether a block can be copied back from host memory now."""
        return block.host_copy is not None and self.host.can_onload and self.free_blocks + len(self._evictable) > 0

    def insert(self, parent: Block, tokens: bytes, lane: int) -> Block:
        """Adds a block that one lane has computed. Partial blocks that it extends are removed."""
        for partial in parent.proper_prefixes(tokens):
            self.remove_partial(partial)
        block = self.tree.insert(parent, tokens)
        self.lanes.add(lane, block)
        if self._writes_through and self.tree.is_full(block):
            self._unsaved[block] = None
        return block

    def pin(self, block: Block) -> bool:
        """Keeps a block from being evicted; returns whether it could have been."""
        return self._evictable.remove(block)

    def make_evictable(self, block: Block) -> None:
        """Makes a block that no sequence uses the last of its class to be evicted."""
        self._evictable.add(block)
        self.host.touch(block)

    def end_session(self, session: SessionKey) -> None:
        """Makes the blocks that a session alone has used the first to be evicted and discarded."""
        alone: set[Block] = set()
        # deepest first: a block must stay as long as its descendants, which may be others'
        for block in sorted(self.retention.of_session(session), key=lambda block: -block.start):
            if not block.ref_count and alone.issuperset(block.children.values()):
                alone.add(block)
        self._put_first(sorted(alone, key=lambda block: block.start))

    def keep_session(self, session: SessionKey, ttl_s: float) -> None:
        """Keeps the blocks of a session, and those that lead to them."""
        owned = self.retention.of_session(session)
        inner = {block.parent for block in owned}
        for block in owned:
            if block not in inner:
                self.retention.keep(session[0], block.path(), ttl_s)

    def demote(self, path: Listing[Block]) -> None:
        """Makes a conversation that continues at another worker the first to be evicted and discarded: its blocks in
        the path and below it, but none that leads to other conversations too.

            path     |== A ==|== B ==|== C ==|
            behind                           '-- D --       B, C and D are demoted, deepest first
            other            '-- E --
        """
        end = path[-1] if path else None
        while end is not None and len(end.children) == 1:
            (end,) = end.children.values()
        if end is None or end.children:
            return
        alone = [end]
        while (parent := alone[-1].parent) is not None and parent.parent is not None and len(parent.children) == 1:
            alone.append(parent)
        self._put_first(reversed(alone))

    @property
    def has_lane(self) -> bool:
        """Whether there is a lane that is free, or idle."""
        return self.lanes.has_free or self.lanes.num_idle > 0

    def take_lane(self) -> int:
        """Takes an empty lane; if there is none, the idle lane with the next block to be evicted is emptied."""
        if not self.lanes.has_free:
            self.empty_idle_lane()
        return self.lanes.take()

    def empty_idle_lane(self) -> None:
        """Empties the idle lane with the next block to be evicted; there must be one."""
        # That block ends an idle lane. Evicting the path up to where it joins another lane frees that lane.
        block, num_taken = self._evictable.first, self.lanes.num_taken
        while self.lanes.num_taken == num_taken:
            parent = block.parent
            self._evict(block)
            assert parent is not None
            block = parent

    def trim(self, max_evictable: int) -> None:
        """Evicts the first blocks of the order until `max_evictable` are left, as far as there is time to copy them."""
        while len(self._evictable) > max_evictable and (self.host.can_offload or not self.host.capacity):
            self._evict(self._evictable.first)

    @property
    def has_unsaved(self) -> bool:
        """Whether `write_through` would have anything to copy."""
        return bool(self._unsaved)

    def take_labels(self) -> list[tuple[int, BlockLabel]]:
        """Returns the labels of the copies made by the ops since the last call, by copy id."""
        return self.host.take_labels()

    def take_events(self) -> KvEvents:
        """Returns the full blocks that came and went since the last call."""
        return self.tree.take_events()

    def write_through(self) -> None:
        """Copies new blocks to host memory, so that they outlive the engine, as far as there is time and room."""
        while self._unsaved and self.host.can_offload:
            block = next(iter(self._unsaved))
            del self._unsaved[block]
            if block.host_copy is None and self.make_room_for_copy():
                self.host.offload(block, block.any_lane)

    def recover(self, copies: Listing[tuple[int, BlockLabel]]) -> dict[int, str]:
        """Adopts copies that an earlier engine made, given by id and in the order in which they were made.

        Returns the ids of those whose labels make no sense, with the reason; these are not kept."""
        blocks: dict[int, Block] = {}
        by_digest: dict[bytes, Block] = {}
        rejected: dict[int, str] = {}
        for copy_id, label in sorted(copies, key=lambda one: one[1].start):  # parents first
            parent = by_digest.get(label.parent_digest)
            if label.start == 0 and label.parent_digest == label.root_digest:
                parent = self.tree.recover_root(label.root_hash, label.root_digest)
            if parent is None:
                rejected[copy_id] = "orphan"
            elif parent.end != label.start or not 0 < len(label.tokens) <= 4 * self.block_size:
                rejected[copy_id] = "misplaced"
            elif label.tokens in parent.children:
                rejected[copy_id] = "duplicate"
            else:
                block = blocks[copy_id] = self.tree.insert(parent, label.tokens)
                if self.tree.is_full(block):
                    by_digest[block.digest] = block
                continue
            if isinstance(parent, Root):
                self.tree.prune(parent)
        for copy_id, _ in copies:
            if copy_id in blocks:
                self.host.recover(blocks[copy_id], copy_id)
        return rejected

    def clear(self) -> None:
        """Removes all copies and every block that no sequence uses."""
        self.host.set_limits(offloads=0, onloads=0)
        while len(self.host):
            self._discard_copy(self.host.first)
        while self._evictable:
            self._evict(self._evictable.first)

    def check_counts(self, running: set[int]) -> None:
        """Asserts the invariants of counters and lanes; `running` are the lanes of sequences."""
        self.lanes.check_counts(running, self._evictable)
        self.host.check_counts()
        assert self.used_blocks >= self.num_private >= 0, self
        assert self.free_blocks >= 0, self

    def check_integrity(self, running: dict[int, list[Block]]) -> None:
        """Asserts the invariants of every block; `running` are the lanes of sequences and the blocks on them."""
        blocks = list(self.tree.all_blocks())
        self.lanes.check_integrity(blocks, running)
        self.host.check_integrity(blocks)
        self.retention.check_integrity(blocks)
        used = {block for path in running.values() for block in path}
        assert not used & set(self._evictable)
        assert {block for block in blocks if block.lanes} == used | set(self._evictable)
        gone: set[Block] = set()
        for block in self._evictable:  # no block outlasts its ancestors
            assert all(not child.lanes or child in gone for child in block.children.values()), block
            gone.add(block)
        assert all(block.lanes for block in self._unsaved), self._unsaved
        for block in blocks:
            assert block.lanes or block.host_copy is not None, block
            assert block.parent is not None
            assert block.start == block.parent.end
            assert not block.start or block.parent.kept_until >= block.kept_until, (
                "a path is kept from its beginning on"
            )
            assert self.tree.is_full(block) or not block.children

    def _put_first(self, blocks: Iterable[Block]) -> None:
        """Makes blocks the first to be evicted, the last of them first of all."""
        for block in blocks:
            self.retention.release(block)
            if block in self._evictable:
                self._evictable.put_first(block)
            self.host.demote(block)

    def _requeue(self, block: Block) -> None:
        """Puts a block where it belongs in the order, now that it is kept, or no longer kept."""
        if block in self._evictable:
            self._evictable.add(block)
        self.host.touch(block)

    def _remove_from_tree(self, block: Block) -> None:
        self.retention.forget(block)
        self.tree.remove(block)

    def _evict(self, block: Block) -> None:
        """Removes a block from the device: to host memory if there is room and time, else for good."""
        lane = block.end_lane
        assert lane is not None, block
        if block.host_copy is None and self.host.can_offload and self.make_room_for_copy():
            self.host.offload(block, lane)
        self._remove_from_device(block)
        self.evicted_blocks += 1
        if block.host_copy is None:
            self._remove(block)

    def _remove_from_device(self, block: Block) -> None:
        self._unsaved.pop(block, None)
        self._evictable.remove(block)
        self.lanes.remove_end(block)

    def remove_partial(self, partial: Block) -> None:
        """Removes a partial block that has neither lane nor copy."""
        if partial.host_copy is not None:
            self.host.discard(partial)
        if partial.lanes:
            self._remove_from_device(partial)
        self._remove_from_tree(partial)

    def forget(self, block: Block) -> None:
        """Removes a block that no sequence uses, and its descendants, from the device and from host memory."""
        for one in (*block.descendants(), block):
            self.remove_partial(one)

    def make_room_for_copy(self) -> bool:
        """Discards the first copy, in order, of a block that no sequence uses; returns whether there is room.

        The beginning of a long stream must not be discarded for its end: without it, the end can't be recovered."""
        if self.host.capacity and self.host.is_full:
            for block in list(itertools.islice(self.host, _MAX_PASSED_OVER)):
                if not block.ref_count:
                    self._discard_copy(block)
                    break
                self.host.touch(block)
        return not self.host.is_full

    def _discard_copy(self, block: Block) -> None:
        """Discards a copy, and its block if nothing else of it is left."""
        self.host.discard(block)
        if not block.lanes:
            self._remove(block)

    def _remove(self, block: Block) -> None:
        """Removes a block of which nothing is left, with the copies below it, which can no longer be reached."""
        for behind in block.descendants():  # all of them only copies: a resident block has resident ancestors
            self.host.discard(behind)
            self._remove_from_tree(behind)
        self._remove_from_tree(block)
