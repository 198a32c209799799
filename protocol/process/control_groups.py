"""Finds the control groups that limit a process: its own and those above it, in versions 1 and 2."""

from collections.abc import Iterator
from pathlib import Path

_TOP = Path("sys/fs/cgroup")


def folders(controller: str, root: Path, version: int) -> Iterator[tuple[str, Path]]:
    """Yields the path of each group that may limit this process, such as `/system/worker`, and its folder. Its files
    may be missing. `root` is where `proc` and `sys` are.

    In a container the path may be one of the host's, which does not exist there, so the top is always included."""
    top = root / (_TOP if version == 2 else _TOP / controller)
    own = [top / path for path in _paths("self", controller, root, version)]
    places = {place for one in own for place in (one, *one.parents) if place.is_relative_to(top)}
    for folder in sorted(places | {top}):
        yield f"/{folder.relative_to(top)}" if folder != top else "/", folder


def paths_of(process: str, controller: str, root: Path = Path("/")) -> list[str]:
    """Returns the paths of a process's groups with this controller, given its id or `self`."""
    return [path for version in (1, 2) for path in _paths(process, controller, root, version)]


def _paths(process: str, controller: str, root: Path, version: int) -> Iterator[str]:
    """Yields the paths of a process's groups in one version; version 2 names no controllers."""
    for line in text_of(root / "proc" / process / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        named, _, path = rest.partition(":")
        if controller in named.split(",") if version == 1 else not named:
            yield path.strip("/")


def text_of(path: Path) -> str:
    """Returns what a file of the system says; nothing if it is missing. Names of groups may be any bytes."""
    try:
        return path.read_text(errors="surrogateescape")
    except OSError:
        return ""
