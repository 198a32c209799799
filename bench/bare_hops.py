"""A bare exchange over three hops: client, forwarder, responder, client. A system's answers are compared with it."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator

import nats
from nats.aio.client import Client as Nats
from nats.aio.msg import Msg

FIRST_HOP = "first"
"""The subject of the forwarder: the answer to a message comes over all three hops."""
_HOPS = """
import asyncio, sys, nats
async def main(url):
    connection = await nats.connect(url)
    async def forward(message): await connection.publish("second", message.data, reply=message.reply)
    async def respond(message): await connection.publish(message.reply, message.data[:200])
    await connection.subscribe(sys.argv[2], cb={"first": forward, "second": respond}[sys.argv[2]])
    await connection.flush()
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main(sys.argv[1]))
"""


class Wire:
    """A bare client that times the first message of each answer and waits for its end."""

    def __init__(self, connection: Nats) -> None:
        self.nats = connection

    async def first_s(self, subject: str, payload: bytes) -> float:
        """Returns, after the last message has arrived, the seconds to the first."""
        inbox, times, done = self.nats.new_inbox(), list[float](), asyncio.Event()

        async def take(message: Msg) -> None:
            times.append(time.perf_counter())
            if b'"finish_reason":null' not in message.data:
                done.set()

        subscription = await self.nats.subscribe(inbox, cb=take)
        began = time.perf_counter()
        await self.nats.publish(subject, payload, reply=inbox)
        async with asyncio.timeout(10):
            await done.wait()
        await subscription.unsubscribe()
        return times[0] - began


@contextlib.asynccontextmanager
async def bare_hops(url: str) -> AsyncIterator[Wire]:
    """Yields a client of a broker on which a forwarder and a responder answer at `FIRST_HOP`."""
    hops = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", _HOPS, url, name, stdout=asyncio.subprocess.PIPE)
        for name in (FIRST_HOP, "second")
    ]
    try:
        for hop in hops:
            assert hop.stdout is not None
            await hop.stdout.readline()
        connection = await nats.connect(url)
        try:
            yield Wire(connection)
        finally:
            await connection.close()
    finally:
        for hop in hops:
            hop.kill()
            await hop.wait()
