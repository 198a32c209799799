"""Processes see what others have planned, one at a time, and nothing of those that have ended."""

import fcntl
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tokenbus.protocol.process.control_groups import paths_of
from tokenbus.worker.engine.memory import claims
from tokenbus.worker.engine.memory.claims import MemoryClaims
from tokenbus.worker.engine.memory.fit import UNLIMITED
from tokenbus.worker.files.device_memory import HOST, DeviceMemory, HostLimit

GIB = 1 << 30
GPU = DeviceMemory("CUDA0", 24 * GIB, 20 * GIB)
MACHINE = [HostLimit("", 64 * GIB, 60 * GIB)]
OTHER = textwrap.dedent("""
    import sys
    from pathlib import Path
    from tokenbus.worker.engine.memory.claims import MemoryClaims
    mine = MemoryClaims(Path(sys.argv[1]))
    with mine.planning():
        mine.claim("/model.gguf", {"host": 6 << 30})
        mine.claim("replica", {"host": 4 << 30, "host cache": 1 << 30, "CUDA0": 4 << 30}, 3)
    for line in ("claimed", "took"):
        print(line, flush=True)
        if not sys.stdin.readline():
            break
        mine.took("replica")
""")


@pytest.fixture
def other(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that claims memory, and has it once it is told so."""
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        yield process
        process.kill()


def test_what_another_process_has_planned_is_not_free(tmp_path: Path, other: "subprocess.Popen[str]") -> None:
    mine = MemoryClaims(tmp_path)
    found = mine.host_room(MACHINE, "", 1.0)
    assert 50 * GIB <= found.free_bytes <= 51 * GIB  # a python process has taken some already
    assert found.chosen_bytes == found.free_bytes - 5 * GIB  # the reserve, and what its copies may take
    assert mine.room(GPU, "", 1.0).free_bytes == 16 * GIB


def test_what_it_has_taken_of_a_gpu_counts_once(tmp_path: Path, other: "subprocess.Popen[str]") -> None:
    assert other.stdin is not None
    assert other.stdout is not None
    other.stdin.write("\n")
    other.stdin.flush()
    assert other.stdout.readline() == "took\n"
    mine = MemoryClaims(tmp_path)
    left = GPU._replace(free_bytes=16 * GIB)
    assert mine.room(left, "", 1.0).free_bytes == 16 * GIB
    assert mine.room(left, "", 0.5).chosen_bytes == 10 * GIB - 1536 * 1024 * 1024


def test_the_weights_of_a_file_are_in_the_host_s_memory_once(tmp_path: Path, other: "subprocess.Popen[str]") -> None:
    mine = MemoryClaims(tmp_path)
    assert mine.host_room(MACHINE, "/model.gguf", 1.0).free_bytes >= 56 * GIB
    with mine.planning():
        mine.claim("/model.gguf", {HOST: 6 * GIB})
    assert 50 * GIB <= mine.host_room(MACHINE, "replica 7", 1.0).free_bytes <= 51 * GIB


def test_a_control_group_has_what_no_process_in_it_has_planned(tmp_path: Path, other: "subprocess.Popen[str]") -> None:
    mine = MemoryClaims(tmp_path)
    elsewhere = [*MACHINE, HostLimit("/no/such/group", 8 * GIB, 7 * GIB)]
    assert mine.host_room(elsewhere, "", 1.0).free_bytes >= 7 * GIB
    groups = paths_of(str(other.pid), "memory")
    shared = [*MACHINE, HostLimit(f"/{groups[0]}", 12 * GIB, 11 * GIB)]
    assert mine.host_room(shared, "", 1.0).free_bytes < 2 * GIB
    assert mine.host_room([], "", 1.0) == UNLIMITED


def test_threads_of_living_processes_that_want_all_cores_are_counted(
    tmp_path: Path, other: "subprocess.Popen[str]"
) -> None:
    mine, cores = MemoryClaims(tmp_path), len(os.sched_getaffinity(0))
    mine.claim("fair", {HOST: GIB})
    assert mine.greedy_threads() == (0, 0), "it leaves cores to the other"
    mine.claim("greedy", {HOST: GIB}, 2)
    assert mine.greedy_threads() == (5, cores)
    other.kill()
    other.wait()
    assert mine.greedy_threads() == (2, cores)
    mine.release("greedy")
    assert mine.greedy_threads() == (0, 0)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="takes two cores")
def test_processes_on_different_cores_have_those_of_both(tmp_path: Path, other: "subprocess.Popen[str]") -> None:
    own, *_, others = os.sched_getaffinity(0)
    os.sched_setaffinity(other.pid, {others})
    mine, before = MemoryClaims(tmp_path), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {own})
    try:
        mine.claim("greedy", {HOST: GIB}, 1)
        assert mine.greedy_threads() == (4, 2)
    finally:
        os.sched_setaffinity(0, before)


def test_the_claims_of_a_process_that_was_killed_are_removed(tmp_path: Path, other: "subprocess.Popen[str]") -> None:
    other.kill()
    other.wait()
    assert list(tmp_path.glob("*.claim"))
    assert MemoryClaims(tmp_path).room(GPU, "", 1.0).free_bytes == 20 * GIB
    assert not list(tmp_path.glob("*.claim"))


def test_what_other_parts_of_a_process_have_claimed_is_not_free_for_one_more(tmp_path: Path) -> None:
    mine = MemoryClaims(tmp_path)
    with mine.planning():
        mine.claim("model", {"CUDA0": 5 * GIB})
        mine.claim("one", {"CUDA0": 3 * GIB})
    assert mine.room(GPU, "two", 1.0).free_bytes == 12 * GIB
    assert mine.room(GPU, "one", 1.0).free_bytes == 15 * GIB
    mine.took("model")
    left = GPU._replace(free_bytes=15 * GIB)
    assert mine.room(left, "one", 1.0).free_bytes == 15 * GIB
    mine.release("one")
    assert mine.room(left, "two", 1.0).free_bytes == 15 * GIB


def test_plans_wait_for_each_other(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from tokenbus.worker.engine.memory.claims import MemoryClaims
print("asks", flush=True)
with MemoryClaims(Path({str(tmp_path)!r})).planning():
    print("plans", flush=True)
"""
    with MemoryClaims(tmp_path).planning():
        second = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert second.stdout is not None
        assert second.stdout.readline() == "asks\n"
        assert second.poll() is None
    with second:
        assert second.stdout.readline() == "plans\n"


def test_a_plan_that_never_ends_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_LOCK_TIMEOUT_S", 0.0)
    with MemoryClaims(tmp_path).planning(), capture_logs() as logs, MemoryClaims(tmp_path).planning():
        assert [line["event"] for line in logs] == ["memory_not_shared"]


@pytest.mark.parametrize("content", [b"", b"{", b'{"pid": "x"}', b"\xff" * 100])
def test_a_file_that_says_nothing_is_passed_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "1.claim").write_bytes(content)
    assert MemoryClaims(tmp_path).room(GPU, "", 1.0).free_bytes == 20 * GIB


def test_a_living_processs_plan_that_can_not_be_read_is_told(tmp_path: Path) -> None:
    path = tmp_path / "1.claim"
    path.write_bytes(b'{"pid": "x"}')
    with path.open() as file, capture_logs() as logs:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert MemoryClaims(tmp_path).room(GPU, "", 1.0).free_bytes == 20 * GIB
    assert path.exists()
    assert [(line["event"], str(path) in line["error"]) for line in logs] == [("memory_not_shared", True)]


def test_without_a_directory_a_process_knows_only_of_itself() -> None:
    alone = MemoryClaims(None)
    with alone.planning():
        alone.claim("model", {"CUDA0": GIB})
    assert alone.room(GPU, "", 1.0).free_bytes == 19 * GIB


def test_a_directory_that_others_may_write_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert claims.runtime_directory() == tmp_path / "tokenbus"
    (tmp_path / "tokenbus").chmod(0o777)
    assert claims.runtime_directory() is None
    (tmp_path / "tokenbus").rmdir()
    (tmp_path / "tokenbus").symlink_to(tmp_path)
    assert claims.runtime_directory() is None


def test_copies_of_blocks_count_as_taken_once_they_are_written() -> None:
    fd = os.memfd_create(claims.COPIES_NAME)
    os.ftruncate(fd, 64 << 20)
    assert claims.copies_bytes(os.getpid()) == 0
    os.pwrite(fd, bytes(4 << 20), 8 << 20)
    assert claims.copies_bytes(os.getpid()) == 4 << 20
    os.close(fd)
    assert claims.copies_bytes(1 << 30) == claims.resident_bytes(1 << 30) == 0
