"""Measures what one caller who asks `models`, `fleet` and `trace` without a pause costs everybody else.

Run: .venv/bin/python -m bench.router.inquiries [--pairs 7] [--seconds 8] [--per-s 1000]

A simulated worker serves behind a real router and broker. A client of one tenant sends requests at a steady rate,
beside a caller of another tenant, in a process of its own, that sends so many messages a second of each metered
subject: in every second run to the router, in the others to a subject that nobody hears, so that the machine and the
broker have the same to do. Shown are the client's p99, from its request to the end of the answer, and the router's CPU
time for each of the caller's messages: nearly all are refused, and the few answers, which may take 5 % of a core, count
too."""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time

import nats
from nats.aio.client import Client as Nats
from nats.aio.msg import Msg

from bench import flags, system
from bench.paired import interleave, quartiles
from tokenbus.protocol.process.parent import end_with_parent
from tokenbus.protocol.wire import subjects

_REQUESTS_PER_S = 40
_CALLER = "caller"
_NAMES = subjects.Subjects()
KINDS = ("models", "fleet", "trace")
_METERED, _NOBODY = "tokenbus.v1", "nobody"
"""How the subjects begin that a router hears, and those that it does not."""


class _Requests:
    """A client whose requests are measured."""

    def __init__(self, connection: Nats) -> None:
        self._connection = connection
        self._inbox = connection.new_inbox()
        self._began: dict[str, float] = {}
        self.took_s: list[float] = []

    async def open(self) -> None:
        await self._connection.subscribe(f"{self._inbox}.*", cb=self._take)

    async def _take(self, message: Msg) -> None:
        if b'"finish_reason"' in message.data and (began := self._began.pop(message.subject, None)) is not None:
            self.took_s.append(time.perf_counter() - began)

    async def p99_ms(self, seconds: float) -> float:
        """Sends requests at a steady rate for a while, and waits until they have ended."""
        self.took_s.clear()
        body = json.dumps({"prompt": "Once", "max_tokens": 1}).encode()
        count = int(seconds * _REQUESTS_PER_S)
        start = time.perf_counter()
        for number in range(count):
            await asyncio.sleep(max(0.0, start + number / _REQUESTS_PER_S - time.perf_counter()))
            reply = f"{self._inbox}.{number}"
            self._began[reply] = time.perf_counter()
            await self._connection.publish(_NAMES.generate("m"), body, reply=reply)
        async with asyncio.timeout(30):
            while len(self.took_s) < count:
                await asyncio.sleep(0.01)
        return sorted(self.took_s)[int(0.99 * count)] * 1e3


async def ask_all_the_time(url: str, beginning: str, per_s: int) -> None:
    """Asks until standard input ends; prints how often it was refused, how often answered, and in how many seconds."""
    connection = await nats.connect(url)
    inbox, counts = connection.new_inbox(), [0, 0]

    async def take(message: Msg) -> None:
        counts[b"overloaded" not in message.data] += 1

    await connection.subscribe(f"{inbox}.*", cb=take)
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    start, sent = time.perf_counter(), 0
    while not ended.done():
        while sent < (time.perf_counter() - start) * per_s:
            for kind in KINDS:
                await connection.publish(f"{beginning}.{kind}.{_CALLER}", b"", reply=f"{inbox}.{sent}")
            sent += 1
        await asyncio.sleep(1e-3)
    await asyncio.sleep(0.5)
    await connection.close()
    print(*counts, time.perf_counter() - start)


async def measure(options: argparse.Namespace) -> None:
    worker = ("--engine", "sim", "--sim-speedup", "20", "--worker-id", "bench")
    async with system.started(options.model, worker) as running:
        connection = await nats.connect(running.nats_url)
        client = _Requests(connection)
        await client.open()
        await client.p99_ms(2.0)

        print(f"  p99 without a caller {await client.p99_ms(options.seconds):.1f} ms")

        async def beside(subject: str) -> tuple[float, float, float, float]:
            command = [sys.executable, "-m", "bench.router.inquiries", "--ask", running.nats_url, "--of", subject]
            process = subprocess.Popen(  # noqa: ASYNC220  # it dies with this process
                [*command, "--per-s", str(options.per_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                preexec_fn=end_with_parent,
            )
            await asyncio.sleep(2.0)  # until what it may be ahead is used up
            before = system.cpu_seconds(running.router_pid)
            p99 = await client.p99_ms(options.seconds)
            spent = (system.cpu_seconds(running.router_pid) - before) / options.seconds
            out, _ = await asyncio.to_thread(process.communicate, b"")
            refused, answered, seconds = map(float, out.split())
            return p99, spent, (refused + answered) / seconds, refused / max(1.0, refused + answered)

        seen = await interleave(lambda _: beside(_NOBODY), lambda _: beside(_METERED), options.pairs)
        costs = [(one[1] - other[1]) / one[2] * 1e6 for other, one in seen]
        print(f"  p99 beside a caller of nobody     {quartiles([one[0] for one, _ in seen])} ms")
        print(f"  p99 beside a caller of the router {quartiles([one[0] for _, one in seen])} ms")
        print(f"  ratio                             {quartiles([one[0] / other[0] for other, one in seen])}")
        print(f"  CPU of a message                  {quartiles(costs)} us")
        print(f"  refused of all                    {quartiles([one[3] for _, one in seen])}")
        with contextlib.suppress(Exception):
            await connection.close()


def main() -> None:
    parser = flags.parser(__doc__, pairs=7, seconds=8, per_s=1_000)
    parser.add_argument("--ask", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--of", default=_METERED, help=argparse.SUPPRESS)
    parser.add_argument("--model", default="steps-of-50ms", help=argparse.SUPPRESS)
    options = parser.parse_args()
    asyncio.run(ask_all_the_time(options.ask, options.of, options.per_s) if options.ask else measure(options))


if __name__ == "__main__":
    main()
