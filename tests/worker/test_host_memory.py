"""A cache file is taken only if nobody else can have written it, or can read it."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tokenbus.worker import contract
from tokenbus.worker.frontend import host_memory


async def opened(path: Path) -> int:
    return await host_memory.open_file(str(path))


async def test_a_new_file_belongs_to_nobody_else(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        fd = await opened(tmp_path / "cache")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o600
    os.close(fd)


async def test_a_file_is_opened_again_with_what_it_holds(tmp_path: Path) -> None:
    fd = await opened(tmp_path / "cache")
    os.write(fd, b"kept")
    os.close(fd)
    fd = await opened(tmp_path / "cache")
    assert os.read(fd, 9) == b"kept"
    os.close(fd)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o666])
async def test_a_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "cache"
    path.touch()
    path.chmod(mode)
    with pytest.raises(contract.EngineStartError, match=f"mode {mode:04o}.*chmod 600"):
        await opened(path)


async def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").touch(0o600)
    (tmp_path / "cache").symlink_to(tmp_path / "real")
    with pytest.raises(contract.EngineStartError, match="symbolic link"):
        await opened(tmp_path / "cache")


async def test_a_file_with_two_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").touch(0o600)
    (tmp_path / "cache").hardlink_to(tmp_path / "real")
    with pytest.raises(contract.EngineStartError, match="2 names"):
        await opened(tmp_path / "cache")


async def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cache", 0o600)
    with pytest.raises(contract.EngineStartError, match="not a regular file"):
        await opened(tmp_path / "cache")
    with pytest.raises(contract.EngineStartError, match="Is a directory"):
        await opened(tmp_path)
    with pytest.raises(contract.EngineStartError, match="No such file"):
        await opened(tmp_path / "nowhere" / "cache")


async def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").touch(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(contract.EngineStartError, match="belongs to user"):
        await opened(tmp_path / "cache")


async def test_a_file_that_another_worker_uses_is_refused_until_all_of_its_processes_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = await opened(tmp_path / "cache")
    # Like an engine process: the lock is kept by whoever has the file from the frontend.
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=(fd,)
    )
    os.close(fd)
    monkeypatch.setattr(host_memory, "_LOCK_TIMEOUT_S", 0.01)
    with pytest.raises(contract.EngineStartError, match="in use by another worker"):
        await opened(tmp_path / "cache")
    child.communicate(b"\n")
    os.close(await opened(tmp_path / "cache"))
