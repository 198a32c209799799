"""Measures what clients' cancels cost the broker of a large fleet, and the broker's memory.

Run: .venv/bin/python -m bench.router.fleet [--workers 1000] [--rounds 7] [--seconds 5] [--cancels 20]

Workers are generated: raw connections with the subscriptions, cards and heartbeats of idle workers, and nothing else.
Broker and router are real. `now` are workers to which routers pass cancels on, with one subscription for all services;
`before` are workers that hear all clients of their model and have a subscription for each service, as those of earlier
versions do. A round is some seconds without cancels and some with cancels of unknown requests; the difference
of the broker's CPU time is theirs."""

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from bench import flags, system
from bench.paired import quartiles
from tokenbus.cli.console import nats_server
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import codec, errors, internal, messages, subjects

_MODEL = "generated"
_BEAT_S = 0.2
_NAMES = subjects.Subjects()
_SERVICES = (
    *("run", "control", "take", "snapshot", "abort", "tokenize", "detokenize", "embed", "rerank", "tokenizer"),
    *("guarded", "kv"),
)
_OTHERS = ("upload.*", "received.*", "gone.*", "unguarded.*", "kv.upload.*")


class Worker:
    """Makes the messages of one idle worker."""

    def __init__(self, number: int, *, is_told: bool) -> None:
        self.name = f"w{number:05}"
        self._epoch = f"{time.time_ns() // 1_000_000}-{number:08x}"
        self._seq = 0
        self.card = codec.encode(
            messages.Card(
                worker_id=self.name,
                epoch=self._epoch,
                model=_MODEL,
                source="generated",
                engine="sim",
                engine_version="1",
                context_length=4_096,
                max_num_seqs=16,
                max_num_batched_tokens=512,
                hash_scheme="xxh3-64:0",
                features=["generate", "explain", "resume", "logprobs", "regex", "json_schema", "grammar"],
                state=messages.WorkerState.READY,
                host="generated",
                pids=messages.Pids(front=1, engine=2),
                versions={"tokenbus": "1", "python": "3.11", "nats-py": "2.11"},
                kv_block_size=16,
                total_kv_blocks=4_096,
                takes_passed_on=is_told,
            )
        )

    def heartbeat(self) -> bytes:
        entry = internal.Events(
            worker_id=self.name,
            epoch=self._epoch,
            seq=self._seq,
            load=messages.Load(free_blocks=4_096),
            state=messages.WorkerState.READY,
        )
        self._seq += 1
        return codec.encode(entry)


def subscriptions(worker: str, *, is_told: bool) -> list[str]:
    """Returns the subjects that a worker hears."""
    own = [_NAMES.worker(_MODEL, worker, one) for one in (*(("*",) if is_told else _SERVICES), *_OTHERS)]
    clients = [] if is_told else [_NAMES.cancels_of(_MODEL), _NAMES.resyncs_of(_MODEL)]
    return [*own, *clients, _NAMES.discover, _NAMES.card(_MODEL, worker)]


class Link(asyncio.Protocol):
    """The connection of some workers."""

    def __init__(self, workers: Sequence[Worker], *, is_told: bool) -> None:
        self._workers = workers
        self._is_told = is_told
        self.received_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        heard = [one for worker in self._workers for one in subscriptions(worker.name, is_told=self._is_told)]
        lines = "".join(f"SUB {subject} {number}\r\n" for number, subject in enumerate(heard, start=1))
        options = '{"verbose":false,"pedantic":false,"headers":true,"no_responders":true}'
        transport.write(f"CONNECT {options}\r\n{lines}PING\r\n".encode())

    def data_received(self, data: bytes) -> None:
        self.received_bytes += len(data)
        if b"PING\r\n" in data:
            self._transport.write(b"PONG\r\n")
        if b" " + _NAMES.discover.encode() in b" " + data:
            self.announce()

    def announce(self) -> None:
        for worker in self._workers:
            self._publish(_NAMES.card(_MODEL, worker.name), worker.card)

    def beat(self) -> None:
        for worker in self._workers:
            self._publish(_NAMES.events(_MODEL, worker.name), worker.heartbeat())

    def _publish(self, subject: str, payload: bytes) -> None:
        self._transport.write(b"PUB %b %d\r\n%b\r\n" % (subject.encode(), len(payload), payload))

    def close(self) -> None:
        self._transport.close()


class Fleet(NamedTuple):
    client: WireClient
    broker_pid: int
    links: list[Link]


@asynccontextmanager
async def generated(count: int, per_connection: int, *, is_told: bool) -> AsyncIterator[Fleet]:
    """Runs a broker, a router and generated workers."""
    with tempfile.TemporaryDirectory(prefix="tokenbus-bench-") as name:
        nats = await nats_server.start(0, Path(name) / "nats.log")
        router = system.start(Path(name) / "router.log", "router", "--nats", nats.url)
        host, port = nats.url.rpartition("//")[2].split(":")
        workers = [Worker(number, is_told=is_told) for number in range(count)]
        links: list[Link] = []
        beating: asyncio.Task[None] | None = None
        try:
            async with await WireClient.connect(nats.url) as client:
                await _until_ready(client, 0)
                for start in range(0, count, per_connection):
                    some = workers[start : start + per_connection]
                    _, link = await asyncio.get_running_loop().create_connection(
                        lambda some=some: Link(some, is_told=is_told),  # type: ignore[misc]
                        host,
                        int(port),
                    )
                    links.append(link)
                    link.announce()
                    link.beat()
                beating = asyncio.create_task(_beat(links))
                await _until_ready(client, count)
                yield Fleet(client, nats.pid, links)
        finally:
            if beating is not None:
                beating.cancel()
            for link in links:
                link.close()
            router.terminate()
            router.wait(timeout=60)
            nats.stop()


async def _until_ready(client: WireClient, count: int) -> None:
    """Waits until a router answers that it has this many workers, all of them ready."""
    expected = {"ready": count} if count else {}
    async with asyncio.timeout(120):
        states = None
        while states != expected:
            await asyncio.sleep(0.2)
            with contextlib.suppress(errors.RequestError):
                summary = (await client.models(with_workers=False)).summary
                states = summary.states if summary else None


async def _beat(links: Sequence[Link]) -> None:
    """Lets each worker beat, spread over the interval as those of many processes are."""
    while True:
        for number, link in enumerate(links):
            link.beat()
            if number % max(1, len(links) // 20) == 0:
                await asyncio.sleep(_BEAT_S / 20)


async def _cores(fleet: Fleet, seconds: float, cancels: int) -> float:
    """Returns the cores that the broker uses while clients cancel this many requests a second."""
    bus = fleet.client._connection
    before, began = system.cpu_seconds(fleet.broker_pid), time.perf_counter()
    for number in range(max(1, round(seconds * cancels))):
        if cancels:
            bus.publish(_NAMES.cancel(f"unknown-{number}", model=_MODEL), b"")
            await asyncio.sleep(1 / cancels)
        else:
            await asyncio.sleep(seconds)
    return (system.cpu_seconds(fleet.broker_pid) - before) / (time.perf_counter() - began)


def _mib(pid: int) -> float:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1_024


async def measure(options: argparse.Namespace) -> None:
    for name, is_told in (("now", True), ("before", False)):
        async with generated(options.workers, options.per_connection, is_told=is_told) as fleet:
            idle, extra, received = [], [], []
            for _ in range(options.rounds):
                idle.append(await _cores(fleet, options.seconds, 0))
                count = sum(link.received_bytes for link in fleet.links)
                extra.append(await _cores(fleet, options.seconds, options.cancels) - idle[-1])
                received.append(sum(link.received_bytes for link in fleet.links) - count)
            more = quartiles(extra)
            print(
                f"{name}: {options.workers} workers, {options.per_connection} to a connection, each with "
                f"{len(subscriptions('w', is_told=is_told))} subscriptions: broker {_mib(fleet.broker_pid):.0f} MiB, "
                f"{statistics.median(idle):.3f} of a core while idle; {options.cancels} cancels a second cost it "
                f"{more.median:.3f} more ({more.first_quartile:.3f} to {more.third_quartile:.3f}), and the workers "
                f"received {statistics.median(received) / options.seconds / 1e3:.0f} KB/s",
                flush=True,
            )


if __name__ == "__main__":
    parser = flags.parser(__doc__, workers=1_000, per_connection=8, rounds=7, seconds=5, cancels=20)
    asyncio.run(measure(parser.parse_args()))
