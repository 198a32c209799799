"""Measures what a refused call costs a router, beside what bare programs pay to answer the same messages.

Run: .venv/bin/python -m bench.router.refusals [../other] [--rounds 7] [--seconds 4] [--per-s 1000]

Each of these has a broker of its own: this checkout's router and perhaps another's, whose answers are never paid back,
so that each question after the first is refused; a program that answers with nats-py alone; and one without even that.
In turn, each is left alone for a while, and then asked so many questions a second of each of `models`, `fleet` and
`trace` by a process of its own. Shown is what its CPU time grows by, for each question."""

import argparse
import asyncio
import contextlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import cast

import nats
from nats.aio.msg import Msg

from bench import flags, system
from bench.checkouts import HERE
from bench.paired import quartiles
from bench.router.inquiries import KINDS
from tokenbus.cli.console import nats_server
from tokenbus.protocol.process.parent import end_with_parent

_ANSWER = b" " * 240
"""A payload as long as a refusal."""
_REPLIES = re.compile(rb"MSG \S+ \d+ (\S+) 0\r\n")
_ROUTER = """
from tokenbus.protocol.access import inquiries
inquiries.CALLER_SHARE, inquiries.CALLER_BURST_S = 1e-6, 0.0
from tokenbus.cli.start import main
main()
"""
_WARM_UP_S = 1.5


class _Bare(asyncio.Protocol):
    """Answers whatever it is asked, by a search for each message and one write for all that arrive together."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its type

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"INFO"):
            self._transport.write(b'CONNECT {"verbose":false}\r\nSUB tokenbus.v1.*.caller 1\r\n')
        elif data.startswith(b"PING"):
            self._transport.write(b"PONG\r\n")
        else:
            replies = _REPLIES.findall(data)
            self._transport.write(b"".join(b"PUB %b 240\r\n%b\r\n" % (reply, _ANSWER) for reply in replies))


async def _answer(url: str, *, barely: bool) -> None:
    if barely:
        host, port = url.removeprefix("nats://").split(":")
        await asyncio.get_running_loop().create_connection(_Bare, host, int(port))
    else:
        connection = await nats.connect(url)

        async def answer(message: Msg) -> None:
            await connection.publish(message.reply, _ANSWER)

        await connection.subscribe("tokenbus.v1.*.caller", cb=answer)
    await asyncio.Event().wait()


class _Asked:
    """A program that is asked, and what its questions have cost so far."""

    def __init__(self, url: str, command: list[str], checkout: Path = HERE) -> None:
        self._url = url
        self.costs_us: list[float] = []
        self.process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(checkout)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=end_with_parent,
        )

    async def _cores(self, seconds: float) -> float:
        before = system.cpu_seconds(self.process.pid)
        await asyncio.sleep(seconds)
        return (system.cpu_seconds(self.process.pid) - before) / seconds

    async def measure(self, seconds: float, per_s: int) -> None:
        alone = await self._cores(seconds)
        caller = subprocess.Popen(  # noqa: ASYNC220  # it dies with this process
            [sys.executable, "-m", "bench.router.inquiries", "--ask", self._url, "--per-s", str(per_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=end_with_parent,
        )
        await asyncio.sleep(_WARM_UP_S)
        asked = await self._cores(seconds)
        out, _ = await asyncio.to_thread(caller.communicate, b"")
        refused, answered, took_s = map(float, out.split())
        self.costs_us.append((asked - alone) / ((refused + answered) / took_s) * 1e6)


async def measure(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="tokenbus-bench-") as folder, contextlib.ExitStack() as stack:

        async def broker(name: str) -> str:
            running = await nats_server.start(0, Path(folder) / f"{name}.log")
            stack.callback(running.stop)
            return running.url

        def program(url: str, kind: str) -> _Asked:
            return _Asked(url, ["-m", "bench.router.refusals", "--answer", url, "--kind", kind])

        asked = {
            "a bare socket": program(await broker("bare"), "bare"),
            "nats-py": program(await broker("nats"), "nats"),
        }
        checkouts = {"this router": HERE, **({"the other's router": options.other.resolve()} if options.other else {})}
        for name, checkout in checkouts.items():
            url = await broker(name)
            asked[name] = _Asked(url, ["-c", _ROUTER, "router", "--nats", url], checkout)
        for one in asked.values():
            stack.callback(one.process.terminate)
        await asyncio.sleep(5.0)  # until all of them listen
        for _ in range(options.rounds):
            for one in asked.values():
                await one.measure(options.seconds, options.per_s)
        print(f"CPU time of each of {len(KINDS)} times {options.per_s} questions a second")
        for name, one in asked.items():
            print(f"  {name:<20} {quartiles(one.costs_us)} us")
        if options.other:
            mine, others = (asked[name].costs_us for name in checkouts)
            print(f"  this / the other     {quartiles([a / b for a, b in zip(mine, others, strict=True)])}")


def main() -> None:
    parser = flags.parser(__doc__, rounds=7, seconds=4, per_s=1_000)
    parser.add_argument("other", type=Path, nargs="?", help="another checkout, to compare its router")
    parser.add_argument("--answer", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        import uvloop

        uvloop.run(_answer(options.answer, barely=options.kind == "bare"))
    else:
        asyncio.run(measure(options))


if __name__ == "__main__":
    main()
