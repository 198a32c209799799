"""Measures the cost of guarding streams: a router's CPU time for workers' entries that carry tokens.

Run: .venv/bin/python -m bench.router.token_entries [--rate 2000] [--streams 8] [--seconds 4] [--pairs 7]

A forged worker accepts one request for each stream. Then it publishes at the given rate, in alternating runs (A B A B),
heartbeats without tokens, and entries that hold one token of each stream and are followed by their seal. The result is
the CPU time of the router's process as a share of one core."""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from nats.aio.msg import Msg

from bench import flags, paired
from bench.system import cpu_seconds, start
from tokenbus.cli.console import nats_server
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.wire import block_hash, codec, internal, messages, subjects

_NAMES = subjects.Subjects()
_EPOCH = "1760000000000-abcdef"
_ADDRESS = ("m", "forged")
_runs = codec.Decoder(internal.Run)


class ForgedWorker:
    """Accepts requests, and publishes what it is told to."""

    def __init__(self, bus: nats.Connection) -> None:
        self._bus = bus
        self._seq = 0
        self.keys: list[str] = []
        self.accepted = asyncio.Event()

    async def open(self) -> None:
        await self._bus.subscribe(_NAMES.worker(*_ADDRESS, "run"), self._accept)
        await self._bus.subscribe(_NAMES.discover, lambda _: self._publish_card())
        self._publish_card()

    def _publish_card(self) -> None:
        card = messages.Card(
            worker_id=_ADDRESS[1],
            epoch=_EPOCH,
            model=_ADDRESS[0],
            source="none",
            engine="sim",
            engine_version="1",
            context_length=1 << 20,
            max_num_seqs=1_024,
            max_num_batched_tokens=512,
            hash_scheme=block_hash.scheme_of("forged"),
            features=["generate"],
            state=messages.WorkerState.READY,
            host="here",
            pids=messages.Pids(front=1, engine=1),
            versions={},
        )
        self._bus.publish(_NAMES.card(*_ADDRESS), codec.encode(card))

    def publish(self, **changes: object) -> None:
        """Publishes the next entry."""
        entry = internal.Events(
            worker_id=_ADDRESS[1],
            epoch=_EPOCH,
            seq=self._seq,
            load=messages.Load(running=len(self.keys)),
            state=messages.WorkerState.READY,
            **changes,  # type: ignore[arg-type]
        )
        self._bus.publish(_NAMES.events(*_ADDRESS), codec.encode(entry))
        self._seq += 1

    def publish_tokens(self) -> None:
        """Publishes an entry with one token of each stream, and its seal."""
        numbers = block_hash.pack_token_ids(range(1, len(self.keys) + 1))
        self.publish(stream_nos=numbers, token_ids=numbers)
        seal = internal.Seal(epoch=_EPOCH, seq=self._seq - 1)
        self._bus.publish(_NAMES.seal(*_ADDRESS), codec.encode(seal))

    def _accept(self, message: Msg) -> None:
        run = _runs.decode(message.data)
        self.keys.append(run.request_id)
        started = internal.Started(
            id=run.request_id, stream_no=len(self.keys), attempt=run.attempt, prompt_tokens=len(run.token_ids) // 4
        )
        self.publish(started=[started])
        self._bus.publish(message.reply, codec.encode(internal.RunReply(accepted=True)))
        self.accepted.set()


async def measure(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="tokenbus-bench-") as folder:
        server = await nats_server.start(0, Path(folder) / "nats.log")
        router = start(Path(folder) / "router.log", "router", "--nats", server.url)
        try:
            bus = await nats.connect(nats.BusSettings(url=server.url), name="bench")
            worker = ForgedWorker(bus)
            await worker.open()
            await _ask(bus, worker, options.streams)
            quiet: list[float] = []
            loud: list[float] = []
            for _ in range(options.pairs):
                quiet.append(await _share(worker.publish, options, router.pid))
                loud.append(await _share(worker.publish_tokens, options, router.pid))
            await bus.close()
        finally:
            router.kill()
            server.stop()
    print(
        f"{options.rate} entries a second, {options.streams} tokens each, {options.pairs} pairs; share of one core, %"
    )
    print(f"  heartbeats              {paired.quartiles([100 * one for one in quiet])}")
    print(f"  with tokens and a seal  {paired.quartiles([100 * one for one in loud])}")
    print(f"  ratio                   {paired.quartiles([b / a for a, b in zip(quiet, loud, strict=True)])}")


async def _ask(bus: nats.Connection, worker: ForgedWorker, count: int) -> None:
    """Sends requests until the worker has accepted `count`."""
    request = messages.GenerateRequest(token_ids=[1, 2, 3], max_tokens=1 << 19)
    while len(worker.keys) < count:
        worker.accepted.clear()
        worker.publish()
        bus.publish(_NAMES.generate(_ADDRESS[0]), codec.encode(request, codec.Encoding.JSON), reply=bus.new_inbox())
        try:
            await asyncio.wait_for(worker.accepted.wait(), 0.2)
        except TimeoutError:
            continue  # the router is still starting, or does not know the worker yet


async def _share(publish: Callable[[], None], options: argparse.Namespace, pid: int) -> float:
    """Publishes at the given rate, and returns the share of a core that a process uses meanwhile."""
    before, began, done = cpu_seconds(pid), time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < options.seconds:
        due = int(passed * options.rate)
        for _ in range(due - done):
            publish()
        done = due
        await asyncio.sleep(0.005)
    return (cpu_seconds(pid) - before) / passed


def main() -> None:
    parser = flags.parser(__doc__, pairs=7)
    parser.add_argument("--rate", type=int, default=2_000, help="entries a second")
    parser.add_argument("--streams", type=int, default=8, help="streams, each with a token in every entry")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each measurement")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
