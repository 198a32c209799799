"""Compares placement policies on a trace at several speeds, and draws the plots of docs/routing.md.

Run: .venv/bin/python -m bench.router.placement TRACE [--speeds 1 4 6] [--policies kv round_robin] [--plots docs/plots]

Like `tokenbus replay`, it replays the trace in virtual time, on 8 workers of 3,000 blocks of 512 tokens with the timing
model `dynamo`. The results depend on nothing but the trace and the code."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from tokenbus.replay.offline import play_all
from tokenbus.replay.results import PolicyResult
from tokenbus.replay.settings import ReplaySettings
from tokenbus.replay.svg import Axis, Series, bar_chart

_COLOUR = "#6e7781"
"""The colour of text, legible on white and on black."""
Runs = dict[float, list[PolicyResult]]


def measure(trace: str, speeds: list[float], policies: list[str]) -> Runs:
    found: Runs = {}
    for speed in speeds:
        found[speed] = play_all(ReplaySettings(trace=trace, speedup=speed), policies, os.cpu_count() or 1)
        for run in found[speed]:
            first, gap = run.ttft_ms, run.itl_ms
            print(f"x{speed:<4g}{run.policy:14}hit rate {run.hit_rate:.3f}, gap mean {gap.mean:.1f} ms, ", end="")
            print(f"first token mean {first.mean:,.0f} p50 {first.p50:,.0f} p99 {first.p99:,.0f} ms", flush=True)
    return found


def draw(found: Runs, folder: Path) -> None:
    """Writes one plot for each metric."""
    folder.mkdir(parents=True, exist_ok=True)
    plots: dict[str, tuple[str, Axis, Callable[[PolicyResult], float]]] = {
        "hit-rate": ("Prompt tokens that were cached", Axis("share"), lambda run: run.hit_rate),
        "first-token": ("Time to first token, mean", Axis("ms"), lambda run: run.ttft_ms.mean),
        "gap": ("From token to token, mean", Axis("ms"), lambda run: run.itl_ms.mean),
    }
    speeds = [f"{speed:g} times its speed" for speed in found]
    for name, (title, axis, of) in plots.items():
        series = [
            Series(runs[0].policy, [(place, of(run)) for place, run in enumerate(runs)])
            for runs in zip(*found.values(), strict=True)
        ]
        write_chart(folder / f"{name}.svg", title, speeds, series, axis)


def write_chart(path: Path, title: str, labels: list[str], series: list[Series], axis: Axis) -> None:
    """Writes a bar chart that can be read on white and on black."""
    text = bar_chart(title, labels, series, axis).replace("currentColor", _COLOUR)
    path.write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trace", metavar="TRACE")
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.0, 4.0, 6.0])
    parser.add_argument("--policies", nargs="+", default=["kv", "least_loaded", "round_robin"])
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write the plots there")
    options = parser.parse_args()
    found = measure(options.trace, options.speeds, options.policies)
    if options.plots:
        draw(found, options.plots)


if __name__ == "__main__":
    main()
