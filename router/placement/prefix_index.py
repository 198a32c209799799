"""The prefix index: which workers of a model hold which KV blocks, by block hash (decision 0026).

One dictionary maps each block hash to an integer in which every worker has a bit. A worker that holds a block holds all
blocks before it, since hashes are chained and workers evict leaves first. So the set of holders only shrinks along a
prompt, and a few lookups find the depth at which each of them stops, regardless of the number of workers:

    block      1     2     3     4     5     6
    holders   ABC   ABC   AC    AC    A     -       A holds 5 blocks, C 4, B 2

A worker that breaks this rule is merely matched less often.

Workers with checkpoints hold single blocks, at whose ends they can continue, and none of those before. They are found
by lookups from the last block of the prompt backwards."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tokenbus.protocol.wire import block_hash, messages
from tokenbus.router.placement.worker_table import Floats

_SWEEP_BLOCKS = 4_096
"""Blocks checked by one call of `sweep`, which takes about a millisecond."""


class HashScheme(NamedTuple):
    """Determines a model's block hashes; shared by all of its workers that have blocks."""

    fingerprint: str
    block_size: int

    def __str__(self) -> str:
        return f"blocks of {self.block_size} tokens with fingerprint {self.fingerprint!r}"

    def hashes(
        self, token_ids: bytes, tenant: str, cache_salt: str = "", adapters: tuple[block_hash.Adapter, ...] = ()
    ) -> list[int]:
        """Returns the hashes of a prompt's full blocks. The token ids are packed as on the wire."""
        root = block_hash.root_hash(block_hash.PrefixDomain(self.fingerprint, adapters, tenant, cache_salt))
        return block_hash.block_hashes_of_bytes(token_ids, self.block_size, root)


def hash_scheme_of(card: messages.Card) -> HashScheme | None:
    """Returns a worker's hash scheme; None if it has no blocks or hashes them in a way unknown here."""
    kind, _, fingerprint = card.hash_scheme.partition(":")
    if kind != block_hash.SCHEME or not card.kv_block_size:
        return None
    return HashScheme(fingerprint, card.kv_block_size)


class MatchLevel(NamedTuple):
    """The workers that hold exactly this many leading blocks of a prompt."""

    overlap_blocks: int
    worker_bits: int

    def write_to(self, overlap: Floats) -> None:
        """Writes the overlap into the rows of these workers."""
        bits = self.worker_bits
        if bits & (bits - 1) == 0:  # a single worker: the usual case
            overlap[bits.bit_length() - 1] = self.overlap_blocks
            return
        data = np.frombuffer(bits.to_bytes(-(-bits.bit_length() // 8), "little"), np.uint8)
        overlap[np.flatnonzero(np.unpackbits(data, bitorder="little"))] = self.overlap_blocks


class PrefixIndex:
    """The blocks of one model's workers. A worker is named by its row, the number of its bit."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._single_bits: dict[int, int] = {}
        """Each worker's bit as a shared object: most blocks have a single holder, and an integer takes 32 bytes."""
        self._num_blocks: dict[int, int] = {}
        self._max_blocks: dict[int, int] = {}
        self._checkpoint_bits = 0
        """Bits of workers that hold single blocks."""
        self._removed_bits = 0
        """Bits of removed workers whose blocks the next sweep will remove."""
        self._sweeping_bits = 0
        """Bits that the sweep in progress removes."""
        self._unswept: Iterator[int] = iter(())
        """Blocks not yet checked by the sweep."""
        self.num_refused = 0
        """Blocks ignored because a worker reported more than its card advertises."""

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self._holders)} blocks of {len(self._num_blocks)} workers>"

    def __len__(self) -> int:
        return len(self._holders)

    def add_worker(self, max_blocks: int, *, has_checkpoints: bool = False) -> int:
        """Returns a free row for a worker that can hold up to `max_blocks` blocks; with checkpoints, single ones."""
        taken = self._removed_bits | self._sweeping_bits
        for row in self._num_blocks:
            taken |= 1 << row
        row = (~taken & (taken + 1)).bit_length() - 1  # the lowest zero bit
        self._num_blocks[row], self._max_blocks[row] = 0, max_blocks
        self._single_bits[1 << row] = 1 << row
        self._checkpoint_bits |= has_checkpoints << row
        return row

    def update_worker(self, row: int, max_blocks: int, *, has_checkpoints: bool = False) -> None:
        """Changes what a worker can hold; blocks that it already holds stay."""
        self._max_blocks[row] = max(max_blocks, self._num_blocks[row])
        self._checkpoint_bits = self._checkpoint_bits & ~(1 << row) | has_checkpoints << row

    def remove_worker(self, row: int) -> None:
        """Removes a worker. Its blocks no longer match, and `sweep` removes them step by step."""
        del self._num_blocks[row], self._max_blocks[row], self._single_bits[1 << row]
        self._removed_bits |= 1 << row
        self._checkpoint_bits &= ~(1 << row)

    def store(self, row: int, hashes: Iterable[int]) -> None:
        """Adds blocks that a worker now holds. Those beyond what its card advertises are ignored."""
        holders, bit = self._holders, self._single_bits[1 << row]
        room = before = self._max_blocks[row] - self._num_blocks[row]
        for name in hashes:
            known = holders.get(name)
            if known is None:
                if not room:
                    self.num_refused += 1
                    continue
                holders[name] = bit  # the shared object
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
        """Removes blocks that a worker no longer holds."""
        holders, bit = self._holders, 1 << row
        count = 0
        for name in hashes:
            known = holders.get(name, 0)
            if not known & bit:
                continue
            count += 1
            self._set(name, known ^ bit)
        self._num_blocks[row] -= count

    def match(self, hashes: Sequence[int]) -> list[MatchLevel]:
        """Returns how many leading blocks of a prompt each worker holds, largest number first; workers that hold none
        are left out."""
        levels = self._match_chains(hashes)
        if self._checkpoint_bits:
            depths = dict(levels)
            for depth, bits in self._match_checkpoints(hashes):
                depths[depth] = depths.get(depth, 0) | bits
            levels = [MatchLevel(depth, depths[depth]) for depth in sorted(depths, reverse=True)]
        return levels

    def _match_checkpoints(self, hashes: Sequence[int]) -> Iterator[MatchLevel]:
        """Finds the last block of a prompt that each worker with checkpoints holds."""
        left = self._checkpoint_bits
        for depth in range(len(hashes), 0, -1):
            if found := left & self._holders.get(hashes[depth - 1], 0):
                yield MatchLevel(depth, found)
                left &= ~found
            if not left:
                return

    def _match_chains(self, hashes: Sequence[int]) -> list[MatchLevel]:
        """Does the same for workers that hold all blocks before a block.

        Gallops: from where the holders are known it looks twice as far each time they are unchanged, then bisects to
        find where they become fewer."""
        get = self._holders.get
        levels: list[MatchLevel] = []
        end = len(hashes)
        unwanted = self._removed_bits | self._sweeping_bits | self._checkpoint_bits
        now = get(hashes[0], 0) & ~unwanted if end else 0
        reached = 1
        while now:  # all workers in `now` hold `low` blocks, and not all of them `high`
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
            rest = now & get(hashes[low], 0) if low < end else 0  # those that hold more than `low`
            levels.append(MatchLevel(low, now & ~rest))
            now, reached = rest, low + 1
        levels.reverse()
        return levels

    def num_blocks_of(self, row: int) -> int:
        """Returns how many blocks a worker holds."""
        return self._num_blocks[row]

    def blocks_of(self, row: int) -> Iterator[int]:
        """Yields the hashes of a worker's blocks; slow, since it scans the whole index."""
        bit = 1 << row
        return (name for name, worker_bits in self._holders.items() if worker_bits & bit)

    def sweep(self) -> bool:
        """Removes some blocks of removed workers; returns whether there are more to remove."""
        if not self._sweeping_bits:
            self._sweeping_bits, self._removed_bits = self._removed_bits, 0
            # a list, since the dictionary changes during the iteration
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
        """Asserts that every worker's count is right and within its limit, and that every block has a holder."""
        gone = self._removed_bits | self._sweeping_bits
        counted = dict.fromkeys(self._num_blocks, 0)
        for worker_bits in self._holders.values():
            assert worker_bits, "a block without a holder"
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
