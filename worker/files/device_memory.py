"""Reads how much memory a device has, and how much of it is free. Needs no engine's library.

The host's memory is the machine's, within the limits of this process's control groups. GPU memory is read where the
library that uses it is loaded: `gguf/backend.py` and `onnx/device.py`."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tokenbus.protocol.process import control_groups

HOST = "host"
"""The name of the host's memory among the names of devices."""
_UNKNOWN = 1 << 62
_ROOT = Path("/")
_GROUP_FILES = (
    (2, "memory.max", "memory.current", ("inactive_file", "active_file")),
    (1, "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)
"""The limit and usage of a control group, and the part of the usage that is cached files, in versions 2 and 1."""


class DeviceMemory(NamedTuple):
    """The memory of one device, in bytes."""

    device: str
    """The engine's name for it, such as `CUDA0` or `cuda:0`, or `HOST`."""
    total_bytes: int
    free_bytes: int
    """The bytes that could be allocated now, including those of cached files."""

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.free_bytes


class HostLimit(NamedTuple):
    """The host's memory as limited by the machine or one of this process's control groups."""

    group: str
    """The path of the group; empty for the machine."""
    total_bytes: int
    free_bytes: int


def host(root: Path = _ROOT) -> DeviceMemory | None:
    """Returns the host's memory; None if the system doesn't say. `root` is where `proc` and `sys` are."""
    limits = host_limits(root)
    if not limits:
        return None
    total, free = min(one.total_bytes for one in limits), min(one.free_bytes for one in limits)
    return DeviceMemory(HOST, total, min(free, total))


def host_limits(root: Path = _ROOT) -> list[HostLimit]:
    """Returns everything that limits the host's memory for this process, the machine first."""
    return [*_machine(root), *_groups(root)]


def free_host_bytes() -> int:
    """Returns the free bytes of the host; a huge number if unknown."""
    found = host()
    return found.free_bytes if found is not None else _UNKNOWN


def _machine(root: Path) -> Iterator[HostLimit]:
    """Yields the machine's limit, if the system says it."""
    sizes = {name: int(rest.split()[0]) << 10 for name, rest in _fields(root / "proc/meminfo", ":")}
    if "MemTotal" in sizes and "MemAvailable" in sizes:
        yield HostLimit("", sizes["MemTotal"], sizes["MemAvailable"])


def _groups(root: Path) -> Iterator[HostLimit]:
    """Yields each control group of this process that limits memory."""
    for version, limit_name, usage_name, reclaimable in _GROUP_FILES:
        for group, path in control_groups.folders("memory", root, version):
            limit, usage = _number(path / limit_name), _number(path / usage_name)
            if limit is not None and usage is not None:
                cached = sum(int(size) for name, size in _fields(path / "memory.stat") if name in reclaimable)
                yield HostLimit(group, limit, max(0, limit - max(0, usage - cached)))


def _number(path: Path) -> int | None:
    text = control_groups.text_of(path).strip()
    return int(text) if text.isdecimal() else None  # version 2 writes `max` for no limit


def _fields(path: Path, separator: str = " ") -> Iterator[tuple[str, str]]:
    """Yields the name and value of each line."""
    for line in control_groups.text_of(path).splitlines():
        name, found, rest = line.partition(separator)
        if found:
            yield name, rest
