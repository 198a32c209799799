"""Cached blocks that routers have been told about, kept so that a snapshot can list them."""

import itertools
from collections.abc import Iterable, Iterator

from tokenbus.protocol.wire import internal


class PublishedBlocks:
    """Maps the hash of each cached block to that of the block before it. The engine's memory bounds its size."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<PublishedBlocks {len(self._parents)}>"

    def apply(self, removed: Iterable[int], stored: Iterable[tuple[int, int]]) -> None:
        """Applies an engine's report: removed hashes, then stored `(parent, hash)` pairs."""
        for name in removed:
            del self._parents[name]
        for parent, name in stored:
            assert name not in self._parents, name
            self._parents[name] = parent

    def num_leading(self, hashes: Iterable[int]) -> int:
        """Returns how many of a prompt's leading blocks are cached."""
        return sum(1 for _ in itertools.takewhile(self._parents.__contains__, hashes))

    def clear(self) -> None:
        """Forgets every block."""
        self._parents.clear()

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yields `(parent, hash)` of every block, parents first."""
        return ((parent, name) for name, parent in self._parents.items())

    def runs(self) -> list[internal.BlockRun]:
        """Returns every block as runs."""
        return list(to_runs(self.pairs()))


def to_runs(stored: Iterable[tuple[int, int]]) -> Iterator[internal.BlockRun]:
    """Groups `(parent, hash)` pairs into runs in which every block follows the one before it."""
    first, names = 0, list[int]()
    for parent, name in stored:
        if names and parent == names[-1]:
            names.append(name)
            continue
        if names:
            yield internal.BlockRun(parent=first, hashes=names)
        first, names = parent, [name]
    if names:
        yield internal.BlockRun(parent=first, hashes=names)
