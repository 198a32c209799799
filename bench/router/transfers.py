"""Compares fleets on a trace: workers that compute, that fetch blocks from each other, and with disaggregated prefill.

Run: .venv/bin/python -m bench.router.transfers TRACE [--plots docs/plots]

Like `tokenbus replay`, it replays the trace in virtual time, on 8 workers of 3,000 blocks of 512 tokens with the policy
`kv`. The results depend on nothing but the trace and the code."""

import argparse
import concurrent.futures
import os
from collections.abc import Callable
from pathlib import Path

from bench.router.placement import write_chart
from tokenbus.protocol.wire import codec
from tokenbus.replay.offline import play
from tokenbus.replay.results import PolicyResult
from tokenbus.replay.settings import ReplaySettings
from tokenbus.replay.svg import Axis, Series

_CPU = {"timing": "cpu-0.5b-q8_0", "speedup": 0.017, "kv_token_bytes": 12_300, "transfer_mb_per_s": 60.0}
_GPU = {"timing": "dynamo", "speedup": 4.0, "kv_token_bytes": 131_072}
FLEETS = {
    "0.5B on CPUs, 60 MB/s": _CPU,
    "8B on GPUs, 1 GB/s": _GPU | {"transfer_mb_per_s": 1_000.0},
    "8B on GPUs, 25 GB/s": _GPU | {"transfer_mb_per_s": 25_000.0},
}
WAYS: dict[str, dict[str, int]] = {"computes": {"kv_token_bytes": 0}, "fetches": {}}
APART = {"prompts apart (4 of 8)": {"prefill_workers": 4}}
"""For the first fleet only: replays of GPUs with half the workers for all streams take a quarter of an hour each."""


def measure(trace: str) -> dict[str, list[PolicyResult]]:
    """Returns the results of each fleet, one for each of `WAYS` and, for the first, of `APART`."""
    found: dict[str, list[PolicyResult]] = {}
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        for fleet, fields in FLEETS.items():
            base = codec.replace(ReplaySettings(trace=trace), **fields)
            ways = WAYS if found else WAYS | APART
            runs = pool.map(play, [codec.replace(base, **way) for way in ways.values()], ["kv"] * len(ways))
            found[fleet] = list(runs)
            for way, run in zip(ways, found[fleet], strict=True):
                first = run.ttft_ms
                print(f"{fleet:22} {way:22} hit rate {run.hit_rate:.3f}, fetched {run.fetched_rate:.3f}", end="")
                print(f", computed elsewhere {run.remote_prefill_rate:.3f}", end="")
                print(f", first token mean {first.mean:,.0f} p50 {first.p50:,.0f} ms", end="")
                print(f", gap mean {run.itl_ms.mean:.1f} p99 {run.itl_ms.p99:.1f} ms", flush=True)
    return found


def draw(found: dict[str, list[PolicyResult]], folder: Path) -> None:
    """Writes the plots of docs/routing.md: rates, and times compared with those of fleets that compute."""
    folder.mkdir(parents=True, exist_ok=True)
    plots: dict[str, tuple[str, Callable[[PolicyResult, PolicyResult], float]]] = {
        "transfers-hit-rate": ("Prompt tokens not computed where they are used", lambda run, _: run.hit_rate),
        "transfers-first-token": (
            "Time to first token, mean, compared with computing",
            lambda run, computes: run.ttft_ms.mean / computes.ttft_ms.mean,
        ),
        "transfers-gap": (
            "From token to token, p99, compared with computing",
            lambda run, computes: run.itl_ms.p99 / computes.itl_ms.p99,
        ),
    }
    for name, (title, of) in plots.items():
        series = [
            Series(
                way,
                [(place, of(runs[number], runs[0])) for place, runs in enumerate(found.values()) if number < len(runs)],
            )
            for number, way in enumerate((*WAYS, *APART))
        ]
        write_chart(folder / f"{name}.svg", title, list(found), series, Axis("share"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trace", metavar="TRACE")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write the plots there")
    options = parser.parse_args()
    found = measure(options.trace)
    if options.plots:
        draw(found, options.plots)


if __name__ == "__main__":
    main()
