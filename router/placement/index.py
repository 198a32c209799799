"""The prefix index: which workers of a model hold which blocks, by their hashes; pure.

Each block has one integer, in which every worker has a bit: so whoever holds the first n blocks of a prompt is found
with a few looks, however many workers there are. Whoever holds a block holds all before it, since workers evict leaves
first; what breaks that rule is only found less often."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_SWEEP_BLOCKS = 4_096
"""Blocks that one call of `sweep` looks at: about a millisecond."""


class Level(NamedTuple):
    """Workers that hold so many of the leading blocks, and no more."""

    overlap_blocks: int
    places: int
    """Their bits."""


class PrefixIndex:
    """Blocks of the workers of one model. A worker is known by its place, a small number that it has for one life."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._alone: dict[int, int] = {}
        """Each bit as one object, however many blocks only that worker holds: an integer of its own takes 32 bytes."""
        self._num_blocks: dict[int, int] = {}
        self._most_blocks: dict[int, int] = {}
        self._left = 0
        """Bits of workers that have left and whose blocks wait to be swept out."""
        self._sweeping = 0
        """Bits that are being swept out, of these blocks."""
        self._unswept: Iterator[int] = iter(())
        self.num_refused = 0
        """Blocks that a worker said it holds beyond what it has advertised."""

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self._holders)} blocks of {len(self._num_blocks)} workers>"

    def __len__(self) -> int:
        return len(self._holders)

    def join(self, most_blocks: int) -> int:
        """A place for a worker that can hold so many blocks, and holds none."""
        taken = self._left | self._sweeping
        for place in self._num_blocks:
            taken |= 1 << place
        place = (~taken & (taken + 1)).bit_length() - 1
        self._num_blocks[place], self._most_blocks[place] = 0, most_blocks
        self._alone[1 << place] = 1 << place
        return place

    def allow(self, place: int, most_blocks: int) -> None:
        """A worker has said anew how many blocks it can hold."""
        self._most_blocks[place] = max(most_blocks, self._num_blocks[place])

    def leave(self, place: int) -> None:
        """That worker holds nothing any more. What it held is found by nobody, and forgotten by and by in `sweep`."""
        del self._num_blocks[place], self._most_blocks[place], self._alone[1 << place]
        self._left |= 1 << place

    def store(self, place: int, hashes: Iterable[int]) -> None:
        """A worker holds these blocks now; beyond what it has advertised they are not believed."""
        holders, bit = self._holders, self._alone[1 << place]
        room = before = self._most_blocks[place] - self._num_blocks[place]
        for name in hashes:
            known = holders.get(name)
            if known is None:
                if not room:
                    self.num_refused += 1
                    continue
                holders[name] = bit
            elif known & bit:
                continue
            elif not room:
                self.num_refused += 1
                continue
            else:
                holders[name] = known | bit
            room -= 1
        self._num_blocks[place] += before - room

    def remove(self, place: int, hashes: Iterable[int]) -> None:
        """A worker holds these blocks no more."""
        holders, bit = self._holders, 1 << place
        count = 0
        for name in hashes:
            known = holders.get(name, 0)
            if not known & bit:
                continue
            count += 1
            self._set(name, known ^ bit)
        self._num_blocks[place] -= count

    def match(self, hashes: Sequence[int], places: int) -> list[Level]:
        """How many leading blocks each of `places` holds, the most first; those that hold none are left out.

        Looks at few blocks: from where the holders are known it looks twice as far each time they are still the same,
        and halves its way back to where they are fewer."""
        get = self._holders.get
        levels: list[Level] = []
        end = len(hashes)
        now = places & get(hashes[0], 0) if end else 0
        reached = 1
        while now:
            low, stride = reached, 1
            high = end + 1
            while low < end:
                probe = min(low + stride, end)
                if now & ~get(hashes[probe - 1], 0):
                    high = probe
                    break
                low, stride = probe, 2 * stride
            while high - low > 1 and high <= end:
                middle = (low + high) // 2
                if now & ~get(hashes[middle - 1], 0):
                    high = middle
                else:
                    low = middle
            rest = now & get(hashes[low], 0) if low < end else 0
            levels.append(Level(low, now & ~rest))
            now, reached = rest, low + 1
        levels.reverse()
        return levels

    def num_blocks(self, place: int) -> int:
        """How many blocks a worker holds."""
        return self._num_blocks[place]

    def held_by(self, place: int) -> Iterator[int]:
        """The blocks of one worker, by a look at every block there is."""
        bit = 1 << place
        return (name for name, places in self._holders.items() if places & bit)

    def sweep(self) -> bool:
        """Forgets some of what workers held that have left; whether there is more to forget."""
        if not self._sweeping:
            self._sweeping, self._left = self._left, 0
            self._unswept = iter(list(self._holders)) if self._sweeping else iter(())
        batch = list(itertools.islice(self._unswept, _SWEEP_BLOCKS))
        if not batch:
            self._sweeping = 0
        for name in batch:
            known = self._holders.get(name, 0)
            if known & self._sweeping:
                self._set(name, known & ~self._sweeping)
        return bool(self._sweeping or self._left)

    def check_integrity(self) -> None:
        """Asserts what must hold between any two calls."""
        gone = self._left | self._sweeping
        counted = dict.fromkeys(self._num_blocks, 0)
        for places in self._holders.values():
            assert places, "a block that nobody holds"
            for place in range(places.bit_length()):
                if places >> place & 1:
                    assert place in counted or gone >> place & 1, place
                    if place in counted:
                        counted[place] += 1
        assert counted == self._num_blocks
        assert all(count <= self._most_blocks[place] for place, count in counted.items())

    def _set(self, name: int, places: int) -> None:
        if places:
            self._holders[name] = self._alone.get(places, places)
        else:
            del self._holders[name]
