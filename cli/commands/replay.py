"""`tokenbus replay`: replays a trace on a simulated fleet and compares policies by table, JSON and plots."""

import argparse
import asyncio
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec
from rich.console import Console
from rich.table import Table

from tokenbus.cli.console import nats_server
from tokenbus.cli.console.arguments import NAMES, PATH, SWITCH, one_of, real, several, whole
from tokenbus.cli.console.flags import Parser
from tokenbus.cli.console.replay_live import LiveError, run_live
from tokenbus.cli.console.session import EXIT_INTERRUPTED, print_error
from tokenbus.cli.console.supervisor import StartError
from tokenbus.protocol import extras
from tokenbus.protocol.process.parent import end_with
from tokenbus.replay.offline import load_requests, play_all
from tokenbus.replay.results import PolicyResult, TimeStats
from tokenbus.replay.settings import ReplaySettings
from tokenbus.replay.svg import Axis, Series, bar_chart, document
from tokenbus.router.placement.policies import POLICIES, make_policies
from tokenbus.worker.engine.sim.runner import PRESETS

_DEFAULTS = ReplaySettings(trace="")
_WIDTH = 110
_SMALL_MS = 100.0
"""Times below this are printed with one decimal."""
_STATISTICS = ("mean", "p50", "p90", "p99")


def add_flags(parser: Parser) -> None:
    trace = "a file in Mooncake's format, gzipped or not, or a workload (docs/routing.md)"
    parser.add_argument("trace", metavar="TRACE", help=trace)
    flag = parser.group("comparison", _DEFAULTS)
    flag("--policy", NAMES, "policies to compare, with commas between them", POLICIES[:3])
    flag("--seed", whole(0), "seed for workloads and ties")
    flag("--jobs", whole(1, 1_024), "policies to replay at the same time", os.cpu_count() or 1, unset="all cores")
    flag("--live", SWITCH, "use simulated workers behind a real router and broker, in real time")
    flag("--sim-speedup", real(0.01, 1e3), "with --live: speed-up over real time", 1.0)
    flag("--json", PATH, "write the results; the same seed gives the same file")
    flag("--html", PATH, "write plots")
    flag = parser.group("requests", _DEFAULTS)
    flag("--speedup", real(1e-3, 1e6), "how many times faster requests arrive")
    flag("--max-requests", whole(0, 1_000_000), "requests to take from the trace; 0: all")
    flag = parser.group("fleet", _DEFAULTS)
    flag("--workers", whole(1, 4_096), "number of workers")
    flag("--prefill-workers", whole(0, 4_095), "how many of these compute prompts for the others")
    flag("--routers", whole(1, 64), "routers that share the requests")
    flag("--temperature", real(0, 100), "above 0, sometimes choose a costlier worker")
    flag("--delay-ms", real(0, 10_000, "MS"), "delay of workers' events")
    flag("--kv-blocks", whole(1, 1 << 22), "KV blocks per worker")
    flag("--block-size", whole(1, 1 << 16), "tokens per KV block")
    flag("--kv-token-bytes", whole(0, 1 << 30), "KV bytes per token; 0: workers fetch nothing from each other")
    flag("--transfer-mb-per-s", real(0.001, 1e6), "speed of fetching")
    flag = parser.group("workers", _DEFAULTS)
    flag("--timing", one_of(*PRESETS), "model of step times")
    speeds = several(real(0.001, 1_000), at_most=4_096)
    flag("--speeds", speeds, "workers' speeds, repeated in turn, e.g. 1,1,0.5")
    flag("--max-num-seqs", whole(1, 4_096), "sequences per worker")
    flag("--max-num-batched-tokens", whole(2, 1 << 20), "tokens per step")
    flag("--step-target-ms", real(0, 60_000, "MS"), "limit prompts in a step by time; 0: by tokens only")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Replays the trace, prints a table and writes the requested files; returns the exit status. Raises ValueError."""
    if options.live:
        extras.require("up", "replay --live")
    try:
        settings, policies = _settings_of(options), _policies_of(options)
        trace = load_requests(settings)
        print(f"{len(trace):,} requests, {settings.workers} workers, {', '.join(policies)}", file=sys.stderr)
        if options.live:
            runs = [asyncio.run(run_live(settings, policy, trace, options.sim_speedup)) for policy in policies]
        else:
            runs = _play_all(settings, policies, options.jobs)
        if options.json:
            options.json.write_bytes(_as_json(settings, runs))
        if options.html:
            options.html.write_text(_page(settings, runs), encoding="utf-8")
    except (LiveError, nats_server.NatsServerError, StartError) as error:
        return print_error(str(error))
    except (asyncio.CancelledError, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    Console(width=max(_WIDTH, Console().width)).print(_table(runs))
    return 0


def _play_all(settings: ReplaySettings, policies: Sequence[str], jobs: int) -> list[PolicyResult]:
    """Replays in several processes. Ctrl-C ends them and raises KeyboardInterrupt; a second Ctrl-C kills them."""
    num_signals = 0

    def count(number: int, frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals > 1:  # the pool is already being ended, and would print a traceback if interrupted
            for process in multiprocessing.active_children():
                process.kill()
            os._exit(EXIT_INTERRUPTED)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, count)
    try:
        return play_all(settings, policies, jobs, partial(end_with, os.getpid()))
    finally:
        signal.signal(signal.SIGINT, before)


def _name(settings: ReplaySettings) -> str:
    return Path(settings.trace).name


def _policies_of(options: argparse.Namespace) -> list[str]:
    """Returns the policies to compare. Raises ValueError."""
    known = make_policies()
    for name in options.policy:
        if name not in known:
            raise ValueError(f"--policy: there is no {name!r}, only {', '.join(known)}")
    return list(options.policy)


def _settings_of(options: argparse.Namespace) -> ReplaySettings:
    """Returns the settings that parsed flags describe. Raises ValueError."""
    if options.prefill_workers >= options.workers:
        raise ValueError("--prefill-workers must be less than --workers")
    if options.prefill_workers and not options.kv_token_bytes:
        raise ValueError("--prefill-workers needs --kv-token-bytes: the others fetch what these compute")
    if options.live and (options.routers > 1 or options.speeds != (1.0,) or options.kv_token_bytes):
        raise ValueError(
            "--live runs one router and workers of one speed that fetch no blocks: leave out --routers, --speeds "
            "and --kv-token-bytes"
        )
    if not options.max_num_seqs < options.max_num_batched_tokens <= 1 << 20:
        raise ValueError("--max-num-batched-tokens must be above --max-num-seqs, and at most 1,048,576")
    return ReplaySettings(**{name: getattr(options, name) for name in ReplaySettings.__struct_fields__})


def _as_json(settings: ReplaySettings, runs: Sequence[PolicyResult]) -> bytes:
    """Returns the settings and results as JSON; the same seed gives the same bytes on any machine."""
    content = {"settings": msgspec.structs.asdict(settings) | {"trace": _name(settings)}, "runs": runs}
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


def _table(runs: Sequence[PolicyResult]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("policy", no_wrap=True)
    heads = (
        "hit rate",
        "fetched",
        "remote prefills",
        "TTFT ms mean",
        "p50",
        "p99",
        "gap ms mean",
        "p99",
        "queue p99",
        "tokens/s",
        "busiest",
    )
    for head in heads:
        table.add_column(head, justify="right")
    for run in runs:
        table.add_row(
            run.policy,
            f"{run.hit_rate:.3f}",
            f"{run.fetched_rate:.3f}",
            f"{run.remote_prefill_rate:.3f}",
            *_cells(run.ttft_ms, "mean", "p50", "p99"),
            *_cells(run.itl_ms, "mean", "p99"),
            *_cells(run.queue_ms, "p99"),
            f"{run.output_tokens_per_s:,.0f}",
            f"{run.busiest_share:.1%}",
        )
    return table


def _cells(spread: TimeStats, *names: str) -> list[str]:
    return [f"{getattr(spread, name):,.{1 if spread.mean < _SMALL_MS else 0}f}" for name in names]


def _page(settings: ReplaySettings, runs: Sequence[PolicyResult]) -> str:
    """Returns an HTML page with plots that compare the policies."""
    summary = f"{settings.workers} workers of {settings.kv_blocks:,} blocks of {settings.block_size} tokens, "
    summary += f"speed {settings.speedup:g}, timing {settings.timing}, seed {settings.seed}"
    policies = [run.policy for run in runs]
    rates = [
        Series("real", [(place, run.hit_rate) for place, run in enumerate(runs)]),
        Series("expected by the router", [(place, run.predicted_rate) for place, run in enumerate(runs)]),
    ]
    plots = [
        bar_chart("Prompt tokens that were cached", policies, rates, Axis("share")),
        _times("Time to first token", runs, lambda run: run.ttft_ms),
        _times("From token to token", runs, lambda run: run.itl_ms),
        _times("Whole requests", runs, lambda run: run.e2e_ms),
        _shares(runs),
    ]
    return document(f"Replay of {_name(settings)}", [f"<p>{summary}</p>", '<div class="plots">', *plots, "</div>"])


def _times(title: str, runs: Sequence[PolicyResult], of: Callable[[PolicyResult], TimeStats]) -> str:
    series = [
        Series(run.policy, [(place, getattr(of(run), part)) for place, part in enumerate(_STATISTICS)]) for run in runs
    ]
    return bar_chart(title, _STATISTICS, series, Axis("ms", is_log=True))


def _shares(runs: Sequence[PolicyResult]) -> str:
    """Plots the requests of each worker, the busiest first."""
    most = min(32, len(runs[0].requests_per_worker))
    series = [
        Series(run.policy, list(enumerate(map(float, sorted(run.requests_per_worker, reverse=True)[:most]))))
        for run in runs
    ]
    return bar_chart("Requests by worker", [str(1 + place) for place in range(most)], series, Axis("requests"))
