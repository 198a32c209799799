"""Operators stop requests and workers with what was generated so far: over a real broker, by the command line."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.system import System, command
from tokenbus.client.wire.chunk_stream import ChunkStream
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import errors, messages

SIMULATED = ("--engine", "sim", "--max-num-seqs", "4", "--grace-s", "60")
MODEL = "steps-of-50ms"
TOKENS = 400
"""Take twenty seconds."""


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    system = await System.start(tmp_path)
    system.router("router")
    yield system
    await system.stop()


async def until_served(client: WireClient, count: int) -> None:
    """Waits for a router that knows so many workers."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(errors.RequestError):
                if len((await client.models()).cards) >= count:
                    return
            await asyncio.sleep(0.05)


async def tokenbus(system: System, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TOKENBUS_NATS": system.url}
    whole = command(*arguments)
    return await asyncio.to_thread(
        lambda: subprocess.run(whole, env=environment, capture_output=True, text=True, timeout=60, check=False)
    )


async def begun(client: WireClient, request_id: str, **fields: object) -> ChunkStream:
    """Starts a long stream and reads its first tokens."""
    stream = client.generate("demo", id=request_id, prompt="a", max_tokens=TOKENS, ignore_eos=True, **fields)
    async for chunk in stream:
        if chunk.tokens:
            return stream
    raise AssertionError("it ended before its first token")


async def terminal_of(stream: ChunkStream) -> messages.Chunk:
    async for chunk in stream:
        last = chunk
    return last


async def test_an_operator_stops_one_request_and_no_other(system: System) -> None:
    for name in ("w1", "w2"):
        system.worker(name, *SIMULATED, model=MODEL)
    async with await WireClient.connect(system.url) as client:
        await until_served(client, 2)
        first, second = [await begun(client, name) for name in ("one", "two")]
        done = await tokenbus(system, "stop", "one")
        assert (done.returncode, done.stderr) == (0, "")
        terminal = await terminal_of(first)
        assert (terminal.finish_reason, terminal.stopped_by) == ("length", "operator")
        assert terminal.usage
        assert 0 < terminal.usage.completion_tokens < TOKENS
        done = await tokenbus(system, "stop", "default:one")
        assert (done.returncode, done.stdout) == (1, "")
        assert "no worker runs default:one" in done.stderr
        assert (await tokenbus(system, "stop", "acme:two")).returncode == 1
        assert "there is no worker w9; workers: w" in (await tokenbus(system, "drain", "w9")).stderr
        second.cancel()
        assert (await terminal_of(second)).finish_reason == "cancelled"


async def test_a_worker_that_is_drained_with_stop_ends_its_streams_where_they_are(system: System) -> None:
    system.worker("w1", *SIMULATED, model=MODEL)
    async with await WireClient.connect(system.url) as client:
        await until_served(client, 1)
        stream = await begun(client, "one")
        whole = client.generate("demo", prompt="a", max_tokens=TOKENS, ignore_eos=True, stream=False)
        await asyncio.sleep(0.5)
        done = await tokenbus(system, "drain", "w1", "--grace-s", "0", "--stop")
        assert (done.returncode, done.stderr) == (0, "")
        assert await system.wait("w1") == 0
        for one in (stream, whole):
            terminal = await terminal_of(one)
            assert (terminal.finish_reason, terminal.stopped_by) == ("length", "shutdown")
            assert terminal.usage
            assert 0 < terminal.usage.completion_tokens < TOKENS


async def test_the_last_worker_leaves_its_stream_to_the_next_one_and_an_end_if_none_comes(system: System) -> None:
    system.router("patient", "--patience-s", "3")
    system.signal("router", signal.SIGTERM)
    await system.wait("router")
    system.worker("w1", *SIMULATED, model=MODEL)
    async with await WireClient.connect(system.url) as client:
        await until_served(client, 1)
        stream = await begun(client, "one")
        done = await tokenbus(system, "drain", "w1", "--grace-s", "0")
        assert done.returncode == 0
        assert await system.wait("w1") == 0
        terminal = await terminal_of(stream)
        assert (terminal.finish_reason, terminal.stopped_by) == ("length", "shutdown")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("stop", "a b"), "must be an id"),
        (("stop", "acme:"), "must be an id"),
        (("drain", "w9", "--grace-s", "-1"), "must be 0 to 86,400"),
        (("drain", "w9", "--grace-s", "nan"), "must be 0 to 86,400"),
        (("drain", "w9", "--stop", "--handover-s", "2"), "not allowed with"),
    ],
)
async def test_what_makes_no_sense_is_refused_with_what_is_allowed(
    system: System, arguments: tuple[str, ...], problem: str
) -> None:
    done = await tokenbus(system, *arguments)
    assert done.returncode != 0
    assert problem in done.stderr
    assert "Traceback" not in done.stderr
