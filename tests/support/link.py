"""A link between brokers of two sites: a TCP proxy that can be slow, lose packets, stand still, and be cut.

A lost packet is what TCP makes of it: everything after it waits until it has been sent again, after a round trip and at
least 200 ms."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

_MIN_RESEND_S = 0.2
_PACKET_BYTES = 1_460


class Link:
    """Forwards the connections to one port, both ways."""

    def __init__(self, target: int, rtt_s: float = 0.0, loss: float = 0.0, seed: int = 1) -> None:
        """`target` is the port that it leads to; `loss` the share of packets that are lost."""
        self.port = 0
        self.rtt_s = rtt_s
        self.loss = loss
        self._target = target
        self._rng = random.Random(seed)
        self._is_open = True
        self._moves = asyncio.Event()
        self._moves.set()
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Ends every connection, and accepts no more."""
        self._is_open = False
        for writer, task in list(self._connections.items()):
            writer.transport.abort()
            task.cancel()

    def restore(self) -> None:
        self._is_open = True
        self._moves.set()

    def stall(self) -> None:
        """Forwards nothing, while all connections stay open: what is sent arrives later."""
        self._moves.clear()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._connections[writer] = task
        there: asyncio.StreamWriter | None = None
        try:
            if self._is_open:
                back, there = await asyncio.open_connection("127.0.0.1", self._target)
                await asyncio.gather(self._carry(reader, there), self._carry(back, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for one in (writer, there):
                if one is not None:
                    one.transport.abort()
            del self._connections[writer]

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due_at, data = await waiting.get()
                await asyncio.sleep(due_at - loop.time())
                await self._moves.wait()
                writer.write(data)

        delivering = asyncio.create_task(deliver())
        earliest = 0.0
        try:
            while data := await reader.read(1 << 16):
                num_packets = -(-len(data) // _PACKET_BYTES)
                resent_s = self._resent_s(num_packets)
                earliest = max(earliest, loop.time() + self.rtt_s / 2 + resent_s)
                waiting.put_nowait((earliest, data))
            raise ConnectionResetError
        finally:
            delivering.cancel()

    def _resent_s(self, num_packets: int) -> float:
        """Returns how much later some packets arrive because one of them is lost, perhaps more than once."""
        seconds, is_lost = 0.0, self._rng.random() < 1 - (1 - self.loss) ** num_packets
        while is_lost:
            seconds = 2 * seconds or max(_MIN_RESEND_S, self.rtt_s)
            is_lost = self._rng.random() < self.loss
        return seconds


@contextlib.asynccontextmanager
async def opened(target: int, rtt_s: float = 0.0, loss: float = 0.0) -> AsyncIterator[Link]:
    """Runs a link to a port of this machine."""
    link = Link(target, rtt_s, loss)
    server = await asyncio.start_server(link.accept, "127.0.0.1", 0)
    link.port = int(server.sockets[0].getsockname()[1])
    try:
        yield link
    finally:
        server.close()
        link.cut()
