"""The CPU time of a system without requests: of a worker process with many replicas, its broker and its router.

Run: .venv/bin/python -m bench.serving.idle ../other [--replicas 64] [--pairs 9] [--seconds 10]

Starts this checkout's system and the other's, which needs its own environment (`make .venv/.ready` there), and compares
what both use in the same windows of time."""

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator
from pathlib import Path

from bench import flags
from bench.checkouts import HERE
from bench.paired import quartiles
from bench.system import System, cards, started

_TIMINGS = Path("dynamo")
"""The simulator's, which make no difference to idle workers."""
_PARTS = ("frontend", "broker", "router")
_NANOSECONDS_PER_US = 1_000
_SETTLE_S = 5.0
"""Time in which replicas and routers get to know each other."""


def cpu_us(pid: int) -> float:
    """Returns the CPU time of a process and its threads so far, in µs."""
    used = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            used += int(path.read_text().split()[0])
    return used / _NANOSECONDS_PER_US


@contextlib.asynccontextmanager
async def idle_system(checkout: Path, replicas: int) -> AsyncIterator[System]:
    python = checkout / ".venv" / "bin" / "python"
    async with started(_TIMINGS, ("--engine", "sim", "--replicas", str(replicas)), python=python) as one:
        await cards(one.client, replicas)
        yield one


def usage(one: System) -> list[float]:
    return [cpu_us(pid) for pid in (one.worker_pids[0], one.broker_pid, one.router_pid)]


async def measure(other: Path, replicas: int, pairs: int, seconds: int) -> None:
    async with idle_system(other, replicas) as first, idle_system(HERE, replicas) as second:
        await asyncio.sleep(_SETTLE_S)
        seen: list[list[tuple[float, float]]] = [[] for _ in _PARTS]
        for _ in range(pairs):
            before = usage(first), usage(second)
            await asyncio.sleep(seconds)
            after = usage(first), usage(second)
            for at in range(len(_PARTS)):
                seen[at].append(((after[0][at] - before[0][at]) / seconds, (after[1][at] - before[1][at]) / seconds))
    print(f"{replicas} replicas of one process, µs of CPU a second, other and this checkout")
    for name, windows in zip(_PARTS, seen, strict=True):
        ours, theirs = statistics.median(b for _, b in windows), statistics.median(a for a, _ in windows)
        ratio = quartiles([b / a for a, b in windows])
        each = f", a worker {theirs / replicas:,.0f} and {ours / replicas:,.0f}" if name == "frontend" else ""
        print(f"  {name:<10} {theirs:10,.0f} {ours:10,.0f}   ratio {ratio}{each}")


def main() -> None:
    parser = flags.parser(__doc__, replicas=64, pairs=9, seconds=10)
    parser.add_argument("other", type=Path)
    args = parser.parse_args()
    asyncio.run(measure(args.other.resolve(), args.replicas, args.pairs, args.seconds))


if __name__ == "__main__":
    main()
