"""Measures what clients' cancels cost the broker of a large fleet, and the broker's memory.

Run: .venv/bin/python -m bench.router.fleet [--workers 1000] [--rounds 7] [--seconds 5] [--cancels 20]

Workers are generated (`bench.router.generated_workers`). A round is some seconds without cancels and some with cancels
of unknown requests; the difference of the broker's CPU time is theirs."""

import argparse
import asyncio
import statistics

from nats.aio.client import Client as Nats

from bench import flags
from bench.paired import quartiles
from bench.router import generated_workers
from bench.router.generated_workers import MODEL, NAMES, Style
from bench.system import resident_mib


async def measure(options: argparse.Namespace) -> None:
    fleet = generated_workers.processes(options.workers, options.per_process, Style())
    async with generated_workers.beside(fleet, options.workers) as one:
        client = Nats()
        await client.connect(one.url)
        idle, extra, received = [], [], []
        for _ in range(options.rounds):
            idle.append((await one.cores(options.seconds)).broker)
            count = sum(process.received_bytes for process in fleet)
            cancelling = asyncio.create_task(_cancel(client, options.cancels))
            extra.append((await one.cores(options.seconds)).broker - idle[-1])
            cancelling.cancel()
            received.append(sum(process.received_bytes for process in fleet) - count)
        await client.close()
        more = quartiles(extra)
        print(
            f"{options.workers} workers, {options.per_process} of a process, each with "
            f"{len(generated_workers.subscriptions('w'))} subscriptions: broker "
            f"{resident_mib(one.broker_pid):.0f} MiB, {statistics.median(idle):.3f} of a core while idle; "
            f"{options.cancels} cancels a second cost it {more.median:.3f} more ({more.first_quartile:.3f} to "
            f"{more.third_quartile:.3f}), and the workers received "
            f"{statistics.median(received) / options.seconds / 1e3:.0f} KB/s",
            flush=True,
        )


async def _cancel(client: Nats, a_second: int) -> None:
    """Cancels requests that do not exist, until it is cancelled itself."""
    number = 0
    while True:
        await client.publish(NAMES.cancel(f"unknown-{number}", model=MODEL), b"")
        number += 1
        await asyncio.sleep(1 / a_second)


if __name__ == "__main__":
    parser = flags.parser(__doc__, workers=1_000, per_process=8, rounds=7, seconds=5, cancels=20)
    asyncio.run(measure(parser.parse_args()))
