"""The client of an engine knows which adapters are loaded, and keeps nothing of those that are not."""

import asyncio

import pytest

from tokenbus.protocol.wire import errors
from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine_client.engine_calls import EngineAdapters


class Answering:
    """Adapters of an engine that loads what it is told to."""

    def __init__(self) -> None:
        self.sent: list[ipc.Command] = []
        self.adapters = EngineAdapters(self.take, set)

    def take(self, command: ipc.Command) -> None:
        self.sent.append(command)
        if isinstance(command, ipc.LoadAdapter):
            loaded = ipc.AdapterResult(command.call_id, f"digest of {command.path}", None)
            asyncio.get_running_loop().call_soon(self.adapters.loaded, loaded)


def request_with(digest: str) -> engine_request.EngineRequest:
    sampling = engine_request.Sampling(max_tokens=1)
    return engine_request.EngineRequest(key="r", token_ids=[1], sampling=sampling, adapters=(Adapter(digest, 1.0),))


async def test_an_adapter_counts_as_loaded_until_it_was_unloaded_as_often_as_loaded() -> None:
    engine = Answering()
    digest = await engine.adapters.load("a")
    assert await engine.adapters.load("a") == digest
    engine.adapters.unload(digest)
    engine.adapters.check(request_with(digest))
    engine.adapters.unload(digest)
    with pytest.raises(errors.RequestError, match="not loaded"):
        engine.adapters.check(request_with(digest))
    engine.adapters.unload(digest)
    assert engine.sent[2:] == [ipc.UnloadAdapter(digest)] * 2
    assert repr(engine.adapters) == "<EngineAdapters of 0 files, 0 to unload>"
