"""Router and broker beside a large fleet without requests, whose workers are generated: their sockets and messages are
real, and nothing else is.

Run: .venv/bin/python -m bench.router.generated_fleet ../other [--workers 2000] [--per-process 8] [--pairs 7]

Each pair measures the other checkout's router with workers as they were (two connections and five entries a second for
each), then this one's with processes (two connections and one beat a second for each). The other checkout needs its own
environment. `--generate URL` runs only the fleet."""

import asyncio
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench import flags
from bench.checkouts import HERE
from bench.paired import quartiles
from bench.serving.idle import cpu_us
from bench.system import start
from tokenbus.cli.console import nats_server
from tokenbus.protocol.wire import codec, internal, limits, messages, subjects

_NAMES = subjects.Subjects()
_MODEL = "generated"
_CONNECT = b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"no_responders":true,"lang":"bench"}\r\n'
_MESSAGE = re.compile(rb"MSG (\S+) \d+ (?:(\S+) )?(\d+)\r\n")
_ENTRY_S = 0.2
_BEAT_S = 0.8
_PING_S = {True: 0.4, False: 0.25}
_SETTLE_S = 12.0
_EPOCH = "1800000000000-0"


def _pub(subject: str, payload: bytes) -> bytes:
    return b"PUB %b %d\r\n%b\r\n" % (subject.encode(), len(payload), payload)


class _Line(asyncio.Protocol):
    """One connection: it answers pings, and hands messages to its process."""

    def __init__(self, process: "_Process") -> None:
        self._process = process
        self._received = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(_CONNECT)

    def data_received(self, data: bytes) -> None:
        if b"PING\r\n" in data and self.transport is not None:
            self.transport.write(b"PONG\r\n")
        self._received += data
        end = 0
        for found in _MESSAGE.finditer(self._received):
            if len(self._received) < found.end() + int(found[3]) + 2:
                break
            end = found.end() + int(found[3]) + 2
            self._process.received(found[1].decode(), (found[2] or b"").decode())
        self._received = self._received[end:] if b"MSG" in self._received[end:] else b""


class _Process:
    """A worker process, of one worker or of several that it speaks for."""

    def __init__(self, name: str, workers: Sequence[str], *, beats: bool) -> None:
        self._name = name
        self._workers = workers
        self._beats = beats
        self._seq = 0 if not beats else limits.FIRST_EVENT_SEQ
        self._cards = b"".join(_pub(_NAMES.card(_MODEL, one), codec.encode(self._card(one))) for one in workers)

    async def live(self, host: str, port: int, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(delay_s)
        outgoing, incoming = _Line(self), _Line(self)
        for line in (outgoing, incoming):
            await loop.create_connection(lambda line=line: line, host, port)  # type: ignore[misc]
        assert outgoing.transport is not None
        assert incoming.transport is not None
        self._out = outgoing.transport
        wanted = [_NAMES.discover, *(_NAMES.worker(_MODEL, one, ">") for one in self._workers)]
        incoming.transport.write(b"".join(b"SUB %b %d\r\n" % (one.encode(), at) for at, one in enumerate(wanted, 1)))
        await asyncio.sleep(0.2)
        self._out.write(self._cards + self._entries())
        speak_s, ping_s = (_BEAT_S if self._beats else _ENTRY_S), _PING_S[self._beats]
        pinged_at = 0.0
        while True:
            await asyncio.sleep(speak_s if not self._beats else ping_s)
            now = time.monotonic()
            out = b""
            if now - pinged_at >= ping_s:
                pinged_at, out = now, b"PING\r\n"
            if not self._beats:
                self._seq += 1
                out += self._entries()
            elif round(now / ping_s) % 2:
                out += self._beat()
            self._out.write(out)

    def received(self, subject: str, reply: str) -> None:
        if subject == _NAMES.discover:
            self._out.write(self._cards)
        elif subject.endswith(".snapshot") and reply:
            worker_id = subjects.decode_worker(".".join(subject.split(".")[3:5])).worker_id
            part = internal.SnapshotPart(
                worker_id=worker_id,
                epoch=_EPOCH,
                seq=self._seq,
                part=0,
                parts=1,
                load=messages.Load(),
                runs=[],
                running=[],
            )
            self._out.write(_pub(reply, codec.encode(part)))

    def _beat(self) -> bytes:
        beat = internal.Beat(epoch=_EPOCH, next_ms=1e3 * limits.BEAT_S, seqs=dict.fromkeys(self._workers, self._seq))
        return _pub(_NAMES.beat(_MODEL, self._name), codec.encode(beat))

    def _entries(self) -> bytes:
        entries = (
            internal.Events(
                worker_id=one, epoch=_EPOCH, seq=self._seq, load=messages.Load(), state=messages.WorkerState.READY
            )
            for one in self._workers
        )
        return b"".join(_pub(_NAMES.events(_MODEL, one.worker_id), codec.encode(one)) for one in entries)

    def _card(self, worker_id: str) -> messages.Card:
        return messages.Card(
            worker_id=worker_id,
            epoch=_EPOCH,
            model=_MODEL,
            source="generated",
            engine="sim",
            engine_version="0",
            context_length=4_096,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            hash_scheme="xxh3-64:0000000000000000",
            features=["generate"],
            state=messages.WorkerState.READY,
            host="generated",
            pids=messages.Pids(front=1, engine=1),
            versions={},
            kv_block_size=16,
            total_kv_blocks=1_024,
            process=self._name if self._beats else "",
        )


async def generate(url: str, workers: int, per_process: int, *, beats: bool) -> None:
    """Runs a fleet until cancelled. Without `beats` each worker is like a process of its own in earlier versions."""
    host, _, port = url.removeprefix("nats://").rpartition(":")
    size = per_process if beats else 1
    names = [f"w{number}" for number in range(workers)]
    groups = [names[at : at + size] for at in range(0, workers, size)]
    lives = [
        _Process(f"p{number}", group, beats=beats).live(host, int(port), 6.0 * number / len(groups))
        for number, group in enumerate(groups)
    ]
    await asyncio.gather(*lives)


async def _cores(checkout: Path, workers: int, per_process: int, seconds: int, *, beats: bool) -> tuple[float, float]:
    """Returns the cores that router and broker use."""
    with tempfile.TemporaryDirectory(prefix="tokenbus-bench-") as name:
        folder = Path(name)
        nats = await nats_server.start(0, folder / "nats.log")
        router = start(folder / "router.log", "router", "--nats", nats.url, python=checkout / ".venv/bin/python")
        flags_of_fleet = ["--generate", nats.url, "--workers", str(workers), "--per-process", str(per_process)]
        command = [sys.executable, "-m", "bench.router.generated_fleet", *flags_of_fleet, *["--entries"] * (not beats)]
        fleet = await asyncio.create_subprocess_exec(*command, cwd=HERE)
        try:
            await asyncio.sleep(_SETTLE_S)
            pids, began = (router.pid, nats.pid), time.monotonic()
            before = [cpu_us(pid) for pid in pids]
            await asyncio.sleep(seconds)
            took_us = (time.monotonic() - began) * 1e6
            router_cores, broker_cores = (
                (cpu_us(pid) - used) / took_us for pid, used in zip(pids, before, strict=True)
            )
            log = (folder / "router.log").read_text()
            known, lost = log.count('"worker_state_changed"'), log.count('"worker_lost"')
            if known != workers or lost:
                print(f"  the router knew {known} workers, and lost {lost}")
            return router_cores, broker_cores
        finally:
            fleet.kill()
            await fleet.wait()
            router.terminate()
            router.wait(timeout=60)
            nats.stop()


async def measure(other: Path, workers: int, per_process: int, pairs: int, seconds: int) -> None:
    seen: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for _ in range(pairs):
        first = await _cores(other, workers, per_process, seconds, beats=False)
        seen.append((first, await _cores(HERE, workers, per_process, seconds, beats=True)))
        print("  router and broker, other and this checkout: ", [[round(one, 3) for one in side] for side in seen[-1]])
    print(f"{workers} workers, {per_process} of a process, no requests: cores")
    for at, name in enumerate(("router", "broker")):
        theirs, ours = (statistics.median(pair[side][at] for pair in seen) for side in (0, 1))
        ratio = quartiles([second[at] / first[at] for first, second in seen])
        print(f"  {name:<8} {theirs:.3f} {ours:.3f}   ratio {ratio}")


def main() -> None:
    parser = flags.parser(__doc__, workers=2_000, per_process=8, pairs=7, seconds=10)
    parser.add_argument("other", type=Path, nargs="?")
    parser.add_argument("--generate", metavar="URL", help="run only the fleet")
    parser.add_argument("--entries", action="store_true", help="with workers like those of earlier versions")
    args = parser.parse_args()
    if args.generate:
        asyncio.run(generate(args.generate, args.workers, args.per_process, beats=not args.entries))
    elif args.other is None:
        parser.error("name another checkout")
    else:
        asyncio.run(measure(args.other.resolve(), args.workers, args.per_process, args.pairs, args.seconds))


if __name__ == "__main__":
    main()
