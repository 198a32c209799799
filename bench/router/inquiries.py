"""Measures what one caller who asks `models`, `fleet` and `trace` without a pause costs everybody else.

Run: .venv/bin/python -m bench.router.inquiries [--pairs 7] [--seconds 8] [--per-s 1000]

A simulated worker serves behind a real router and broker. A client of one tenant sends requests at a steady rate; in
every second run a caller of another tenant, in a process of its own, sends so many messages a second of each metered
subject. Shown are the other client's p99, from its request to the end of the answer, without the caller and beside it,
and the router's CPU time for each refused call, less what the answers took that the caller could pay for."""

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
from tokenbus.router.access.inquiries import CALLER_SHARE

_REQUESTS_PER_S = 40
_CALLER = "caller"
_NAMES = subjects.Subjects()
_ASKED = [
    subject.removesuffix(">") + _CALLER
    for subject in ("tokenbus.v1.models.>", "tokenbus.v1.fleet.>", "tokenbus.v1.trace.>")
]


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


async def ask_all_the_time(url: str, per_s: int) -> None:
    """Asks until standard input ends; prints how often it was refused, and how often answered."""
    connection = await nats.connect(url)
    inbox, counts = connection.new_inbox(), [0, 0]

    async def take(message: Msg) -> None:
        counts[b"overloaded" not in message.data] += 1

    await connection.subscribe(f"{inbox}.*", cb=take)
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    start, sent = time.perf_counter(), 0
    while not ended.done():
        while sent < (time.perf_counter() - start) * per_s:
            for subject in _ASKED:
                await connection.publish(subject, b"", reply=f"{inbox}.{sent}")
            sent += 1
        await asyncio.sleep(1e-3)
    await asyncio.sleep(0.5)
    await connection.close()
    print(*counts)


async def measure(options: argparse.Namespace) -> None:
    worker = ("--engine", "sim", "--sim-speedup", "20", "--worker-id", "bench")
    async with system.started(options.model, worker) as running:
        connection = await nats.connect(running.nats_url)
        client = _Requests(connection)
        await client.open()
        await client.p99_ms(2.0)
        costs: list[float] = []

        async def alone(number: int) -> tuple[float, float]:
            before = system.cpu_seconds(running.router_pid)
            p99 = await client.p99_ms(options.seconds)
            return p99, (system.cpu_seconds(running.router_pid) - before) / options.seconds

        async def beside(number: int) -> tuple[float, float, int]:
            command = [sys.executable, "-m", "bench.router.inquiries", "--ask", running.nats_url]
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
            return p99, spent, int(out.split()[0])

        seen = await interleave(alone, beside, options.pairs)
        for (_, idle), (_, spent, _refused) in seen:
            costs.append((spent - idle - CALLER_SHARE) / (len(_ASKED) * options.per_s) * 1e6)
        print(f"  p99 alone             {quartiles([one[0] for one, _ in seen])} ms")
        print(f"  p99 beside the caller {quartiles([one[0] for _, one in seen])} ms")
        print(f"  ratio                 {quartiles([one[0] / other[0] for other, one in seen])}")
        print(f"  CPU per refused call  {quartiles(costs)} us")
        print(f"  refused calls a run   {quartiles([float(one[2]) for _, one in seen])}")
        with contextlib.suppress(Exception):
            await connection.close()


def main() -> None:
    parser = flags.parser(__doc__, pairs=7, seconds=8, per_s=1_000)
    parser.add_argument("--ask", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="steps-of-50ms", help=argparse.SUPPRESS)
    options = parser.parse_args()
    asyncio.run(ask_all_the_time(options.ask, options.per_s) if options.ask else measure(options))


if __name__ == "__main__":
    main()
