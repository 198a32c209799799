"""A supervised process that exits is reported with the reason of that exit."""

import asyncio
import contextlib
from pathlib import Path

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
