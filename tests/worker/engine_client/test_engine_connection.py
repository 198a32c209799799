"""A connection to an engine ends with the first report that can't be taken, whatever else the engine has sent."""

import asyncio
import contextlib
import socket

import pytest

from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine_client.engine_faults import CrashAttribution
from tokenbus.worker.engine_client.engine_process import EngineConnection, EngineDiedError, EngineLink


async def _ended() -> str:
    return "it has ended"


@pytest.mark.parametrize("sent", [100_000 * ipc.encode(ipc.MemoryRead([])), b"\xff" * 600_000], ids=["bug", "garbage"])
async def test_an_engine_whose_reports_can_not_be_taken_counts_as_dead(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    lost: list[str] = []

    def refuse(report: ipc.Report) -> None:
        raise ValueError(f"can't take {report}")

    link = EngineLink(ours, 1, CrashAttribution(), lambda: None, _ended)
    connection = EngineConnection(link, refuse, lambda: lost.append("lost"))
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    opening = asyncio.create_task(connection.open())
    with theirs:
        with contextlib.suppress(BrokenPipeError):
            await asyncio.to_thread(theirs.sendall, sent)
        async with asyncio.timeout(5):
            await connection.death
    with pytest.raises(EngineDiedError):
        await opening
    assert lost == ["lost"]
