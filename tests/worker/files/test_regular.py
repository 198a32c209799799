"""Files that somebody has named are opened without waiting, and only if they are files."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files.regular import MAX_WAITING, on_thread, open_regular, read_regular


def test_a_regular_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 1_000)
    assert read_regular(path, 1_000) == b"x" * 1_000
    with pytest.raises(ModelError, match="has more than 0 MiB"):
        read_regular(path, 999)


def test_a_pipe_that_nobody_writes_to_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match="is no regular file"):
        open_regular(tmp_path / "pipe", or_folder=True)


def test_neither_devices_nor_folders_are_files(tmp_path: Path) -> None:
    for path in ("/dev/zero", tmp_path):
        with pytest.raises(ModelError, match="is no regular file"):
            read_regular(path, 1_000)
    os.close(open_regular(tmp_path, or_folder=True))


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no-such: can't be read: No such file"):
        open_regular(tmp_path / "no-such")


async def test_a_mount_that_does_not_answer_ends_the_wait_and_what_comes_later_is_discarded() -> None:
    answers, discarded = threading.Event(), asyncio.Event()
    seen: list[int] = []

    def open_later() -> int:
        answers.wait()
        return 7

    def discard(number: int) -> None:
        seen.append(number)
        discarded.set()

    with pytest.raises(ModelError, match="x: the file system does not answer"):
        await on_thread("x", open_later, discard, timeout_s=0.01)
    answers.set()
    async with asyncio.timeout(60):
        await discarded.wait()
    assert seen == [7]


async def test_so_many_mounts_that_do_not_answer_are_waited_for_and_no_more() -> None:
    answers, ended = threading.Event(), asyncio.Semaphore(0)

    def discard(_: bool) -> None:
        ended.release()

    for _ in range(MAX_WAITING):
        with pytest.raises(ModelError, match="does not answer"):
            await on_thread("x", answers.wait, discard, timeout_s=0.01)
    with pytest.raises(ModelError, match=f"y: {MAX_WAITING} other files"):
        await on_thread("y", answers.wait, discard)
    answers.set()
    async with asyncio.timeout(60):
        for _ in range(MAX_WAITING):
            await ended.acquire()
        assert await on_thread("y", lambda: 3, lambda _: None) == 3


async def test_what_goes_wrong_on_the_thread_is_raised_where_it_is_awaited() -> None:
    with pytest.raises(ModelError, match="no-such"):
        await on_thread("/no-such", lambda: open_regular("/no-such"), os.close)


def test_a_thread_that_waits_for_a_mount_keeps_no_process_from_ending() -> None:
    script = """
import asyncio, threading
from tokenbus.worker.files.regular import on_daemon_thread

async def main():
    on_daemon_thread(threading.Event().wait)

asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)
