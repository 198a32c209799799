"""Compares placement policies on all generated workloads, at several speeds, and prints the tables of docs/routing.md.

Run: .venv/bin/python -m bench.router.workloads [TRACE ...] [--speeds 1 4 6] [--jobs 2] [--json FILE]

Like `tokenbus replay`, it replays each workload, and each file given, in virtual time, on 8 workers of 3,000 blocks of
512 tokens with the timing model `dynamo`. The results depend on nothing but the workloads and the code. The policy `kv`
is compared with round robin, with the fewest requests, and with the cost function of NVIDIA Dynamo's router: at its
default weight, and at the one of several that has the lowest mean time to the first token in that very case."""

import argparse
import concurrent.futures
import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from tokenbus.protocol.wire import codec
from tokenbus.replay import generators
from tokenbus.replay.offline import play
from tokenbus.replay.results import PolicyResult
from tokenbus.replay.settings import ReplaySettings
from tokenbus.router.placement.policies import Policy, View
from tokenbus.router.placement.worker_table import Floats

SPEEDS = (1.0, 4.0, 6.0)
WEIGHTS = (1.0, 4.0, 8.0, 16.0)
_DEFAULT_WEIGHT = 1.0
_NAMES = ("kv", "round_robin", "least_loaded")


class DynamoCost:
    """The cost function of NVIDIA Dynamo's router: blocks to be computed, times a weight, plus blocks in use."""

    def __init__(self, weight: float = _DEFAULT_WEIGHT) -> None:
        self.name = f"dynamo-{weight:g}"
        self._weight = weight

    def costs(self, view: View) -> Floats:
        to_compute = view.prefill_tokens + view.prompt_tokens - view.overlap_tokens
        costs: Floats = self._weight * to_compute / view.block_size + view.used_blocks
        return costs


class Case(NamedTuple):
    """One workload, or trace file, at one speed."""

    trace: str
    speed: float


Results = dict[Case, dict[str, PolicyResult]]
"""The results of each case by the names of the policies."""


def compare(cases: list[Case], base: ReplaySettings, jobs: int) -> Results:
    """Replays each case under each policy, `jobs` at a time."""
    policies: list[str | Policy] = [*_NAMES, *[DynamoCost(weight) for weight in WEIGHTS]]
    plays = [
        (case, codec.replace(base, trace=case.trace, speedup=case.speed), policy)
        for case in cases
        for policy in policies
    ]
    found: Results = {case: {} for case in cases}
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        runs = pool.map(play, [settings for _, settings, _ in plays], [policy for _, _, policy in plays])
        for (case, _, _), run in zip(plays, runs, strict=True):
            found[case][run.policy] = run
    return found


def ratios(runs: dict[str, PolicyResult]) -> tuple[float, float]:
    """Returns the mean time to the first token and the 99th percentile of the gaps under `kv`, both compared with the
    other policy that has the lowest mean time to the first token."""
    kv, best = runs["kv"], min((run for name, run in runs.items() if name != "kv"), key=lambda run: run.ttft_ms.mean)
    return kv.ttft_ms.mean / best.ttft_ms.mean, kv.itl_ms.p99 / best.itl_ms.p99


def tables(found: Results) -> str:
    """Returns two tables in Markdown: times to the first token, and gaps between tokens."""
    return "\n\n".join([_first_tokens(found), _gaps(found)])


def _best_dynamo(runs: dict[str, PolicyResult]) -> PolicyResult:
    return min((run for name, run in runs.items() if name.startswith("dynamo")), key=lambda run: run.ttft_ms.mean)


def _columns(runs: dict[str, PolicyResult]) -> list[PolicyResult]:
    return [*(runs[name] for name in _NAMES), runs[DynamoCost().name], _best_dynamo(runs)]


def _first_tokens(found: Results) -> str:
    lines = ["| workload | speed | hit rate | kv | round robin | least loaded | Dynamo | best weight | kv / best |"]
    lines.append("|---" * 9 + "|")
    for case, runs in found.items():
        columns = _columns(runs)
        times = " | ".join(f"{run.ttft_ms.mean:.1f} / {run.ttft_ms.p50:.1f}" for run in columns)
        weight = columns[-1].policy.removeprefix("dynamo-")
        head = f"| {Path(case.trace).name} | {case.speed:g} | {runs['kv'].hit_rate:.3f}"
        lines.append(f"{head} | {times} ({weight}) | {ratios(runs)[0]:.2f} |")
    return "\n".join(lines)


def _gaps(found: Results) -> str:
    lines = ["| workload | speed | kv | round robin | least loaded | Dynamo | best weight | kv / best |"]
    lines.append("|---" * 8 + "|")
    for case, runs in found.items():
        times = " | ".join(f"{run.itl_ms.mean:.1f} / {run.itl_ms.p99:.1f}" for run in _columns(runs))
        lines.append(f"| {Path(case.trace).name} | {case.speed:g} | {times} | {ratios(runs)[1]:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", metavar="TRACE", nargs="*", help="files or workloads; by default all workloads")
    parser.add_argument("--speeds", type=float, nargs="+", default=SPEEDS)
    parser.add_argument("--kv-blocks", type=int, default=ReplaySettings(trace="").kv_blocks)
    parser.add_argument("--timing", default=ReplaySettings(trace="").timing)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results")
    options = parser.parse_args()
    cases = [Case(trace, speed) for trace in options.traces or generators.DEFAULTS for speed in options.speeds]
    base = ReplaySettings(trace="", kv_blocks=options.kv_blocks, timing=options.timing, seed=options.seed)
    found = compare(cases, base, options.jobs)
    if options.json:
        named = {f"{case.trace} {case.speed:g}": runs for case, runs in found.items()}
        options.json.write_bytes(msgspec.json.encode(named))
    print(tables(found))


if __name__ == "__main__":
    main()
