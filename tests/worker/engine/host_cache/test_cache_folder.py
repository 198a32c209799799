"""A cache file is taken only if nobody else uses, has written or can read it; all of them together are bounded."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tokenbus.worker.engine.host_cache.cache_folder import CacheFolder

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "state"


def folder(path: Path, max_mib: int = 100) -> CacheFolder:
    return CacheFolder(str(path), max_mib * MIB, lock_timeout_s=0.0)


def make(path: Path, header: bytes = b"a", size: int = MIB, used_at: int = 0) -> Path:
    """Makes a file of a kind that nobody uses; returns its path."""
    before = set(path.iterdir()) if path.exists() else set()
    fd = folder(path).take(header, size)
    assert fd is not None
    os.ftruncate(fd, size)
    os.close(fd)
    (new,) = set(path.iterdir()) - before
    os.utime(new, (used_at, used_at))
    return new


@pytest.fixture
def logs() -> Iterator[list[object]]:
    with capture_logs() as found:
        yield found  # type: ignore[misc]


def reasons(logs: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(line["event"], line.get("reason", "")) for line in logs]


def test_new_files_and_folders_belong_to_nobody_else(path: Path) -> None:
    before = os.umask(0)
    try:
        made = make(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_file_is_found_again_by_the_kind_of_its_copies(path: Path) -> None:
    made = make(path)
    made.write_bytes(b"kept")
    other = folder(path).take(b"b", MIB)
    fd = folder(path).take(b"a", MIB)
    assert fd is not None
    assert other is not None
    assert (os.read(fd, 9), os.read(other, 9)) == (b"kept", b"")
    os.close(fd)
    os.close(other)


def test_a_file_in_use_is_left_to_its_engine_and_the_latest_of_the_others_is_taken(path: Path) -> None:
    first, second = [folder(path).take(b"a", MIB) for _ in range(2)]
    assert first is not None
    assert second is not None
    assert len(list(path.iterdir())) == 2
    os.write(first, b"first")
    os.write(second, b"second")
    os.close(second)
    os.close(first)
    for name, used_at in zip(sorted(path.iterdir()), (20, 10), strict=True):
        os.utime(name, (used_at, used_at))
    again = folder(path).take(b"a", MIB)
    assert again is not None
    assert os.read(again, 9) == b"first"
    os.close(again)


def test_an_engine_that_is_about_to_end_is_waited_for(path: Path) -> None:
    made = make(path)
    made.write_bytes(b"kept")
    code = (
        "import fcntl, os, sys, time\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "fcntl.flock(fd, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read(1)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, made], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        other.stdout.readline()
        other.stdin.close()
        fd = CacheFolder(str(path), 9 * MIB, lock_timeout_s=30.0).take(b"a", MIB)
        assert fd is not None
        assert os.read(fd, 9) == b"kept"
        os.close(fd)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_file_that_others_may_read_or_write_is_passed_over(path: Path, mode: int, logs: list[dict[str, str]]) -> None:
    made = make(path)
    made.chmod(mode)
    make(path)
    assert reasons(logs) == [("cache_file_refused", f"has mode {mode:04o}; others must have no access: chmod 600")]


def test_a_link_a_second_name_and_a_pipe_are_passed_over(path: Path, logs: list[dict[str, str]]) -> None:
    for number, damage in enumerate(("link", "name", "pipe")):
        made = make(path)
        real = path.parent / f"real-{number}"
        made.rename(real)
        match damage:
            case "link":
                made.symlink_to(real)
            case "name":
                made.hardlink_to(real)
            case "pipe":
                os.mkfifo(made, 0o600)
    make(path)
    said = {reason for _, reason in reasons(logs)}
    assert said == {"is a symbolic link", "has 2 names; it may have one", "is not a regular file"}
    assert all((path.parent / f"real-{number}").stat().st_size == MIB for number in range(3))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_belongs_to_somebody_else_is_passed_over(path: Path, logs: list[dict[str, str]]) -> None:
    made = make(path)
    os.chown(made, 12345, -1)
    make(path)
    assert reasons(logs) == [("cache_file_refused", f"belongs to user 12345, and this process is user {os.geteuid()}")]
    os.chown(path, 12345, -1)
    assert folder(path).take(b"a", MIB) is None
    assert reasons(logs)[-1] == ("cache_not_kept", f"belongs to user 12345, and this process is user {os.geteuid()}")


def test_a_folder_in_which_others_may_write_is_not_used(path: Path, logs: list[dict[str, str]]) -> None:
    make(path)
    path.chmod(0o777)
    assert folder(path).take(b"a", MIB) is None
    assert reasons(logs) == [("cache_not_kept", "has mode 0777: others may write there; chmod 700")]


def test_a_folder_that_can_not_be_made_is_a_line_in_the_log(tmp_path: Path, logs: list[dict[str, str]]) -> None:
    (tmp_path / "file").touch()
    assert folder(tmp_path / "file" / "state").take(b"a", MIB) is None
    ((event, reason),) = reasons(logs)
    assert event == "cache_not_kept"
    assert "Not a directory" in reason


def test_the_longest_unused_files_go_for_a_new_one_and_those_in_use_stay(
    path: Path, logs: list[dict[str, str]]
) -> None:
    old, older, used = make(path, b"a", used_at=30), make(path, b"b", used_at=20), make(path, b"c", used_at=10)
    held = folder(path).take(b"c", MIB)
    assert held is not None
    fd = folder(path, max_mib=3).take(b"d", MIB)
    assert fd is not None
    assert (old.exists(), older.exists(), used.exists()) == (True, False, True)
    assert [line["path"] for line in logs] == [str(older)]
    os.close(fd)
    os.close(held)


def test_without_room_beside_files_in_use_there_is_none(path: Path, logs: list[dict[str, str]]) -> None:
    made = make(path, b"a", size=3 * MIB)
    held = folder(path).take(b"a", MIB)
    assert held is not None
    assert folder(path, max_mib=3).take(b"b", MIB) is None
    assert reasons(logs) == [("cache_not_kept", "there is no room for 1 MiB beside files in use: 3 MiB are allowed")]
    assert made.exists()
    os.close(held)


def test_files_of_others_are_none_of_ours(path: Path) -> None:
    make(path)
    (path / "notes.txt").write_bytes(bytes(MIB))
    fd = folder(path, max_mib=1).take(b"b", MIB)
    assert fd is not None
    assert (path / "notes.txt").exists()
    os.close(fd)
