"""The cached blocks that a worker has told the routers of, so that a snapshot can tell them again; pure."""

from collections.abc import Iterable, Iterator

from tokenbus.protocol.wire import internal


class PublishedBlocks:
    """The hash of each block that is held, with that of the block before it. Bounded by what the engine can hold."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<PublishedBlocks {len(self._parents)}>"

    def __len__(self) -> int:
        return len(self._parents)

    def apply(self, removed: Iterable[int], stored: Iterable[tuple[int, int]]) -> None:
        """Takes what an engine reports: what is gone, then what is new, with the hash before each."""
        for name in removed:
            del self._parents[name]
        for parent, name in stored:
            assert name not in self._parents, name
            self._parents[name] = parent

    def clear(self) -> None:
        self._parents.clear()

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Every block that is held, behind the hash of the one before it; parents first."""
        return ((parent, name) for name, parent in self._parents.items())

    def runs(self) -> list[internal.BlockRun]:
        """Everything that is held."""
        return list(to_runs(self.pairs()))


def to_runs(stored: Iterable[tuple[int, int]]) -> Iterator[internal.BlockRun]:
    """Blocks with the one before each, as runs in which every block follows the one before."""
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
