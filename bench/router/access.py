"""Measures what keys and accounts cost, and how soon a revocation counts.

python -m bench.router.access usage       the end of a request, counted for the usage reports (CPU time)
python -m bench.router.access audit       a record for the audit log: added, and stored by a broker (CPU time)
python -m bench.router.access revoke      from the change of a key until a request with it is refused
python -m bench.router.access digests     the digests of 2,000 workers that all change every second"""

import argparse
import asyncio
import contextlib
import logging
import random
import statistics
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import structlog

from bench import flags, system
from bench.paired import quartiles
from tests.router.builders import card, events, fleet_of
from tests.support.ports import free_port
from tokenbus.cli.console import nats_server
from tokenbus.client.wire.fleet_picture import FleetPicture
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.access import key_changes, keys
from tokenbus.protocol.access.audit_log import AuditLog, AuditSettings, AuditWriter
from tokenbus.protocol.access.key_source import BUCKET, KeySettings
from tokenbus.protocol.access.key_stores import KeyStore
from tokenbus.protocol.access.keys import KeyRecord
from tokenbus.protocol.bus import connection
from tokenbus.protocol.bus.bucket import Bucket
from tokenbus.protocol.wire import codec, errors, messages, subjects
from tokenbus.router.fleet.digests import FleetDigests
from tokenbus.router.requests.flights.ends import RequestEnd, RequestEnds
from tokenbus.router.telemetry.metrics import RouterMetrics
from tokenbus.router.usage.audited_ends import audit_ends
from tokenbus.router.usage.recorder import UsageRecorder
from tokenbus.router.usage.writer import UsageWriter

_BATCH = 1_000
_MAX_BYTES = 1_000_000


@contextlib.asynccontextmanager
async def _broker() -> AsyncIterator[tuple[nats_server.NatsServer, connection.Connection, Path]]:
    with tempfile.TemporaryDirectory(prefix="tokenbus-bench-") as name:
        folder = Path(name)
        nats = await nats_server.start(0, folder / "nats.log", store=folder / "store")
        opened = await connection.connect(connection.BusSettings(url=nats.url), "bench")
        try:
            yield nats, opened, folder
        finally:
            await opened.close()
            nats.stop()


def _ends(num_keys: int) -> list[RequestEnd]:
    rng = random.Random(1)
    addresses = [subjects.ModelAddress("demo", f"tenant-{n % 100}", keys.new_key().id) for n in range(num_keys)]
    return [
        RequestEnd("generate", rng.choice(addresses), f"request-{number}", "stop", None, 500, 300, 200)
        for number in range(_BATCH)
    ]


async def usage(options: argparse.Namespace) -> None:
    async with _broker() as (_, opened, _):
        writer = UsageWriter(Bucket(opened, "bench"), "r1", 400, random.Random(1))
        recorder = UsageRecorder(writer, RouterMetrics(), lambda model: True)
        ends, found = _ends(options.keys), []
        for _ in range(options.rounds + 1):
            began = time.process_time_ns()
            for end in ends:
                recorder.record(end)
            found.append((time.process_time_ns() - began) / 1e3 / _BATCH)
    print(f"usage of {options.keys} keys: {quartiles(found[1:])} us a request")


async def audit(options: argparse.Namespace) -> None:
    async with _broker() as (_, opened, _):
        writer, told = AuditWriter(AuditLog(opened, "bench"), AuditSettings(audit=True)), RequestEnds()
        audit_ends(told, writer, RouterMetrics().audit_records)
        ends, added, stored = _ends(options.keys), [], []
        for _ in range(options.rounds + 1):
            began = time.process_time_ns()
            for end in ends:
                told.tell_refused(end.operation, end.address, end.request_id, errors.Code.OVERLOADED)
            ended = time.process_time_ns()
            while len(writer):
                assert await writer.write()
            added.append((ended - began) / 1e3 / _BATCH)
            stored.append((time.process_time_ns() - ended) / 1e3 / _BATCH)
    print(f"an audit record: added {quartiles(added[1:])} us, stored {quartiles(stored[1:])} us")


async def revoke(options: argparse.Namespace) -> None:
    """One request follows another; the refusal of one ends a trial."""
    async with _broker() as (nats, opened, folder):
        store = KeySettings(BUCKET).store(opened, subjects.DEFAULT_PREFIX)
        await store.create()
        worker = ("worker", "--nats", nats.url, "--engine", "sim", "--model", "dynamo", "--served-name", "m")
        port = free_port()
        processes = [
            system.start(folder / "router.log", "router", "--nats", nats.url, "--keys", "bucket"),
            system.start(folder / "worker.log", *worker),
            system.start(
                folder / "gateway.log", "gateway", "--nats", nats.url, "--keys", "bucket", "--port", str(port)
            ),
        ]
        try:
            async with await WireClient.connect(nats.url) as client:
                await system.cards(client)
            await system.until_listening(port)

            async def over_http(key: str, record: KeyRecord) -> bool:
                return await asyncio.to_thread(_is_let_in, port, key)

            async def over_nats(key: str, record: KeyRecord) -> bool:
                async with await WireClient.connect(nats.url, tenant=record.tenant, key_id=record.id) as one:
                    async for chunk in one.generate("m", messages.GenerateRequest(token_ids=[1], max_tokens=1)):
                        if chunk.finish_reason is not None:
                            return not chunk.error
                return False

            for name, ask in (("HTTP", over_http), ("NATS", over_nats)):
                times_ms = [await _revoked_ms(store, ask) for _ in range(options.revocations)]
                cuts = statistics.quantiles(times_ms, n=100)
                print(f"revoked until refused over {name}: p50 {cuts[49]:.0f}, p99 {cuts[98]:.0f} ms")
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(timeout=60)


async def _revoked_ms(store: KeyStore, ask: Callable[[str, KeyRecord], Awaitable[bool]]) -> float:
    made = keys.new_key()
    record = KeyRecord(id=made.id, hash=made.hash, tenant="acme")
    await store.add(record)
    while not await ask(made.text, record):
        pass
    await key_changes.change(store, record.id, lambda one: key_changes.revoked(one, time.time()))
    began = time.perf_counter()
    while await ask(made.text, record):
        pass
    return (time.perf_counter() - began) * 1e3


def _is_let_in(port: int, key: str) -> bool:
    body = b'{"model": "m", "prompt": [1], "max_tokens": 1}'
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
    try:
        with urllib.request.urlopen(asked, timeout=30):
            return True
    except urllib.error.HTTPError as error:
        if error.code != 401:
            raise
        return False


async def digests(options: argparse.Namespace) -> None:
    names = [f"w{number}" for number in range(options.workers)]
    fleet, picture, now = fleet_of(*map(card, names)), FleetPicture(), 0.0
    made, decoder = FleetDigests(fleet, "life"), codec.Decoder(messages.FleetDigest)
    sending, taking, sizes = [], [], []
    for number in range(options.rounds + 1):
        now += 1.0
        for name in names:
            load = messages.Load(running=1 + number % 8, generated_tokens=50 * number)
            fleet.apply_events("demo", events(name, seq=number + 1, load=load), now)
        began = time.process_time_ns()
        made.update(fleet.router_view("r1", 0, now), [], now)
        sent = (made.changes if number else made.whole)(_MAX_BYTES, codec.Encoding.MSGPACK)
        ended = time.process_time_ns()
        for payload in sent:
            picture.apply(decoder.decode(payload, codec.Encoding.MSGPACK), now)
        sending.append((ended - began) / 1e6)
        taking.append((time.process_time_ns() - ended) / 1e6)
        sizes.append(sum(map(len, sent)) / 1e3)
    assert len(picture.workers()) == options.workers
    size = statistics.median(sizes[1:])
    print(f"{options.workers} workers, all changed: {quartiles(sending[1:])} ms to make a digest of {size:.0f} kB, ")
    print(f"  {quartiles(taking[1:])} ms to read it")


COMMANDS = {one.__name__: one for one in (usage, audit, revoke, digests)}


def main() -> None:
    parser = flags.parser(__doc__, keys=1_000, rounds=31, revocations=100, workers=2_000)
    parser.add_argument("what", choices=sorted(COMMANDS))
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    asyncio.run(COMMANDS[options.what](options))


if __name__ == "__main__":
    main()
