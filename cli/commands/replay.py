"""Plays the trace, prints the table, writes what was asked for."""

import argparse
import asyncio
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec
from rich.console import Console
from rich.table import Table

from tokenbus.cli import nats_server, parent_death
from tokenbus.cli.commands.generate import EXIT_INTERRUPTED, print_error
from tokenbus.cli.commands.replay_flags import policies_of, settings_of
from tokenbus.cli.commands.replay_page import page
from tokenbus.cli.replay_live import LiveError, run_live
from tokenbus.cli.supervisor import EXIT_BAD_SETTINGS, StartError
from tokenbus.replay.offline import ReplaySettings, load_requests, play_all
from tokenbus.replay.results import LatencyStats, PolicyResult

_WIDTH = 110
_SMALL_MS = 100.0


def run(options: argparse.Namespace) -> int:
    try:
        settings, policies = settings_of(options), policies_of(options)
        trace = load_requests(settings)
        print(f"{len(trace):,} requests, {settings.workers} workers, {', '.join(policies)}", file=sys.stderr)
        if options.live:
            runs = [asyncio.run(run_live(settings, policy, trace, options.sim_speedup)) for policy in policies]
        else:
            runs = _play_all(settings, policies, options.jobs)
        if options.json:
            options.json.write_bytes(as_json(settings, runs))
        if options.html:
            options.html.write_text(page(settings, runs, _name(settings)), encoding="utf-8")
    except (ValueError, OSError) as error:
        print_error(str(error))
        return EXIT_BAD_SETTINGS
    except (LiveError, nats_server.NatsServerError, StartError) as error:
        return print_error(str(error))
    except (asyncio.CancelledError, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    Console(width=max(_WIDTH, Console().width)).print(table(runs))
    return 0


def _play_all(settings: ReplaySettings, policies: Sequence[str], jobs: int) -> list[PolicyResult]:
    """Raises KeyboardInterrupt at Ctrl-C, when the processes that play have been ended. A second Ctrl-C kills them."""
    came = 0

    def count(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came += 1
        if came > 1:  # in the middle of ending the pool, whose own cleaning up would then fail with a traceback
            for process in multiprocessing.active_children():
                process.kill()
            os._exit(EXIT_INTERRUPTED)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, count)
    try:
        return play_all(settings, policies, jobs, partial(parent_death.end_with, os.getpid()))
    finally:
        signal.signal(signal.SIGINT, before)


def _name(settings: ReplaySettings) -> str:
    return Path(settings.trace).name


def as_json(settings: ReplaySettings, runs: Sequence[PolicyResult]) -> bytes:
    """The numbers, and what they are of; nothing in it depends on when or where it ran."""
    said = {"settings": msgspec.structs.asdict(settings) | {"trace": _name(settings)}, "runs": runs}
    return msgspec.json.format(msgspec.json.encode(said), indent=2) + b"\n"


def table(runs: Sequence[PolicyResult]) -> Table:
    made = Table(box=None, header_style="bold", pad_edge=False)
    made.add_column("policy", no_wrap=True)
    heads = ("hit rate", "TTFT ms mean", "p50", "p99", "gap ms mean", "p99", "queue p99", "tokens/s", "busiest")
    for head in heads:
        made.add_column(head, justify="right")
    for one in runs:
        made.add_row(
            one.policy,
            f"{one.hit_rate:.3f}",
            *_cells(one.ttft_ms, "mean", "p50", "p99"),
            *_cells(one.itl_ms, "mean", "p99"),
            *_cells(one.queue_ms, "p99"),
            f"{one.output_tokens_per_s:,.0f}",
            f"{one.busiest_share:.1%}",
        )
    return made


def _cells(spread: LatencyStats, *names: str) -> list[str]:
    return [f"{getattr(spread, name):,.{1 if spread.mean < _SMALL_MS else 0}f}" for name in names]
