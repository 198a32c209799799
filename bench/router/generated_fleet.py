"""Router and broker beside a large fleet without requests, compared with another checkout.

Run: .venv/bin/python -m bench.router.generated_fleet ../other [--workers 2000] [--per-process 8] [--pairs 7] [--same]

Each pair measures the other checkout's router with generated workers as they were (two connections and five entries a
second for each), then this one's with processes (two connections and one beat for each). With `--same`, both have such
processes. The other checkout needs its own environment (`make .venv/.ready` there)."""

import argparse
import asyncio
import statistics
from pathlib import Path

from bench import flags
from bench.checkouts import HERE
from bench.paired import quartiles
from bench.router import generated_workers
from bench.router.generated_workers import Cores, Style


async def _cores(checkout: Path, options: argparse.Namespace, per_process: int, style: Style) -> Cores:
    """Returns the cores that router and broker use."""
    fleet = generated_workers.processes(options.workers, per_process, style)
    async with generated_workers.beside(fleet, options.workers, checkout) as one:
        cores = await one.cores(options.seconds)
        if one.num_lost:
            print(f"  the router lost {one.num_lost} workers")
        return cores


async def measure(options: argparse.Namespace) -> None:
    seen: list[tuple[Cores, Cores]] = []
    before = (options.per_process, Style()) if options.same else (1, Style(beats=False))
    for _ in range(options.pairs):
        theirs = await _cores(options.other.resolve(), options, *before)
        seen.append((theirs, await _cores(HERE, options, options.per_process, Style())))
        print("  router and broker, other and this checkout: ", [[round(one, 3) for one in side] for side in seen[-1]])
    print(f"{options.workers} workers, {options.per_process} of a process, no requests: cores")
    for at, name in enumerate(Cores._fields):
        theirs_median, ours_median = (statistics.median(pair[side][at] for pair in seen) for side in (0, 1))
        ratio = quartiles([second[at] / first[at] for first, second in seen])
        print(f"  {name:<8} {theirs_median:.3f} {ours_median:.3f}   ratio {ratio}")


def main() -> None:
    parser = flags.parser(__doc__, workers=2_000, per_process=8, pairs=7, seconds=10)
    parser.add_argument("other", type=Path)
    parser.add_argument("--same", action="store_true", help="give the other checkout's router the same workers")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
