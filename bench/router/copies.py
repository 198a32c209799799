"""Starts three brokers of a cluster, a router and a gateway in any order, and counts the copies of each bucket.

Run: .venv/bin/python -m bench.router.copies [--runs 20] [--within-s 30]

Each run starts all five within a few seconds, in a random order, and makes an API key as soon as that can be done. From
the start of the last broker on it waits until every bucket that was made has three copies; one that has fewer after
`--within-s` must be told of by the metric that the alert is about."""

import argparse
import asyncio
import contextlib
import random
import re
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bench import flags, system
from tests.support.cluster import Cluster
from tests.support.ports import free_ports
from tokenbus.protocol.access import keys
from tokenbus.protocol.access.audit_log import AuditLog
from tokenbus.protocol.access.key_source import BUCKET, KeySettings
from tokenbus.protocol.access.key_stores import KeyStoreError
from tokenbus.protocol.access.keys import KeyRecord
from tokenbus.protocol.bus.bucket import NUM_COPIES, Bucket, BucketError, StreamContents, bucket_name
from tokenbus.protocol.bus.connection import BusSettings, Connection, connect

_PREFIX = "tokenbus.v1"
_NAMES = ("keys", "quota", "usage", "responses")
_SPREAD_S = 6.0
"""All starts are within this time."""


async def _counts(connection: Connection) -> dict[str, int]:
    """Returns the number of copies of each bucket that there is."""
    buckets: list[StreamContents] = [Bucket(connection, bucket_name(_PREFIX, name)) for name in _NAMES]
    found = {}
    for bucket in (*buckets, AuditLog(connection, _PREFIX)):
        with contextlib.suppress(BucketError):
            found[bucket.name.removeprefix(bucket_name(_PREFIX, ""))] = (await bucket.copies()).num
    return found


async def _make_key(connection: Connection) -> None:
    store, new = KeySettings(BUCKET).store(connection, _PREFIX), keys.new_key()
    while True:
        try:
            await store.create()
            await store.add(KeyRecord(id=new.id, hash=new.hash, tenant="acme", created_at=time.time()))
            return
        except KeyStoreError:
            await asyncio.sleep(0.2)


def _told(ports: list[int]) -> set[str]:
    """Returns the buckets of which the processes tell that copies are missing."""
    found = set()
    for port in ports:
        with contextlib.suppress(OSError):
            page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
            found |= set(re.findall(r'bucket_copies_missing\{bucket="tokenbus_v1_(\w+)"\} [123]', page))
    return found


@contextlib.contextmanager
def _ended(processes: list["subprocess.Popen[bytes]"]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=60)


async def _run(rng: random.Random, within_s: float) -> tuple[float | None, dict[str, int], set[str]]:
    """Returns the seconds until all copies were there, None if they never were; the last counts; and what was told."""
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="tokenbus-bench-") as name:
        cluster = Cluster(Path(name), keeps=True)
        cluster.configure()
        ports = dict(zip("abc", free_ports(3), strict=True))
        router_page, gateway_page, gateway = free_ports(3)
        url = ",".join(f"nats://127.0.0.1:{port}" for port in ports.values())
        shared = ("--nats", url, "--keys", "bucket", "--audit")
        commands = {
            "router": ("router", *shared, "--usage", "--metrics-port", str(router_page)),
            "gateway": ("gateway", *shared, "--port", str(gateway), "--metrics-port", str(gateway_page)),
        }
        order = rng.sample([*"abc", *commands], 5)
        print("  " + " ".join(order), end=": ", flush=True)
        with _ended(processes), contextlib.ExitStack() as stack:
            stack.callback(cluster.stop)
            for one in order:
                if one in commands:
                    processes.append(system.start(Path(name) / f"{one}.log", *commands[one]))
                else:
                    await cluster.add(one, ports[one])
                await asyncio.sleep(rng.uniform(0.0, _SPREAD_S / 5))
            began = time.monotonic()
            connection = await connect(BusSettings(url=url), "bench")
            making = asyncio.create_task(_make_key(connection))
            took, counts = None, dict[str, int]()
            while took is None and time.monotonic() - began < within_s:
                await asyncio.sleep(0.25)
                counts = await _counts(connection)
                is_all_there = {"keys", "quota", "usage", "audit"} <= counts.keys()
                if is_all_there and set(counts.values()) == {NUM_COPIES}:
                    took = time.monotonic() - began
            making.cancel()
            told = await asyncio.to_thread(_told, [router_page, gateway_page])
            await connection.close()
    return took, counts, told


async def measure(options: argparse.Namespace) -> None:
    rng, seconds, made = random.Random(options.seed), list[float](), Counter[str]()
    silent = 0
    for _ in range(options.runs):
        took, counts, told = await _run(rng, options.within_s)
        print(f"{'never' if took is None else f'{took:.1f} s'}, copies {counts}, told of {sorted(told)}", flush=True)
        made.update(counts.keys())
        seconds += [] if took is None else [took]
        silent += bool({name for name, count in counts.items() if count < NUM_COPIES} - told)
    print(f"  three copies of all within {options.within_s} s: {len(seconds)} of {options.runs} runs", end=", ")
    print(f"median {statistics.median(seconds):.1f} s, at most {max(seconds):.1f} s" if seconds else "")
    print(f"  a bucket in fewer copies that nobody told of: {silent} runs; made: {dict(made)}")


def main() -> None:
    parser = flags.parser(__doc__, runs=20, within_s=30, seed=1)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
