"""Copies of blocks in host memory, for prefixes that have to leave the device.

A copy outlives the block's return to the device, so that evicting it again costs nothing. The scheduler limits how many
blocks are copied in each direction before a step, since a step waits for them.

Copies outlive the engine too, each with a label that names its block (worker/engine/host_cache). So blocks may be
copied as soon as they are complete, not only when they have to leave the device.
"""

from collections.abc import Iterable, Iterator

from tokenbus.worker.engine.kv.eviction_order import EvictionOrder
from tokenbus.worker.engine.kv.ops import Discard, Onload, OpQueue
from tokenbus.worker.engine.kv.prefix_tree import Block, BlockLabel


class HostCopies:
    """Up to `capacity` copies (`Block.host_copy`)."""

    def __init__(self, capacity: int, ops: OpQueue) -> None:
        self.capacity = capacity
        self._ops = ops
        self._copies = EvictionOrder(capacity)
        self._unlabelled: dict[Block, None] = {}
        """Blocks whose copies were made since the labels were last taken."""
        self._last_id = 0
        self._offloads_left = 0
        self._onloads_left = 0
        self.offloaded_blocks = 0
        """Blocks copied to host memory, in total."""
        self.onloaded_blocks = 0
        """Blocks copied back, in total."""
        self.adopted_blocks = 0
        """Copies that came from elsewhere, in total."""

    def __repr__(self) -> str:
        return f"<HostCopies {len(self)} of {self.capacity}>"

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def is_full(self) -> bool:
        return len(self._copies) >= self.capacity

    def __iter__(self) -> Iterator[Block]:
        """All blocks with copies, in the order of discarding."""
        return iter(self._copies)

    @property
    def first(self) -> Block:
        """The block whose copy is the next to be discarded; there must be one."""
        return self._copies.first

    @property
    def can_offload(self) -> bool:
        return self.capacity > 0 and self._offloads_left > 0

    @property
    def can_onload(self) -> bool:
        return self._onloads_left > 0

    def set_limits(self, offloads: int, onloads: int) -> None:
        """Sets how many blocks may be copied to and from host memory until the next call."""
        self._offloads_left, self._onloads_left = offloads, onloads

    def offload(self, block: Block, lane: int) -> None:
        """Copies the last block of a lane to host memory, where there must be room."""
        assert self.can_offload, self
        self._offloads_left -= 1
        self.offloaded_blocks += 1
        self._ops.offload(self._add(block), lane, block.start, block.end)

    def adopt(self, block: Block) -> int:
        """Notes a copy that comes from elsewhere, for which there must be room; returns its id. The caller gives the
        runner its content before any op can name the id."""
        self.adopted_blocks += 1
        return self._add(block)

    def onload(self, block: Block, lane: int, end: int) -> None:
        """Copies the tokens of a block up to `end` back to a lane."""
        assert block.host_copy is not None, block
        assert self.can_onload, self
        self._onloads_left -= 1
        self.onloaded_blocks += 1
        self._ops.add(Onload(block.host_copy, lane, block.start, end))

    def touch(self, block: Block) -> None:
        """Notes that a block has been used; does nothing for a block without a copy."""
        if block.host_copy is not None:
            self._copies.add(block)

    def demote(self, block: Block) -> None:
        """Makes a block's copy the next to be discarded; does nothing for a block without one."""
        if block.host_copy is not None:
            self._copies.put_first(block)

    def discard(self, block: Block) -> None:
        assert block.host_copy is not None, block
        self._copies.remove(block)
        self._unlabelled.pop(block, None)
        self._ops.add(Discard(block.host_copy))
        block.host_copy = None

    def recover(self, block: Block, copy_id: int) -> None:
        """Adopts a block's copy that an earlier engine made."""
        assert block.host_copy is None, block
        block.host_copy = copy_id
        self._copies.add(block)
        self._last_id = max(self._last_id, copy_id)

    def take_labels(self) -> list[tuple[int, BlockLabel]]:
        """Returns the ids and labels of the copies made since the last call that are still wanted."""
        blocks, self._unlabelled = self._unlabelled, {}
        return [(block.host_copy, block.label()) for block in blocks if block.host_copy is not None]

    def check_counts(self) -> None:
        assert len(self._copies) <= self.capacity, self

    def check_integrity(self, blocks: Iterable[Block]) -> None:
        """Asserts that exactly the blocks that say so have a copy."""
        assert set(self._copies) == {block for block in blocks if block.host_copy is not None}

    def _add(self, block: Block) -> int:
        assert block.host_copy is None, block
        assert not self.is_full, self
        self._last_id += 1
        block.host_copy = self._last_id
        self._unlabelled[block] = None
        self._copies.add(block)
        return self._last_id
