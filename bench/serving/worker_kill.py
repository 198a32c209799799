"""Measures how long plain streams pause when their worker is killed, and starts again under its own name or not at all.

Run: .venv/bin/python -m bench.serving.worker_kill [--model FILE.gguf] [--workers 2] [--pairs 50] [--pinned]
  [WORKER FLAGS]

A client that knows nothing of attempts reads a stream from each worker and only concatenates text. One worker gets
SIGKILL; in the second run of a pair its successor starts at once under the same name, as supervisors do it, and loads
while the others continue. The pause is the longest time between two messages with text from the kill on. It contains
the first token of the worker that continues the stream, which has to compute the prompt and the text so far: from its
accept until that token, as the router's trace tells. What the pause has beyond that is what the death costs. With
`--pinned`, each worker has a core, on which its successor loads too. A text with a hole or a repetition, or a stream
that ends before its time, ends the measurement."""

import asyncio
import contextlib
import itertools
import os
import statistics
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from bench import benchmark_model, flags, system
from bench.paired import interleave, show
from bench.streams import longest_pause_s
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import messages
from tokenbus.protocol.wire.subjects import DEFAULT_PREFIX

_AFTER = 8
"""The messages with text that each stream must have after the kill."""
_TIMEOUT_S = 120.0
_NAMES = ("left dead", "started again")
_serials = itertools.count()


class Pause(NamedTuple):
    """What a kill has cost, in seconds."""

    longest: float
    first_token: float
    """The part from the accept of the worker that continues to its first token."""

    @property
    def beyond(self) -> float:
        """The part of the pause for which that worker is not to blame."""
        return self.longest - self.first_token


class _Stream:
    """One stream as a plain client sees it."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.worker_id = ""
        self.times: list[float] = []
        self.changed = asyncio.Event()
        self.error = ""
        self._num_bytes = 0

    async def take(self, message: Msg) -> None:
        chunk = msgspec.json.decode(message.data, type=messages.Chunk)
        self.worker_id = chunk.worker_id or self.worker_id
        if chunk.text and chunk.text_offset != self._num_bytes:
            self.error = f"{self._num_bytes} bytes were read, and the next text begins at {chunk.text_offset}"
        if chunk.finish_reason is not None:
            self.error = self.error or f"the stream ended: {chunk.finish_reason}, {chunk.error}"
        if chunk.text:
            self._num_bytes += len(chunk.text.encode())
            self.times.append(time.perf_counter())
        self.changed.set()

    async def until(self, count: int) -> None:
        """Waits until it has had this many messages with text."""
        async with asyncio.timeout(_TIMEOUT_S):
            while len(self.times) < count and not self.error:
                self.changed.clear()
                await self.changed.wait()
        if self.error:
            raise SystemExit(self.error)


class _Workers:
    """The workers of a system, each of which can be killed and started again."""

    def __init__(
        self, url: str, folder: Path, model: str, count: int, worker_flags: list[str], *, pinned: bool
    ) -> None:
        self._url, self._folder, self._model, self._flags = url, folder, model, worker_flags
        self._cores = sorted(os.sched_getaffinity(0)) if pinned else []
        self._running = {f"w{number}": self._start(f"w{number}") for number in range(count)}

    def _start(self, name: str) -> "subprocess.Popen[bytes]":
        served = ("--model", self._model, "--served-name", "m", "--worker-id", name)
        started = system.start(self._folder / f"{name}.log", "worker", "--nats", self._url, *served, *self._flags)
        if self._cores:
            os.sched_setaffinity(started.pid, {self._cores[int(name[1:]) % len(self._cores)]})
        return started

    def kill(self, name: str) -> None:
        self._running[name].kill()
        self._running[name].wait()

    def start_again(self, name: str) -> None:
        if self._running[name].poll() is not None:
            self._running[name] = self._start(name)

    def stop(self) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.wait(timeout=60)


@contextlib.asynccontextmanager
async def _streaming(connection: Client, max_tokens: int) -> AsyncIterator[_Stream]:
    inbox = connection.new_inbox()
    stream = _Stream(f"s-{inbox[-12:]}")
    subscription = await connection.subscribe(inbox, cb=stream.take)
    prompt = f"Story {next(_serials)}. Once upon a time"
    request = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "id": stream.request_id,
    }
    await connection.publish(f"{DEFAULT_PREFIX}.generate.m", msgspec.json.encode(request), reply=inbox)
    try:
        yield stream
    finally:
        await subscription.unsubscribe()
        await connection.publish(f"{DEFAULT_PREFIX}.cancel.{stream.request_id}", b"")


async def pause(
    client: WireClient, connection: Client, workers: _Workers, names: list[str], max_tokens: int, *, restarts: bool
) -> Pause:
    """Kills the worker of one of the streams, and returns the longest pause of all."""
    await system.cards(client, len(names))
    async with contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(_streaming(connection, max_tokens)) for _ in names]
        for stream in streams:
            await stream.until(_AFTER)
        killed, killed_at = streams[0].worker_id, time.perf_counter()
        workers.kill(killed)
        if restarts:
            workers.start_again(killed)
        before = [len(stream.times) for stream in streams]
        for stream, had in zip(streams, before, strict=True):
            await stream.until(had + _AFTER)
        longest_s = max(longest_pause_s(stream.times, killed_at) for stream in streams)
        first_token_s = await _first_token_s(client, streams[0].request_id)
    workers.start_again(killed)
    return Pause(longest_s, first_token_s)


async def _first_token_s(client: WireClient, request_id: str) -> float:
    """Returns the time from the accept of the worker that continued a stream to its first token."""
    async with asyncio.timeout(_TIMEOUT_S):
        while True:
            known = (await client.traces(messages.TraceRequest(id=request_id))).named(request_id)
            last = known.trace.attempts[-1] if known else None
            if last and last.accepted_ms is not None and last.continued_ms is not None:
                return (last.continued_ms - last.accepted_ms) / 1e3
            await asyncio.sleep(0.05)  # the router may not have heard of the token yet


async def measure(
    model: str, count: int, pairs: int, max_tokens: int, worker_flags: list[str], *, pinned: bool
) -> None:
    names = [f"w{number}" for number in range(count)]
    async with system.started(Path(model)) as one, await WireClient.connect(one.nats_url) as client:
        connection = await nats.connect(one.nats_url)
        workers = _Workers(one.nats_url, one.folder, model, count, worker_flags, pinned=pinned)
        try:

            async def kill(*, restarts: bool) -> Pause:
                return await pause(client, connection, workers, names, max_tokens, restarts=restarts)

            seen = await interleave(lambda _: kill(restarts=False), lambda _: kill(restarts=True), pairs, warm_up=0)
        finally:
            await connection.close()
            workers.stop()
    print(
        f"{Path(model).name}, {count} workers, {count} streams, {2 * pairs} kills, none cut, no byte lost or repeated"
    )
    for name, pauses in zip(_NAMES, zip(*seen, strict=True), strict=True):
        print(f"  {name}")
        print(f"    pause             {_quantiles([one.longest for one in pauses])}")
        print(f"    first token       {_quantiles([one.first_token for one in pauses])}")
        print(f"    pause beyond that {_quantiles([one.beyond for one in pauses])}")
    for what, numbers in (
        ("pause", [(first.longest, second.longest) for first, second in seen]),
        ("pause beyond the first token", [(first.beyond, second.beyond) for first, second in seen]),
    ):
        print(what)
        show(_NAMES, "s", numbers, decimals=2)


def _quantiles(values: list[float]) -> str:
    p99 = statistics.quantiles(values, n=100, method="inclusive")[-1] if len(values) > 1 else values[0]
    return f"p50 {statistics.median(values):.2f} s, p99 {p99:.2f} s, longest {max(values):.2f} s"


def main() -> None:
    parser = flags.parser(__doc__, workers=2, pairs=7, tokens=2_000)
    parser.add_argument("--model", help="a GGUF file, or a model of the simulated engine with `--engine sim`")
    parser.add_argument("--pinned", action="store_true", help="give each worker, and its successor, a core of its own")
    options, worker_flags = parser.parse_known_args()
    with contextlib.ExitStack() as stack:
        model = options.model
        if "sim" not in worker_flags:
            model = str(stack.enter_context(benchmark_model.model(model and Path(model))))
        sizes = (options.workers, options.pairs, options.tokens)
        asyncio.run(measure(model, *sizes, worker_flags, pinned=options.pinned))


if __name__ == "__main__":
    main()
