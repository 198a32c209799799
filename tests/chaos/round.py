"""Rounds: a system of real processes with 32 streams, and one fault after another."""

import asyncio
import contextlib
import datetime
import functools
import os
import random
import subprocess
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tests.chaos import plans
from tests.chaos.fleet import NUM_LANES, Fleet
from tests.chaos.plans import Fault
from tests.chaos.reading import Expected
from tests.chaos.results import MAX_NOTES, Record, violations
from tests.chaos.streams import Streams, undisturbed
from tests.support.exact_client import until_idle
from tests.support.raw_client import PREFIX, RawClient
from tests.support.system import System
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.bus import connection
from tokenbus.protocol.telemetry.tracing import NoopTracer
from tokenbus.protocol.wire import codec, internal, subjects
from tokenbus.router.serve import Router
from tokenbus.router.settings import RouterSettings

BETWEEN_FAULTS = 24
"""Tokens that each stream gets between two faults. With fewer than 16, three deaths could fall within 32 of its tokens,
and it would be blamed for them."""
PATIENCE_S = 60.0
"""Time that a client allows a stream in addition to what an undisturbed one takes."""
MAX_PROMPT_TOKENS = 200
_TICK_S = 0.05
_parts = codec.Decoder(internal.SnapshotPart)
_texts: dict[tuple[str, int], list[Expected]] = {}
"""The undisturbed texts by engine and length; they are the same in all rounds."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a system and of its streams."""

    engine: str
    num_workers: int
    num_tokens: int
    """Tokens of the longest streams."""
    step_ms: float = 25.0
    """Time of a token with the simulated engine; the demo model runs as fast as the machine can."""
    loses_events: bool = False
    """Whether some entries of the simulated workers' event logs are lost."""
    load_s: float = 0.0
    """Time that a simulated worker which is started after the others takes to load its model."""
    num_ready: int | None = None
    """Workers that must be ready before the next fault, while the others may be loading; all, if none are named."""
    cancels: float = 0.0
    """The share of the library's streams that are cancelled before their end."""
    num_gateways: int = 0
    num_http: int = 0
    """Streams from the gateways, in addition to the others."""


def setup_of(kind: str, seed: int, **sizes: Any) -> Setup:
    """Returns the size of a round of this kind, or with other `sizes`, by field. Rounds of another size are on the
    simulated engine, unless they name one."""
    is_mixed, is_slow = kind == "mixed", kind == "kill_while_loading"
    engine = sizes.get("engine") or ("sim" if sizes or is_slow else plans.engine_of(seed))
    own = Setup(
        engine=engine,
        num_workers=5 if is_slow else 3 if engine == "sim" else 2,
        num_tokens=plans.KINDS[kind].num_tokens,
        loses_events=is_mixed,
        load_s=60.0 if is_slow else 10.0,
        num_ready=2 if is_slow else None,  # several load at once
        cancels=0.1 if is_mixed else 0.0,
        num_gateways=2 if sizes.get("num_http") else 0,
    )
    return msgspec.structs.replace(own, **sizes)


class Site:
    """A running system on which faults are carried out; `started` yields one."""

    def __init__(
        self,
        setup: Setup,
        url: str,
        fleet: Fleet,
        bare: RawClient,
        client: WireClient,
        witness: Router,
        texts: list[Expected],
    ) -> None:
        self._setup = setup
        self.url = url
        self.fleet = fleet
        self.bare = bare
        self._client = client
        self._witness = witness
        self._texts = texts

    def __repr__(self) -> str:
        return f"<Site {self.fleet!r}>"

    async def play(self, record: Record, faults: Iterable[Fault]) -> None:
        """Carries out the faults under load, waits until all streams have ended and nothing is left of them, and
        records what was seen."""
        async with self.under_load(record) as streams:
            for fault in faults:
                await self._go_on(streams)
                await asyncio.sleep(fault.after_s)
                began = time.monotonic()
                record.faults += await self.fleet.carry_out(fault, streams.open_ids)
                record.longest_fault_s = round(max(record.longest_fault_s, time.monotonic() - began), 1)

    @contextlib.asynccontextmanager
    async def under_load(self, record: Record) -> AsyncIterator[Streams]:
        """Keeps streams open during the block, then waits until all have ended and nothing is left of them, and records
        what was seen."""
        setup = self._setup
        limit_s = setup.num_tokens * setup.step_ms / 1e3 + PATIENCE_S
        streams = Streams(
            self._client,
            self.bare,
            self._texts,
            setup.engine,
            random.Random(record.seed),
            limit_s,
            setup.cancels,
            num_http=setup.num_http,
            gateway_ports=self.fleet.gateway_ports,
        )
        stalls = asyncio.create_task(_note_stalls(record))
        streams.start()
        try:
            yield streams
            await self._go_on(streams)
            await streams.finish()
            await until_idle(self.bare)
            await _until_settled(self.bare, self._witness, self.fleet.workers)
        finally:
            stalls.cancel()
            await streams.stop()
            record.ends = streams.ends(self.fleet.accepted_ids())
            record.gaps_ms = streams.gaps_ms()
            record.longest_silence_ms = round(1e3 * streams.longest_silence_s)
            record.median_stream_s = round(streams.median_s, 1)
            record.notes = streams.problems(plans.KINDS[record.kind].errors)[:MAX_NOTES]

    async def _go_on(self, streams: Streams) -> None:
        """Waits until the system has recovered from the last fault."""
        await self.fleet.until_up(self.bare, self._setup.num_ready)
        await streams.go_on(BETWEEN_FAULTS)


async def _note_stalls(record: Record) -> None:
    """Records how long this process, with all clients, stood still."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _TICK_S
        await asyncio.sleep(_TICK_S)
        record.longest_stall_ms = max(record.longest_stall_ms, round(1e3 * (loop.time() - due)))


@contextlib.asynccontextmanager
async def started(setup: Setup, folder: Path, pythons: Mapping[str, Path] | None = None) -> AsyncIterator[Site]:
    """Starts a system whose processes log into `folder`, and stops it, however the block ends. `pythons` are of other
    versions' environments, by group of processes."""
    async with contextlib.AsyncExitStack() as stack:
        system = await System.start(folder)
        stack.push_async_callback(system.stop)
        kv_tokens = NUM_LANES * (setup.num_tokens + MAX_PROMPT_TOKENS)
        fleet = Fleet(
            system,
            setup.engine,
            setup.num_workers,
            setup.step_ms,
            kv_tokens,
            num_gateways=setup.num_gateways,
            loses_events=setup.loses_events,
            load_s=setup.load_s,
            pythons=pythons,
        )
        await fleet.start()
        bare = await system.connect(reconnects=True)
        await fleet.until_up(bare)
        client = await stack.enter_async_context(await WireClient.connect(system.url))
        witness = await stack.enter_async_context(_watching(system.url))
        key = (setup.engine, setup.num_tokens)
        if key not in _texts:
            _texts[key] = await undisturbed(client, *key)
        yield Site(setup, system.url, fleet, bare, client, witness, _texts[key])


async def play(kind: str, seed: int, setup: Setup, faults: Iterable[Fault], folder: Path, sizes: str = "") -> Record:
    """Plays a round on a system of its own and returns what it has shown. `sizes` are the flags that it was given."""
    began, record = time.monotonic(), new_record(kind, seed, setup.engine, sizes)
    try:
        async with started(setup, folder) as site:
            await site.play(record, faults)
    except Exception as error:  # whatever went wrong is also a result
        record.failure = f"{type(error).__name__}: {error}"
    record.duration_s = round(time.monotonic() - began, 1)
    return record


def new_record(kind: str, seed: int, engine: str, sizes: str = "") -> Record:
    today = datetime.date.today().isoformat()
    return Record(kind=kind, seed=seed, engine=engine, sizes=sizes, machine=_machine(), commit=_commit(), date=today)


def broken_promises(record: Record) -> list[str]:
    """Returns the reasons for which a round counts as failed."""
    return ([record.failure] if record.failure else []) + violations(record.kind, record.ends)


@contextlib.asynccontextmanager
async def _watching(url: str) -> AsyncIterator[Router]:
    """Runs a router that hears everything and accepts no requests."""
    bus = await connection.connect(connection.BusSettings(url=url), name="router witness")
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
    """Waits until a router that has heard everything has no bookings left, and checks that its index has exactly the
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
        known = witness.fleet.model(worker.card.model).blocks_of(worker)
        held = await _held_by(bare, worker.card.worker_id)
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
def _machine() -> str:
    """Returns the number of cores of this machine, and the name of its processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")
    return f"{os.cpu_count()} cores, {name}"


@functools.cache
def _commit() -> str:
    """Returns the commit of this checkout, with a + if files were changed since."""
    asked = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip() or "unknown"
