"""A process counts the cores that it may use, and its control groups limit them."""

import os
from pathlib import Path

import pytest

from tokenbus.protocol.process.cores import usable_cores

MACHINE = set(range(64))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may run on 64 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: MACHINE)


def cores(root: Path, **files: str) -> int:
    """The cores where `/proc` and `/sys` have these files, by their names with `__` in place of a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return usable_cores(root)


def test_without_groups_it_may_use_every_core_that_it_may_run_on(tmp_path: Path) -> None:
    assert cores(tmp_path) == 64


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("400000 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 64), ("max 100000", 64)],
)
def test_a_container_has_the_whole_cores_of_its_limit(tmp_path: Path, quota: str, expected: int) -> None:
    assert cores(tmp_path, **{"sys__fs__cgroup__cpu.max": f"{quota}\n"}) == expected


@pytest.mark.parametrize(("quota", "expected"), [("300000", 3), ("-1", 64)])
def test_version_1_says_it_in_two_files(tmp_path: Path, quota: str, expected: int) -> None:
    folder = "sys__fs__cgroup__cpu__"
    files = {f"{folder}cpu.cfs_quota_us": f"{quota}\n", f"{folder}cpu.cfs_period_us": "100000\n"}
    assert cores(tmp_path, **files) == expected


def test_the_tightest_of_its_own_group_and_those_above_holds(tmp_path: Path) -> None:
    files = {
        "proc__self__cgroup": "0::/pod/worker\n",
        "sys__fs__cgroup__pod__cpu.max": "200000 100000\n",
        "sys__fs__cgroup__pod__worker__cpu.max": "800000 100000\n",
        "sys__fs__cgroup__other__cpu.max": "100000 100000\n",
    }
    assert cores(tmp_path, **files) == 2


def test_a_group_of_one_version_limits_nobody_of_the_other(tmp_path: Path) -> None:
    files = {
        "proc__self__cgroup": "4:cpu,cpuacct:/\n0::/service\n",
        "sys__fs__cgroup__cpu__service__cpu.cfs_quota_us": "100000\n",
        "sys__fs__cgroup__cpu__service__cpu.cfs_period_us": "100000\n",
    }
    assert cores(tmp_path, **files) == 64


def test_names_of_groups_may_be_any_bytes(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/\xff\nand what no kernel writes\n")
    assert cores(tmp_path, **{"sys__fs__cgroup__cpu.max": "300000 100000\n"}) == 3


@pytest.mark.parametrize("text", ["", "x y\n", "100000\n", "100000 0\n", f"{'9' * 400} 1\n"])
def test_a_limit_that_says_nothing_is_passed_over(tmp_path: Path, text: str) -> None:
    assert cores(tmp_path, **{"sys__fs__cgroup__cpu.max": text}) == 64
