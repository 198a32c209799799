"""Finds the control groups that limit a process: its own and those above it, in versions 1 and 2."""

from collections.abc import Iterator
from pathlib import Path

_TOP = Path("sys/fs/cgroup")


def folders(controller: str, root: Path, version: int) -> Iterator[tuple[str, Path]]:
    """Yields the path of each group that may limit this process, such as `/system/worker`, and its folder. Its files
    may be missing. `root` is where `proc` and `sys` are.

    In a container the path may be one of the host's, which does not exist there, so the top is always included."""
    top = root / (_TOP if version == 2 else _TOP / controller)
    places = {place for own in paths_of("self", controller, root) for place in (top / own, *(top / own).parents)}
    for folder in sorted({place for place in places if place.is_relative_to(top)} | {top}):
        yield f"/{folder.relative_to(top)}" if folder != top else "/", folder


def paths_of(process: str, controller: str, root: Path = Path("/")) -> list[str]:
    """Returns the paths of a process's groups with this controller, given its id or `self`."""
    lines = [line.split(":", 2) for line in text_of(root / "proc" / process / "cgroup").splitlines()]
    return [
        group.strip("/") for _, controllers, group in lines if not controllers or controller in controllers.split(",")
    ]


def text_of(path: Path) -> str:
    """Returns what a file of the system says; nothing if it is missing."""
    try:
        return path.read_text()
    except OSError:
        return ""
