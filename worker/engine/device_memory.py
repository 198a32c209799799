"""Reads how much memory a device has, and how much of it is free. Needs no engine's library.

The host's memory is what the machine has within the limits of the control groups of this process. The memory of GPUs is
read where the library that uses them is loaded: `gguf/devices.py` and `onnx/device.py`."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HOST = "host"
"""The name of the host's memory among the names of devices."""
_UNKNOWN = 1 << 62
_ROOT = Path("/")
_GROUPS = "proc/self/cgroup"
_GROUP_FILES = (
    ("sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file")),
    (
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)
"""Folder, limit and use of a control group, and what of its use are cached files, in version 2 and 1."""


class DeviceMemory(NamedTuple):
    """The memory of one device, in bytes."""

    device: str
    """The engine's name for it, such as `CUDA0` or `cuda:0`, or `HOST`."""
    total_bytes: int
    free_bytes: int
    """The bytes that could be allocated now, with those of cached files."""

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.free_bytes


def host(root: Path = _ROOT) -> DeviceMemory | None:
    """Returns the host's memory; None where the system doesn't say. `root` is where `proc` and `sys` are."""
    found = [*_machine(root), *_groups(root)]
    if not found:
        return None
    total, free = (min(sizes) for sizes in zip(*found, strict=True))
    return DeviceMemory(HOST, total, min(free, total))


def free_host_bytes() -> int:
    """Returns the free bytes of the host; a huge number where nothing is known."""
    found = host()
    return found.free_bytes if found is not None else _UNKNOWN


def _machine(root: Path) -> Iterator[tuple[int, int]]:
    """Yields total and free bytes of the machine."""
    sizes = {name: int(rest.split()[0]) << 10 for name, rest in _fields(root / "proc/meminfo", ":")}
    if "MemTotal" in sizes and "MemAvailable" in sizes:
        yield sizes["MemTotal"], sizes["MemAvailable"]


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yields limit and free bytes of each control group of this process that limits memory."""
    for folder, limit_name, usage_name, reclaimable in _GROUP_FILES:
        top = root / folder
        for path in {place for own in _own_groups(root) for place in _up_to(top, top / own)} | {top}:
            limit, usage = _number(path / limit_name), _number(path / usage_name)
            if limit is not None and usage is not None:
                cached = sum(int(size) for name, size in _fields(path / "memory.stat") if name in reclaimable)
                yield limit, max(0, limit - max(0, usage - cached))


def _own_groups(root: Path) -> Iterator[str]:
    """Yields the paths of this process's groups that may limit memory, below where their kind is mounted."""
    for line in _text(root / _GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            yield path.strip("/")


def _up_to(top: Path, path: Path) -> Iterator[Path]:
    """Yields a folder and those above it. In a container the path may be one of the host's, which is not there."""
    yield from (one for one in (path, *path.parents) if one.is_relative_to(top))


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None  # version 2 writes `max` for no limit


def _fields(path: Path, separator: str = " ") -> Iterator[tuple[str, str]]:
    """Yields name and value of each line."""
    for line in _text(path).splitlines():
        name, found, rest = line.partition(separator)
        if found:
            yield name, rest


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
