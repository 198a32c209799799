"""`python -m tests.chaos run` plays rounds of faults under load; `report` writes docs/chaos.md from their results.

Each round's result is kept in build/chaos.jsonl as soon as it ends: a run continues where the last one stopped, and
results of rounds of the same kind and size add up."""

import argparse
import asyncio
import contextlib
import logging
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from tests.chaos import plans, report, results
from tests.chaos.results import Record
from tests.chaos.round import Setup, broken_promises, play, setup_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build/chaos.jsonl"
PAGE = ROOT / "docs/chaos.md"
SIZES = {
    "engine": "--engine",
    "num_workers": "--workers",
    "num_ready": "--ready",
    "num_tokens": "--tokens",
    "load_s": "--load-s",
    "num_http": "--http",
}
"""The flags that change a round's size, by field of its setup."""


def main() -> int:
    options = parse()
    if options.command == "report":
        return write_report(options.results)
    try:
        return asyncio.run(run(options))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted: the round in progress does not count", file=sys.stderr)
        return 130


async def run(options: argparse.Namespace) -> int:
    """Plays rounds until the time is over or enough were played; returns 1 if a promise was broken."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    ends_at, num_played, is_right = time.monotonic() + 60 * options.minutes, 0, True
    seeds, sizes = list(options.seeds), sizes_of(options)
    while time.monotonic() < ends_at and num_played != options.runs and not (options.seeds and not seeds):
        kind, seed = results.next_round(results.read(options.results), options.kinds, said(sizes))
        seed = seeds.pop(0) if seeds else seed
        record = await _play(kind, seed, sizes, options.faults, options.results)
        broken = broken_promises(record)
        is_right = is_right and not broken
        num_played += 1
        print(_line(record, broken), flush=True)
    played = [one for one in results.read(options.results) if one.kind in options.kinds and one.sizes == said(sizes)]
    print("\n".join(report.summary(played)))
    return 0 if is_right else 1


def sizes_of(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of a round's setup that flags have given."""
    return {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}


def said(sizes: Mapping[str, Any]) -> str:
    """Returns these sizes as flags."""
    return " ".join(
        f"{SIZES[name]} {value:g}" if name != "engine" else f"--engine {value}" for name, value in sizes.items()
    )


async def _play(kind: str, seed: int, sizes: Mapping[str, Any], count: int | None, path: Path) -> Record:
    """Plays a round and keeps its record, and also its logs if a promise was broken."""
    with tempfile.TemporaryDirectory(prefix="tokenbus-chaos-") as folder:
        setup = setup_of(kind, seed, **sizes)
        record = await play(kind, seed, setup, plans.faults(kind, seed, count), Path(folder), said(sizes))
        results.append(path, record)
        if broken_promises(record):
            kept = path.parent / f"{path.stem}-{record.title.replace(' --', '-').replace(' ', '-')}-{seed}"
            shutil.copytree(folder, kept, dirs_exist_ok=True)
    return record


def write_report(path: Path) -> int:
    records = results.read(path)
    if not records:
        print(f"{path} has no results: make chaos", file=sys.stderr)
        return 1
    page = report.render(records)
    PAGE.write_text(page)
    print(page)
    return 0


def _line(record: Record, broken: list[str]) -> str:
    ends = sum(record.ends.values(), results.Ends())
    errors = "".join(f", {count} {code}" for code, count in ends.errors.items())
    gap = results.percentile(record.gaps_ms, 0.5)
    return (
        f"{record.title} {record.seed} ({record.engine}): {record.faults} faults in {record.duration_s:.0f} s; "
        f"{ends.streams} streams, {ends.well} well{errors}; gap p50 {gap} ms"
        + "".join(f"\n  BROKEN: {one}" for one in broken)
        + "".join(f"\n  {note}" for note in record.notes[:5])
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the results (build/chaos.jsonl)")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="play rounds")
    kinds = list(plans.KINDS)
    one.add_argument("--kind", dest="kinds", nargs="+", choices=kinds, default=kinds, help="only these kinds")
    one.add_argument("--runs", type=int, default=-1, help="rounds to play (no limit)")
    one.add_argument("--faults", type=int, help="faults of each round (each kind has its own number)")
    one.add_argument("--minutes", type=float, default=60.0, help="time after which no round is begun (60)")
    one.add_argument("--seeds", type=int, nargs="*", default=[], help="these seeds (those without a result)")
    one.add_argument("--engine", choices=plans.ENGINES, help="the engine of all rounds (each seed has its own)")
    for name, unit, text in (
        ("num_workers", int, "workers (3, with the demo model 2; of kill_while_loading 5)"),
        ("num_ready", int, "workers that are ready before the next fault, while others load (all; of that kind 2)"),
        ("num_tokens", int, "tokens of the longest streams, 25 ms each in simulated workers (each kind has its own)"),
        ("load_s", float, "time that simulated workers load which are started later (10; of kill_while_loading 60)"),
        ("num_http", int, "streams over HTTP beside the others, from two gateways, which a roll replaces too (0)"),
    ):
        one.add_argument(SIZES[name], dest=name, type=unit, help=text)
    commands.add_parser("report", help="write docs/chaos.md")
    options = parser.parse_args(arguments)
    if options.command == "run":
        if options.engine == "demo" and options.load_s is not None:
            one.error("--load-s is for simulated workers: the demo model loads as fast as it can")
        try:
            for kind in options.kinds:
                check(setup_of(kind, 0, **sizes_of(options)))
        except ValueError as error:
            one.error(str(error))
    return options


def check(setup: Setup) -> None:
    """Raises ValueError if a system can't have these sizes."""
    limits = {
        "num_workers": (2, 100),
        "num_ready": (1, setup.num_workers),
        "num_tokens": (100, 10_000),
        "load_s": (0, 600),
        "num_http": (0, 100),
    }
    for name, (least, most) in limits.items():
        value = getattr(setup, name)
        if value is not None and not least <= value <= most:
            raise ValueError(f"{SIZES[name]} must be from {least:,} to {most:,}, got {value:g}")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
