"""Replays a trace with several placement policies, or on several fleets, and draws the plots of docs/routing.md.

Run: .venv/bin/python -m bench.router.placement TRACE [--fleets] [--plots docs/plots]

Like `tokenbus replay`, it replays the trace in virtual time, on 8 workers of 3,000 blocks of 512 tokens. The results
depend on nothing but the trace and the code. Policies are compared at several speeds with the timing model `dynamo`.
`--fleets` compares, with the policy `kv`, workers that compute, that fetch blocks from each other, and with
disaggregated prefill."""

import argparse
import concurrent.futures
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from tokenbus.protocol.wire import codec
from tokenbus.replay.offline import play
from tokenbus.replay.results import PolicyResult
from tokenbus.replay.settings import ReplaySettings
from tokenbus.replay.svg import Axis, Series, bar_chart

_COLOUR = "#6e7781"
"""The colour of text, legible on white and on black."""
_SPEEDS = (1.0, 4.0, 6.0)
_POLICIES = ("kv", "least_loaded", "round_robin")
_CPU = {"timing": "cpu-0.5b-q8_0", "speedup": 0.017, "kv_token_bytes": 12_300, "transfer_mb_per_s": 60.0}
_GPU = {"timing": "dynamo", "speedup": 4.0, "kv_token_bytes": 131_072}
_FLEETS = {
    "0.5B on CPUs, 60 MB/s": _CPU,
    "8B on GPUs, 1 GB/s": _GPU | {"transfer_mb_per_s": 1_000.0},
    "8B on GPUs, 25 GB/s": _GPU | {"transfer_mb_per_s": 25_000.0},
}
_WAYS: dict[str, dict[str, int]] = {"computes": {"kv_token_bytes": 0}, "fetches": {}}
_APART = {"prompts apart (4 of 8)": {"prefill_workers": 4}}
"""For the first fleet only: replays of GPUs with half the workers for all streams take a quarter of an hour each."""

Found = dict[str, dict[str, PolicyResult]]
"""For each speed or fleet, the result of each policy or way."""
Metric = Callable[[PolicyResult, PolicyResult], float]
"""A number of a result, given the first result of the same speed or fleet too."""
POLICY_PLOTS: dict[str, tuple[str, Axis, Metric]] = {
    "hit-rate": ("Prompt tokens that were cached", Axis("share"), lambda run, _: run.hit_rate),
    "first-token": ("Time to first token, mean", Axis("ms"), lambda run, _: run.ttft_ms.mean),
    "gap": ("From token to token, mean", Axis("ms"), lambda run, _: run.itl_ms.mean),
}
FLEET_PLOTS: dict[str, tuple[str, Axis, Metric]] = {
    "transfers-hit-rate": (
        "Prompt tokens not computed where they are used",
        Axis("share"),
        lambda run, _: run.hit_rate,
    ),
    "transfers-first-token": (
        "Time to first token, mean, compared with computing",
        Axis("share"),
        lambda run, computes: run.ttft_ms.mean / computes.ttft_ms.mean,
    ),
    "transfers-gap": (
        "From token to token, p99, compared with computing",
        Axis("share"),
        lambda run, computes: run.itl_ms.p99 / computes.itl_ms.p99,
    ),
}


def policies(trace: str) -> Found:
    base = ReplaySettings(trace=trace)
    return {
        f"{speed:g} times its speed": _replay({name: (codec.replace(base, speedup=speed), name) for name in _POLICIES})
        for speed in _SPEEDS
    }


def fleets(trace: str) -> Found:
    found: Found = {}
    for fleet, fields in _FLEETS.items():
        base = codec.replace(ReplaySettings(trace=trace), **fields)
        ways = _WAYS if found else _WAYS | _APART
        found[fleet] = _replay({way: (codec.replace(base, **more), "kv") for way, more in ways.items()})
    return found


def _replay(plays: Mapping[str, tuple[ReplaySettings, str]]) -> dict[str, PolicyResult]:
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(plays, pool.map(play, *zip(*plays.values(), strict=True)), strict=True))


def show(found: Found) -> None:
    for title, runs in found.items():
        for name, run in runs.items():
            first, gap = run.ttft_ms, run.itl_ms
            print(f"{title:24}{name:24}hit rate {run.hit_rate:.3f}, fetched {run.fetched_rate:.3f}", end="")
            print(f", computed elsewhere {run.remote_prefill_rate:.3f}", end="")
            print(f", first token mean {first.mean:,.0f} p50 {first.p50:,.0f} p99 {first.p99:,.0f} ms", end="")
            print(f", gap mean {gap.mean:.1f} p99 {gap.p99:.1f} ms", flush=True)


def draw(found: Found, plots: dict[str, tuple[str, Axis, Metric]], folder: Path) -> None:
    """Writes a bar chart for each metric that can be read on white and on black."""
    folder.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys(name for runs in found.values() for name in runs)
    for file_name, (title, axis, metric) in plots.items():
        series = [
            Series(
                name,
                [
                    (place, metric(runs[name], next(iter(runs.values()))))
                    for place, runs in enumerate(found.values())
                    if name in runs
                ],
            )
            for name in names
        ]
        chart = bar_chart(title, list(found), series, axis).replace("currentColor", _COLOUR)
        (folder / f"{file_name}.svg").write_text(chart + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", metavar="TRACE")
    parser.add_argument("--fleets", action="store_true", help="compare fleets instead of policies")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write the plots there")
    options = parser.parse_args()
    found = fleets(options.trace) if options.fleets else policies(options.trace)
    show(found)
    if options.plots:
        draw(found, FLEET_PLOTS if options.fleets else POLICY_PLOTS, options.plots)


if __name__ == "__main__":
    main()
