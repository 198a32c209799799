"""The prefix index: which workers of a model hold which blocks, by their hashes; pure.

Each block has one integer, in which every worker has a bit: so whoever holds the first n blocks of a prompt is found
with a few looks, however many workers there are. Whoever holds a block holds all before it, since workers evict leaves
first; what breaks that rule is only found less often."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_SWEEP_BLOCKS = 4_096
"""Blocks that one call of `sweep` looks at: about a millisecond."""


class MatchLevel(NamedTuple):
    """Workers that hold so many of the leading blocks, and no more."""

    overlap_blocks: int
    worker_bits: int
    """Their bits."""


class PrefixIndex:
    """Blocks of the workers of one model. A worker is known by its place, a small number that it has for one life."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._single_bits: dict[int, int] = {}
        """Each bit as one object, however many blocks only that worker holds: an integer of its own takes 32 bytes."""
        self._num_blocks: dict[int, int] = {}
        self._max_blocks: dict[int, int] = {}
        self._removed_bits = 0
        """Bits of workers that have left and whose blocks wait to be swept out."""
        self._sweeping_bits = 0
        """Bits that are being swept out, of these blocks."""
        self._unswept: Iterator[int] = iter(())
        self.num_refused = 0
        """Blocks that a worker said it holds beyond what it has advertised."""

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self._holders)} blocks of {len(self._num_blocks)} workers>"

    def __len__(self) -> int:
        return len(self._holders)

    def add_worker(self, max_blocks: int) -> int:
        """A place for a worker that can hold so many blocks, and holds none."""
        taken = self._removed_bits | self._sweeping_bits
        for row in self._num_blocks:
            taken |= 1 << row
        row = (~taken & (taken + 1)).bit_length() - 1
        self._num_blocks[row], self._max_blocks[row] = 0, max_blocks
        self._single_bits[1 << row] = 1 << row
        return row

    def set_max_blocks(self, row: int, max_blocks: int) -> None:
        """A worker has said anew how many blocks it can hold."""
        self._max_blocks[row] = max(max_blocks, self._num_blocks[row])

    def remove_worker(self, row: int) -> None:
        """That worker holds nothing any more. What it held is found by nobody, and forgotten by and by in `sweep`."""
        del self._num_blocks[row], self._max_blocks[row], self._single_bits[1 << row]
        self._removed_bits |= 1 << row

    def store(self, row: int, hashes: Iterable[int]) -> None:
        """A worker holds these blocks now; beyond what it has advertised they are not believed."""
        holders, bit = self._holders, self._single_bits[1 << row]
        room = before = self._max_blocks[row] - self._num_blocks[row]
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
        self._num_blocks[row] += before - room

    def remove(self, row: int, hashes: Iterable[int]) -> None:
        """A worker holds these blocks no more."""
        holders, bit = self._holders, 1 << row
        count = 0
        for name in hashes:
            known = holders.get(name, 0)
            if not known & bit:
                continue
            count += 1
            self._set(name, known ^ bit)
        self._num_blocks[row] -= count

    def match(self, hashes: Sequence[int], worker_bits: int) -> list[MatchLevel]:
        """How many leading blocks each of `worker_bits` holds, the most first; those that hold none are left out.

        Looks at few blocks: from where the holders are known it looks twice as far each time they are still the same,
        and halves its way back to where they are fewer."""
        get = self._holders.get
        levels: list[MatchLevel] = []
        end = len(hashes)
        now = worker_bits & get(hashes[0], 0) if end else 0
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
            levels.append(MatchLevel(low, now & ~rest))
            now, reached = rest, low + 1
        levels.reverse()
        return levels

    def num_blocks_of(self, row: int) -> int:
        """How many blocks a worker holds."""
        return self._num_blocks[row]

    def blocks_of(self, row: int) -> Iterator[int]:
        """The blocks of one worker, by a look at every block there is."""
        bit = 1 << row
        return (name for name, worker_bits in self._holders.items() if worker_bits & bit)

    def sweep(self) -> bool:
        """Forgets some of what workers held that have left; whether there is more to forget."""
        if not self._sweeping_bits:
            self._sweeping_bits, self._removed_bits = self._removed_bits, 0
            self._unswept = iter(list(self._holders)) if self._sweeping_bits else iter(())
        batch = list(itertools.islice(self._unswept, _SWEEP_BLOCKS))
        if not batch:
            self._sweeping_bits = 0
        for name in batch:
            known = self._holders.get(name, 0)
            if known & self._sweeping_bits:
                self._set(name, known & ~self._sweeping_bits)
        return bool(self._sweeping_bits or self._removed_bits)

    def check_integrity(self) -> None:
        """Asserts what must hold between any two calls."""
        gone = self._removed_bits | self._sweeping_bits
        counted = dict.fromkeys(self._num_blocks, 0)
        for worker_bits in self._holders.values():
            assert worker_bits, "a block that nobody holds"
            for row in range(worker_bits.bit_length()):
                if worker_bits >> row & 1:
                    assert row in counted or gone >> row & 1, row
                    if row in counted:
                        counted[row] += 1
        assert counted == self._num_blocks
        assert all(count <= self._max_blocks[row] for row, count in counted.items())

    def _set(self, name: int, worker_bits: int) -> None:
        if worker_bits:
            self._holders[name] = self._single_bits.get(worker_bits, worker_bits)
        else:
            del self._holders[name]
