"""Sends requests in a closed or an open loop, and reads their streams."""

import asyncio
import time
from collections.abc import Iterator

from tokenbus.client.wire.chunk_stream import ChunkStream
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import errors, messages
from tokenbus.replay.load.stats import RequestTimer, RunStats, retry_delay_s
from tokenbus.replay.load.workload import TimedRequest


class Sender:
    """Sends requests to one model, and counts what comes back."""

    def __init__(self, client: WireClient, model: str, stats: RunStats) -> None:
        self._client = client
        self._model = model
        self.stats = stats
        self._read_at: float | None = None
        """When the current turn of the event loop first read a chunk."""

    def __repr__(self) -> str:
        return f"<Sender to {self._model}: {self.stats!r}>"

    def send(self, request: messages.GenerateRequest, due_at: float) -> tuple[ChunkStream, RequestTimer]:
        """Publishes a request at once."""
        timer = self.stats.start_request(due_at, time.monotonic())
        return self._client.generate(self._model, request), timer

    async def read(self, stream: ChunkStream, timer: RequestTimer) -> errors.Error | None:
        """Reads a stream to its end and returns its error, if any. Cancellation cancels the request."""
        async with stream:
            async for chunk in stream:
                timer.receive(chunk, self._arrival_time())
                if chunk.error:
                    return chunk.error
        return None

    def _arrival_time(self) -> float:
        """Returns the same time throughout a turn of the event loop: what is read in it arrived together."""
        if self._read_at is None:
            self._read_at = time.monotonic()
            asyncio.get_running_loop().call_soon(self._end_turn)
        return self._read_at

    def _end_turn(self) -> None:
        self._read_at = None


async def closed_loop(sender: Sender, requests: Iterator[TimedRequest], clients: int, until: float) -> None:
    """Runs clients that each send the next request when they have an answer, and pause after an error."""

    async def run_client() -> None:
        for request in requests:
            now = time.monotonic()
            if now >= until:
                return
            error = await sender.read(*sender.send(request.request, now))
            if error:
                await asyncio.sleep(max(0.0, min(retry_delay_s(error), until - time.monotonic())))

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(run_client())


async def open_loop(sender: Sender, requests: Iterator[TimedRequest], max_in_flight: int, until: float) -> None:
    """Sends each request at its time. While `max_in_flight` are in flight, further ones are counted as not sent."""
    stats = sender.stats
    async with asyncio.TaskGroup() as group:
        for request in requests:
            due_at = stats.began_at + request.at_s
            if due_at >= until:
                break
            await asyncio.sleep(max(0.0, due_at - time.monotonic()))
            if stats.in_flight >= max_in_flight:
                stats.not_sent += 1
            else:
                group.create_task(sender.read(*sender.send(request.request, due_at)))
