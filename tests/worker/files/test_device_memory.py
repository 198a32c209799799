"""The memory of the host, as the files of the system say it."""

from pathlib import Path

import pytest

from tokenbus.worker.files import device_memory
from tokenbus.worker.files.device_memory import HOST, DeviceMemory

GIB = 1 << 30
MEMINFO = f"MemTotal:       {24 * GIB >> 10} kB\nMemFree: 1 kB\nMemAvailable: {20 * GIB >> 10} kB\nHugePages_Total: 0\n"


def machine(root: Path, **files: str) -> DeviceMemory | None:
    """The memory where `/proc` and `/sys` have these files; `__` stands for a slash."""
    for name, text in ({"proc__meminfo": MEMINFO} | files).items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return device_memory.host(root)


def test_a_machine_without_groups_has_what_it_says_is_available(tmp_path: Path) -> None:
    assert machine(tmp_path) == (HOST, 24 * GIB, 20 * GIB)


def test_a_container_has_its_limit_less_what_it_uses_besides_cached_files(tmp_path: Path) -> None:
    found = machine(
        tmp_path,
        **{
            "sys__fs__cgroup__memory.max": f"{8 * GIB}\n",
            "sys__fs__cgroup__memory.current": f"{3 * GIB}\n",
            "sys__fs__cgroup__memory.stat": f"anon {GIB}\ninactive_file {GIB}\nactive_file {GIB}\nshmem 5\n",
        },
    )
    assert found == (HOST, 8 * GIB, 7 * GIB)


def test_cached_files_of_the_groups_below_count_in_version_1(tmp_path: Path) -> None:
    folder = "sys__fs__cgroup__memory__"
    found = machine(
        tmp_path,
        **{
            f"{folder}memory.limit_in_bytes": f"{8 * GIB}\n",
            f"{folder}memory.usage_in_bytes": f"{3 * GIB}\n",
            f"{folder}memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}\n",
        },
    )
    assert found == (HOST, 8 * GIB, 6 * GIB)


@pytest.mark.parametrize(("line", "folder"), [("0::", "sys__fs__cgroup"), ("4:memory:", "sys__fs__cgroup__memory")])
def test_the_groups_above_count_as_well_and_the_tightest_holds(tmp_path: Path, line: str, folder: str) -> None:
    limit, usage = ("memory.max", "memory.current")
    if "memory" in line:
        limit, usage = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    found = machine(
        tmp_path,
        **{
            "proc__self__cgroup": f"{line}/system/worker\n9:name=systemd:/\n",
            f"{folder}__system__{limit}": f"{4 * GIB}\n",
            f"{folder}__system__{usage}": f"{GIB}\n",
            f"{folder}__system__worker__{limit}": f"{6 * GIB}\n",
            f"{folder}__system__worker__{usage}": "0\n",
        },
    )
    assert found == (HOST, 4 * GIB, 3 * GIB)


@pytest.mark.parametrize("limit", ["max\n", "", f"{1 << 63}\n"])
def test_a_group_without_a_limit_takes_nothing_away(tmp_path: Path, limit: str) -> None:
    files = {"sys__fs__cgroup__memory.max": limit, "sys__fs__cgroup__memory.current": "5\n"}
    assert machine(tmp_path, **files) == (HOST, 24 * GIB, 20 * GIB)


def test_a_group_above_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = {"sys__fs__cgroup__memory.max": "10\n", "sys__fs__cgroup__memory.current": "12\n"}
    assert machine(tmp_path, **files) == (HOST, 10, 0)


def test_a_group_of_the_host_that_a_container_does_not_see_changes_nothing(tmp_path: Path) -> None:
    assert machine(tmp_path, proc__self__cgroup="0::/../../kubepods/one\n") == (HOST, 24 * GIB, 20 * GIB)


def test_nothing_is_known_where_the_system_says_nothing(tmp_path: Path) -> None:
    assert device_memory.host(tmp_path) is None


def test_this_machine_has_memory_of_which_some_is_free() -> None:
    found = device_memory.host()
    assert found is not None
    assert 0 < found.free_bytes <= found.total_bytes < 1 << 50
    assert found.used_bytes == found.total_bytes - found.free_bytes
