"""Sends requests in closed or in open loop and reads what comes back."""

import asyncio
import time
from collections.abc import Iterator

from tokenbus.client import Client, Stream
from tokenbus.protocol.wire import errors, messages
from tokenbus.replay.load.tally import Tally, Watch, pause_s
from tokenbus.replay.load.workload import Ask


class Sender:
    """Sends to one model, and has what comes back counted."""

    def __init__(self, client: Client, model: str, tally: Tally) -> None:
        self._client = client
        self._model = model
        self.tally = tally

    def __repr__(self) -> str:
        return f"<Sender to {self._model}: {self.tally!r}>"

    def send(self, request: messages.GenerateRequest, due_at: float) -> tuple[Stream, Watch]:
        """Publishes at once."""
        watch = self.tally.begin(due_at, time.monotonic())
        return self._client.generate(self._model, request), watch

    async def read(self, stream: Stream, watch: Watch) -> errors.Error | None:
        """Reads a stream to its end; the error in which it ended. Cancels the request when it is cancelled itself."""
        async with stream:
            async for chunk in stream:
                watch.take(chunk, time.monotonic())
                if chunk.error:
                    return chunk.error
        return None


async def closed_loop(sender: Sender, asks: Iterator[Ask], clients: int, until: float) -> None:
    """Each client sends its next request when it has its answer, and rests a little after an error."""

    async def be_a_client() -> None:
        for ask in asks:
            now = time.monotonic()
            if now >= until:
                return
            error = await sender.read(*sender.send(ask.request, now))
            if error:
                await asyncio.sleep(max(0.0, min(pause_s(error), until - time.monotonic())))

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(be_a_client())


async def open_loop(sender: Sender, asks: Iterator[Ask], max_in_flight: int, until: float) -> None:
    """Sends each request at its time, however many are in flight, up to a limit."""
    tally = sender.tally
    async with asyncio.TaskGroup() as group:
        for ask in asks:
            due_at = tally.began_at + ask.at_s
            if due_at >= until:
                break
            await asyncio.sleep(max(0.0, due_at - time.monotonic()))
            if tally.in_flight >= max_in_flight:
                tally.not_sent += 1
            else:
                group.create_task(sender.read(*sender.send(ask.request, due_at)))
