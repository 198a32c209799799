"""A supervised process that exits is reported with the reason of that exit, and started again."""

import asyncio
import contextlib
import errno
import os
import shutil
from pathlib import Path

import pytest

from tokenbus.cli.console import supervisor


async def test_an_exit_is_not_reported_with_what_an_earlier_start_wrote(tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    log.write_text("tokenbus: an old complaint\n")
    reports: asyncio.Queue[str] = asyncio.Queue()
    process = supervisor.SupervisedProcess("router", ["--version"], log, reports.put_nowait)
    running = asyncio.create_task(process.supervise())
    async with asyncio.timeout(60):
        assert "(tokenbus " in await reports.get()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def test_a_killed_process_is_reported_by_its_signal_and_its_log_but_no_log_line(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    reports: asyncio.Queue[str] = asyncio.Queue()
    process = supervisor.SupervisedProcess(
        "worker", ["router", "--nats", "nats://127.0.0.1:9"], log, reports.put_nowait
    )
    running = asyncio.create_task(process.supervise())
    async with asyncio.timeout(60):
        while process.pid is None:
            await asyncio.sleep(0.01)
        log.write_text('{"event": "request_started", "level": "info"}\n' * 2_000)
        process.kill()
        assert await reports.get() == f"worker was killed by SIGKILL (see {log}); restarting in 0.2 s"
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def test_what_can_not_be_started_for_now_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: asyncio.Queue[str] = asyncio.Queue()
    process = supervisor.SupervisedProcess("router", ["--version"], tmp_path / "router.log", reports.put_nowait)
    execute = asyncio.create_subprocess_exec

    async def fail(*arguments: object, **settings: object) -> None:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", execute)
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
    running = asyncio.create_task(process.supervise())
    async with asyncio.timeout(60):
        assert await reports.get() == "router can't be started (Cannot allocate memory); restarting in 0.2 s"
        assert (await reports.get()).startswith("router exited with status 0 (tokenbus ")
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def test_a_folder_of_logs_that_is_removed_ends_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    reports: asyncio.Queue[str] = asyncio.Queue()
    process = supervisor.SupervisedProcess(
        "worker", ["router", "--nats", "nats://127.0.0.1:9"], folder / "worker.log", reports.put_nowait
    )
    running = asyncio.create_task(process.supervise())
    async with asyncio.timeout(60):
        for _ in range(2):
            while process.pid is None:
                await asyncio.sleep(0.01)
            shutil.rmtree(folder)
            process.kill()
            assert "worker was killed by SIGKILL (see " in await reports.get()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
