"""The lane map: which lanes of the device carry which blocks.

A lane carries a whole path of the prefix tree from its root, so a lane with a block has all its ancestors. Each running
sequence has a lane; an idle lane carries a cached path that no sequence may be using:

    root --- A --- B --- C --- D      lane 0, running:  A B C
                         |            lane 1, idle:     A B C D, ends at D
                         `--- E       lane 2, idle:     A B C E, ends at E

An idle lane is kept only for its last block, which no other lane carries. Once another lane does, or the block is
evicted, the lane ends earlier or is free; so no two idle lanes end at the same block.
"""

from collections import Counter
from collections.abc import Container, Iterable

from tokenbus.worker.engine.kv.ops import OpQueue
from tokenbus.worker.engine.kv.prefix_tree import Block


class LaneMap:
    """Keeps the lanes of every block (`Block.lanes`, `Block.end_lane`) and the free lanes."""

    def __init__(self, num_lanes: int, ops: OpQueue) -> None:
        self._num_lanes = num_lanes
        self.limit = num_lanes
        """The lanes that may be taken at the same time, running and idle ones together."""
        self._ops = ops
        self._free = list(reversed(range(num_lanes)))
        self._ends: dict[int, Block] = {}
        """The last block of each idle lane."""
        self.num_resident = 0
        """Blocks that a lane carries."""

    def __repr__(self) -> str:
        return f"<LaneMap {len(self._ends)} idle, {len(self._free)} free of {self._num_lanes}>"

    @property
    def has_free(self) -> bool:
        return self.num_taken < self.limit

    @property
    def num_taken(self) -> int:
        """Lanes that are running or idle."""
        return self._num_lanes - len(self._free)

    @property
    def num_idle(self) -> int:
        return len(self._ends)

    def take(self) -> int:
        """Takes an empty lane for a sequence."""
        return self._free.pop()

    def add(self, lane: int, block: Block) -> None:
        """Notes that a lane carries a block, after all that it already carries."""
        self.num_resident += not block.lanes  # the first lane makes it resident
        block.lanes |= 1 << lane

    def retire(self, lane: int, path: list[Block], partial: Block | None) -> None:
        """Makes a sequence's lane idle, or frees it if another lane carries all of it.

        `path` holds the sequence's shared blocks, `partial` the block after them that has just been cached."""
        last = partial or (path[-1] if path else None)
        if last is None or last.lanes != 1 << lane:
            self._free_lane(lane, path)
            return
        self._end_at(lane, last)
        if partial is None:  # else the lane holds nothing after its last block
            self._ops.truncate(lane, last.end)

    def remove_end(self, block: Block) -> None:
        """Removes the last block of an idle lane, which then ends at the previous block or is free."""
        lane, parent = block.end_lane, block.parent
        assert lane is not None, block
        assert parent is not None, block
        del self._ends[lane]
        block.lanes, block.end_lane = 0, None
        self.num_resident -= 1
        if parent.lanes == 1 << lane:  # no other lane carries it: this one is kept for it
            self._end_at(lane, parent)
            self._ops.truncate(lane, block.start)
        else:
            self._free_lane(lane, parent.path())

    def free_ending_at(self, block: Block) -> None:
        """Frees the idle lane that ends at a block, if any: another lane now carries the block too."""
        if block.end_lane is not None:
            lane, block.end_lane = block.end_lane, None
            del self._ends[lane]
            self._free_lane(lane, block.path())

    def check_counts(self, running: Iterable[int], evictable: Container[Block]) -> None:
        """Asserts that every lane is running, free, or idle and ends at an evictable block; looks at no other block."""
        assert sorted([*running, *self._ends, *self._free]) == list(range(self._num_lanes)), self
        for lane, block in self._ends.items():
            assert (block.end_lane, block.lanes, block.ref_count) == (lane, 1 << lane, 0), block
            assert block in evictable, block

    def check_integrity(self, blocks: Iterable[Block], running: dict[int, list[Block]]) -> None:
        """Asserts that each block's lanes are those on whose paths it lies. `running` are the running lanes."""
        lanes = Counter[Block]()
        for lane, path in running.items():
            lanes.update(dict.fromkeys(path, 1 << lane))
        for lane, end in self._ends.items():
            lanes.update(dict.fromkeys(end.path(), 1 << lane))
        assert all(block.lanes == lanes[block] for block in blocks)
        assert self._ends == {block.end_lane: block for block in blocks if block.end_lane is not None}
        assert self.num_resident == len(lanes)

    def _end_at(self, lane: int, block: Block) -> None:
        block.end_lane = lane
        self._ends[lane] = block

    def _free_lane(self, lane: int, path: Iterable[Block]) -> None:
        for block in path:
            block.lanes &= ~(1 << lane)
        self._ops.truncate(lane, 0)
        self._free.append(lane)
