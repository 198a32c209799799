"""Reads how much memory this process may still take: what the machine has free, within the limits of its container."""

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_GROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)
"""Limit and use of a container's memory, in the files of control groups of version 2 and 1."""
_STATS = (Path("/sys/fs/cgroup/memory.stat"), Path("/sys/fs/cgroup/memory/memory.stat"))
_RECLAIMABLE = ("inactive_file", "active_file")
_UNKNOWN = 1 << 62


def read() -> int:
    """Returns the free bytes, counting cached files as free; a huge number where nothing is known."""
    return min([_machine(), *(_group(*paths, stat) for paths, stat in zip(_GROUPS, _STATS, strict=True))])


def _machine() -> int:
    for line in _text(_MEMINFO).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return _UNKNOWN


def _group(limit: Path, usage: Path, stat: Path) -> int:
    most, used = _text(limit).strip(), _text(usage).strip()
    if not most.isdigit() or not used.isdigit():  # there is no such group, or no limit
        return _UNKNOWN
    cached = [int(line.split()[1]) for line in _text(stat).splitlines() if line.split()[0] in _RECLAIMABLE]
    return max(0, int(most) - int(used) + sum(cached))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
