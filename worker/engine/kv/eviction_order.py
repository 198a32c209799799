"""The order in which cached blocks are evicted: those used once, then those of continued prompts, then those that
clients have asked to keep, each by last use (decision 0065).

A prompt that continues a cached one, like the next turn of a conversation or of an agent, is likely to be continued
itself; most others never are. If the two were treated alike, every document that is asked about once would push out
ongoing conversations:

    goes first                                                                goes last
    |------------- seen once -------------|-- continued: at most a fifth --|-- kept --|
      oldest                       newest   oldest                   newest
                                       ^------'
                                       the oldest of too many

How much may be kept, and until when, is decided elsewhere (retention.py).
"""

from collections import OrderedDict
from collections.abc import Iterator

from tokenbus.worker.engine.kv.prefix_tree import Block

_CONTINUED_SHARE = 0.2
"""The share of all blocks that may be kept because they were continued."""


class EvictionOrder:
    """An ordered set of blocks. `capacity` is the number of blocks that fit, here and in use together.

    A block is continued, or kept, only together with its ancestors, and precedes them in the order."""

    def __init__(self, capacity: int) -> None:
        self._max_continued = int(_CONTINUED_SHARE * capacity)
        self._once: OrderedDict[Block, None] = OrderedDict()
        self._continued: OrderedDict[Block, None] = OrderedDict()
        self._kept: OrderedDict[Block, None] = OrderedDict()

    def __repr__(self) -> str:
        once, continued, kept = len(self._once), len(self._continued), len(self._kept)
        return f"<EvictionOrder of {once} seen once, {continued} continued, {kept} kept>"

    def __len__(self) -> int:
        return len(self._once) + len(self._continued) + len(self._kept)

    def __contains__(self, block: object) -> bool:
        return block in self._once or block in self._continued or block in self._kept

    def __iter__(self) -> Iterator[Block]:
        """All blocks, in the order of eviction."""
        yield from self._once
        yield from self._continued
        yield from self._kept

    @property
    def first(self) -> Block:
        """The next to evict; there must be one."""
        return next(iter(self._once or self._continued or self._kept))

    def add(self, block: Block) -> None:
        """Makes a block the last of its class to be evicted, whether it was here or not."""
        self.remove(block)
        if block.kept_until:
            self._kept[block] = None
            return
        if not block.is_continued:
            self._once[block] = None
            return
        self._continued[block] = None
        if len(self._continued) > self._max_continued:
            oldest, _ = self._continued.popitem(last=False)
            self._once[oldest] = None

    def put_first(self, block: Block) -> None:
        """Makes a block the next to evict."""
        self.remove(block)
        self._once[block] = None
        self._once.move_to_end(block, last=False)

    def remove(self, block: Block) -> bool:
        """Removes a block; returns whether it was here."""
        # the value of every entry is None; a loop over the three takes three times as long
        return (
            self._once.pop(block, 1) is None
            or self._continued.pop(block, 1) is None
            or self._kept.pop(block, 1) is None
        )
