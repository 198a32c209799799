"""One round: a system of real processes with 32 streams, and one fault after the other."""

import asyncio
import contextlib
import datetime
import functools
import os
import random
import subprocess
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import msgspec

from tests.chaos import plans
from tests.chaos.fleet import Fleet
from tests.chaos.plans import Fault
from tests.chaos.reading import Expected
from tests.chaos.results import MAX_NOTES, Record, violations
from tests.chaos.streams import Streams, undisturbed
from tests.support.exact_client import until_idle
from tests.support.raw_client import PREFIX, RawClient
from tests.support.system import System
from tokenbus.client import Client
from tokenbus.protocol.bus import connection
from tokenbus.protocol.telemetry.tracing import NoopTracer
from tokenbus.protocol.wire import codec, internal, subjects
from tokenbus.router.serve import Router
from tokenbus.router.settings import RouterSettings

BETWEEN_FAULTS = 24
"""Tokens that each stream gets between two faults: with fewer, it would be blamed for the third death."""
PATIENCE_S = 60.0
"""Time that a client gives its stream beyond what an undisturbed one takes."""
CANCELS = 0.1
"""The share of the library's streams that are cancelled in `mixed` rounds."""
_parts = codec.Decoder(internal.SnapshotPart)
_texts: dict[tuple[str, int], list[Expected]] = {}
"""The undisturbed texts of each engine and length, which do not change from one round to the next."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a round."""

    engine: str
    num_workers: int
    num_tokens: int
    """Tokens of each stream."""
    step_ms: float = 25.0
    """Time of a token with the simulated engine; the demo model is as fast as the machine."""


def setup_of(kind: str, seed: int) -> Setup:
    engine = plans.engine_of(seed)
    return Setup(engine=engine, num_workers=3 if engine == "sim" else 2, num_tokens=plans.KINDS[kind].num_tokens)


class Round:
    """A running system with its streams."""

    def __init__(self, setup: Setup, system: System, kind: str) -> None:
        self.fleet = Fleet(
            system,
            setup.engine,
            setup.num_workers,
            setup.step_ms,
            kv_tokens=40 * (setup.num_tokens + 200),
            loses_events=kind == "mixed",
        )
        self.num_faults = 0
        self.longest_fault_s = 0.0
        self.streams: Streams | None = None
        self._setup = setup
        self._system = system
        self._kind = kind

    async def run(self, faults: Iterable[Fault]) -> None:
        """Carries out the faults under load; returns when all streams have ended and nothing is left over."""
        async with contextlib.AsyncExitStack() as stack:
            await self.fleet.start()
            bare = await self._system.connect(reconnects=True)
            await self.fleet.until_up(bare)
            client = await stack.enter_async_context(await Client.connect(self._system.url))
            witness = await stack.enter_async_context(_watching(self._system.url))
            texts = await self._undisturbed(client)
            step_ms = self._setup.step_ms
            limit_s = self._setup.num_tokens * step_ms / 1e3 + PATIENCE_S
            cancels = CANCELS if self._kind == "mixed" else 0.0
            self.streams = Streams(client, bare, texts, self._setup.engine, limit_s, cancels)
            stack.push_async_callback(self.streams.stop)
            self.streams.start()
            for fault in faults:
                await self._carry_out(fault, bare)
            await self._go_on(bare)
            await self.streams.finish()
            await until_idle(bare)
            await _until_settled(bare, witness, self.fleet.workers)

    async def _undisturbed(self, client: Client) -> list[Expected]:
        key = (self._setup.engine, self._setup.num_tokens)
        if key not in _texts:
            _texts[key] = await undisturbed(client, *key)
        return _texts[key]

    async def _carry_out(self, fault: Fault, bare: RawClient) -> None:
        assert self.streams is not None
        await self._go_on(bare)
        await asyncio.sleep(fault.after_s)
        began = time.monotonic()
        self.num_faults += await self.fleet.carry_out(fault, self.streams.open_ids)
        self.longest_fault_s = max(self.longest_fault_s, time.monotonic() - began)

    async def _go_on(self, bare: RawClient) -> None:
        """Waits until nothing shows the last fault any more."""
        assert self.streams is not None
        await self.fleet.until_up(bare)
        await self.streams.go_on(BETWEEN_FAULTS)


async def play(kind: str, seed: int, setup: Setup, faults: Iterable[Fault], folder: Path) -> Record:
    """Plays a round and returns what it has shown. Processes log into `folder`."""
    began = time.monotonic()
    system = await System.start(folder)
    one, failure = Round(setup, system, kind), ""
    try:
        await one.run(faults)
    except Exception as error:  # whatever went wrong is a result too
        failure = f"{type(error).__name__}: {error}"
    finally:
        await system.stop()
    streams = one.streams
    ends = streams.ends(one.fleet.accepted_ids()) if streams else {}
    return Record(
        kind=kind,
        seed=seed,
        engine=setup.engine,
        faults=one.num_faults,
        ends=ends,
        gaps_ms=streams.gaps_ms() if streams else [],
        longest_silence_ms=round(1e3 * streams.longest_silence_s) if streams else 0,
        longest_fault_s=round(one.longest_fault_s, 1),
        median_stream_s=round(streams.median_s, 1) if streams else 0.0,
        duration_s=round(time.monotonic() - began, 1),
        failure=failure,
        notes=streams.problems(plans.KINDS[kind].errors)[:MAX_NOTES] if streams else [],
        machine=machine(),
        commit=commit(),
        date=datetime.date.today().isoformat(),
    )


def broken_promises(record: Record) -> list[str]:
    """Returns everything for which a round counts as failed."""
    return ([record.failure] if record.failure else []) + violations(record.kind, record.ends)


@contextlib.asynccontextmanager
async def _watching(url: str) -> AsyncIterator[Router]:
    """Runs a router that hears everything and takes no requests."""
    bus = await connection.connect(connection.Settings(url=url), name="router witness")
    witness = Router(bus, subjects.Subjects(), "witness", RouterSettings(), random.Random(1), NoopTracer())
    await witness.open()
    await witness.stop_intake()
    watching = asyncio.create_task(witness.run())
    try:
        yield witness
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await bus.close()


async def _until_settled(bare: RawClient, witness: Router, names: list[str], timeout_s: float = 60.0) -> None:
    """Waits until a router that has heard everything has nothing booked, and checks that its index has exactly the
    blocks that the workers hold."""
    async with asyncio.timeout(timeout_s):
        while True:
            workers = witness.fleet.workers_of("demo")
            is_busy = any(worker.bookings or worker.running or worker.log.is_behind for worker in workers)
            if not is_busy and {worker.card.worker_id for worker in workers} == set(names):
                break
            await asyncio.sleep(0.05)
    witness.fleet.check_integrity()
    for worker in workers:
        known, held = witness.fleet.blocks_of(worker), await _held_by(bare, worker.card.worker_id)
        if known != held:
            raise LookupError(f"the index has {len(known - held)} blocks too many and {len(held - known)} too few")


async def _held_by(bare: RawClient, worker_id: str) -> set[int]:
    """Returns the blocks in a worker's snapshot."""
    inbox, subject = bare.nats.new_inbox(), f"{PREFIX}.worker.demo.{subjects.escape(worker_id)}.snapshot"
    subscription = await bare.nats.subscribe(inbox)
    await bare.nats.publish(subject, b"", reply=inbox)
    held: set[int] = set()
    while True:
        part = _parts.decode((await subscription.next_msg(timeout=60)).data)
        held |= {name for run in part.runs for name in run.hashes}
        if part.part == part.parts - 1:
            await subscription.unsubscribe()
            return held


@functools.cache
def machine() -> str:
    """Returns what the processor of this machine is called, and how many cores there are."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")
    return f"{os.cpu_count()} cores, {name}"


@functools.cache
def commit() -> str:
    """Returns the commit of this checkout, with a + if something has been changed since."""
    asked = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip() or "unknown"
