"""A supervised process that exits is reported with the reason of that exit."""

import asyncio
import contextlib
from pathlib import Path

from tokenbus.cli import supervisor


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
