"""Workers and routers are killed, paused and restarted at random under load; no request is lost or left over.

TOKENBUS_CHAOS_S is the duration in seconds: a few by default, 300 for the long run in bench/README.md."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import msgspec

from tests.support.exact_client import ExactStream, until_idle, until_ready
from tests.support.raw_client import PREFIX, RawClient
from tests.support.system import System
from tokenbus.client import Client
from tokenbus.protocol.bus import connection
from tokenbus.protocol.telemetry.tracing import NoopTracer
from tokenbus.protocol.wire import codec, internal, messages, subjects
from tokenbus.router.serve import Router
from tokenbus.router.settings import RouterSettings

DURATION_S = float(os.environ.get("TOKENBUS_CHAOS_S", "12"))
WORKERS = ("worker-a", "worker-b", "worker-c")
ROUTERS = ("router-a", "router-b")
REPLICAS = 3
SEED = 7
_parts = codec.Decoder(internal.SnapshotPart)


class Chaos:
    """Causes one failure after another."""

    def __init__(self, system: System, rng: random.Random) -> None:
        self._system = system
        self._rng = rng
        self.done: Counter[str] = Counter()

    def start(self, name: str) -> None:
        if name in ROUTERS:
            self._system.router(name)
            return
        faults = {"worker-b": "lose@40", "worker-c": "crash@4000"}.get(name, "")
        self._system.worker(
            name,
            *("--engine", "sim", "--replicas", str(REPLICAS), "--kv-tokens", "8192", "--kv-block-size", "16"),
            *("--max-num-seqs", "8", "--sim-faults", faults, "--grace-s", "1"),
            model=Path("dynamo"),
        )

    async def go_on(self, seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            await asyncio.sleep(self._rng.uniform(0.3, 1.5))
            what, name = self._rng.choice(("kill", "pause", "leave")), self._rng.choice(WORKERS + ROUTERS)
            self.done[f"{what} {name.partition('-')[0]}"] += 1
            if what == "pause":
                self._system.signal(name, signal.SIGSTOP)
                await asyncio.sleep(self._rng.choice((0.2, 1.0, 2.6)))
                self._system.signal(name, signal.SIGCONT)
                continue
            self._system.signal(name, signal.SIGKILL if what == "kill" else signal.SIGTERM)
            await asyncio.to_thread(self._system.wait, name)
            await asyncio.sleep(self._rng.choice((0.0, 0.5)))
            self.start(name)


async def load(client: Client, rng: random.Random, until: float, ends: list[ExactStream]) -> None:
    """Sends requests with shared prefixes one after another, and cancels some."""
    while time.monotonic() < until:
        beginning = [1 + rng.randrange(4)] * 64
        prompt = beginning + [rng.randrange(1, 200) for _ in range(rng.randrange(200))]
        wanted = rng.randrange(1, 60)
        told = ExactStream(client.generate("demo", token_ids=prompt, max_tokens=wanted, timeout_ms=20_000.0), wanted)
        ends.append(told)
        if rng.random() < 0.1:
            await asyncio.sleep(rng.random() * 0.2)
            told.stream.cancel()
        await told.end()
        if not told.is_whole:
            await asyncio.sleep(0.05)


async def held_by(bare: RawClient, worker_id: str) -> set[int]:
    """Returns the blocks in a worker's snapshot; asks again while the worker is away."""
    inbox, subject = bare.nats.new_inbox(), f"{PREFIX}.worker.demo.{subjects.escape(worker_id)}.snapshot"
    subscription = await bare.nats.subscribe(inbox)
    await bare.nats.publish(subject, b"", reply=inbox)
    held: set[int] = set()
    while True:
        message = await subscription.next_msg(timeout=60)
        if not message.data:
            await asyncio.sleep(0.1)
            await bare.nats.publish(subject, b"", reply=inbox)
            continue
        part = _parts.decode(message.data)
        held |= {name for run in part.runs for name in run.hashes}
        if part.part == part.parts - 1:
            await subscription.unsubscribe()
            return held


async def test_after_any_chaos_every_request_has_ended_and_the_index_is_what_the_workers_hold(system: System) -> None:
    rng = random.Random(SEED)
    chaos = Chaos(system, rng)
    for name in WORKERS + ROUTERS:
        chaos.start(name)
    bare = await system.connect()
    await until_ready(bare, len(WORKERS) * REPLICAS)
    bus = await connection.connect(connection.Settings(url=system.url), name="router witness")
    witness = Router(bus, subjects.Subjects(), "witness", RouterSettings(), random.Random(1), NoopTracer())
    await witness.open()
    watching = asyncio.create_task(witness.run())
    ends: list[ExactStream] = []
    async with await Client.connect(system.url) as client:
        until = time.monotonic() + DURATION_S
        clients = [load(client, random.Random(f"{SEED} {number}"), until, ends) for number in range(16)]
        await asyncio.gather(chaos.go_on(DURATION_S), *clients)
        await until_ready(bare, len(WORKERS) * REPLICAS)
        await until_idle(bare)
    for told in ends:
        assert [chunk.finish_reason is None for chunk in told.chunks] == [True] * (len(told.chunks) - 1) + [False]
    reasons = Counter(told.terminal.error.code if told.terminal.error else told.terminal.finish_reason for told in ends)
    assert reasons[messages.FinishReason.LENGTH] > 0.5 * len(ends), reasons
    await settled(bare, witness)
    print(f"{DURATION_S:.0f} s: {dict(chaos.done)}; {len(ends)} requests: {dict(reasons)}")
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    await bus.close()


async def settled(bare: RawClient, witness: Router, timeout_s: float = 60.0) -> None:
    """Waits until the router's index equals the workers' blocks and nothing is booked."""
    workers = witness.fleet.workers_of("demo")
    assert len(workers) == len(WORKERS) * REPLICAS
    async with asyncio.timeout(timeout_s):
        while any(worker.bookings or worker.running or worker.log.is_behind for worker in workers):
            await asyncio.sleep(0.05)
            workers = witness.fleet.workers_of("demo")
    witness.fleet.check_integrity()
    for worker in workers:
        assert witness.fleet.blocks_of(worker) == await held_by(bare, worker.card.worker_id), worker
    assert sum(len(witness.fleet.blocks_of(worker)) for worker in workers) > 0
    reply = msgspec.json.decode((await bare.nats.request(f"{PREFIX}.models", b"", timeout=60)).data)
    assert reply["router"]["waiting"] == 0
