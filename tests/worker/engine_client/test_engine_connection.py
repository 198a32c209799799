"""A connection to an engine ends with the first report that can't be taken, whatever else the engine has sent; and one
to an engine that hangs, or can't load its model, says so."""

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest

from tokenbus import demo
from tokenbus.worker.contract.engine_errors import ModelError, ModelTooLargeError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine_client.engine_faults import CrashAttribution
from tokenbus.worker.engine_client.engine_process import (
    DeviceFailedError,
    EngineConnection,
    EngineDiedError,
    EngineLink,
    EngineProcess,
)


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


async def test_an_engine_that_hangs_while_it_loads_is_killed_and_named() -> None:
    ours, theirs = socket.socketpair()
    killed: list[str] = []
    link = EngineLink(ours, 1, CrashAttribution(), lambda: killed.append("killed"), _ended)
    connection = EngineConnection(link, lambda report: None, lambda: None, load_timeout_s=0.01)
    with theirs:
        theirs.sendall(ipc.encode(ipc.Loading(0.5)))
        with pytest.raises(ModelError, match=r"the engine hung while it loaded .*: it reported no progress in 0\.01 s"):
            await connection.open()
        assert killed == ["killed"]
        theirs.sendall(ipc.encode(ipc.LoadFailed("too late")))
    async with asyncio.timeout(5):
        assert await connection.death == "the engine process closed its socket"


@pytest.mark.parametrize(
    ("failed", "kind"),
    [
        (ipc.LoadFailed("no"), ModelError),
        (ipc.LoadFailed("no", is_too_large=True), ModelTooLargeError),
        (ipc.LoadFailed("no", may_pass=True), DeviceFailedError),
    ],
)
async def test_a_load_that_failed_is_told_as_what_it_is(failed: ipc.LoadFailed, kind: type[Exception]) -> None:
    ours, theirs = socket.socketpair()
    attribution = CrashAttribution()
    attribution.will_load(5)
    attribution.load_began(5)
    connection = EngineConnection(
        EngineLink(ours, 1, attribution, lambda: None, _ended, 5), lambda report: None, lambda: None
    )
    with theirs:
        theirs.sendall(ipc.encode(failed))
        with pytest.raises(kind, match="no"):
            await connection.open()
    assert not attribution.may_be_a_load
    await connection.close()


@pytest.mark.parametrize("model", [demo.MODEL_PATH, demo.ONNX_PATH], ids=["gguf", "onnx"])
@pytest.mark.parametrize("is_there", [True, False])
async def test_a_load_counts_as_one_once_its_files_are_there(
    model: Path, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = EngineSettings(model=str(model) if is_there else str(model / "missing.onnx"), threads=1)
    process = EngineProcess()
    link = await process.open(settings, has_served=False)
    began: list[int] = []
    monkeypatch.setattr(link.crash_attribution, "load_began", began.append)
    connection = EngineConnection(link, lambda report: None, lambda: None)
    with contextlib.nullcontext() if is_there else pytest.raises(ModelError):
        await connection.open()
    link.catch_up()
    assert began == ([link.number] if is_there else [])
    async with asyncio.timeout(10):
        assert await connection.close() == f"engine process {link.pid} exited with status 0"
