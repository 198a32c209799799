"""`python -m tests.chaos run` plays rounds of faults under load; `report` writes docs/chaos.md from their results.

Results are kept in build/chaos.jsonl: a run continues where the last one stopped, and results add up."""

import argparse
import asyncio
import contextlib
import logging
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import structlog

from tests.chaos import plans, report, results
from tests.chaos.results import Record
from tests.chaos.round import broken_promises, play, setup_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build/chaos.jsonl"
PAGE = ROOT / "docs/chaos.md"


def main() -> int:
    options = _parse()
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
    seeds = list(options.seeds)
    while time.monotonic() < ends_at and num_played != options.runs and not (options.seeds and not seeds):
        kind, seed = results.next_round(results.read(options.results), options.kinds)
        seed = seeds.pop(0) if seeds else seed
        record = await _play(kind, seed, options.faults, options.results)
        broken = broken_promises(record)
        is_right = is_right and not broken
        num_played += 1
        print(_line(record, broken), flush=True)
    return 0 if is_right else 1


async def _play(kind: str, seed: int, count: int | None, path: Path) -> Record:
    """Plays a round and keeps its record, and also its logs if a promise was broken."""
    with tempfile.TemporaryDirectory(prefix="tokenbus-chaos-") as folder:
        record = await play(kind, seed, setup_of(kind, seed), plans.faults(kind, seed, count), Path(folder))
        results.append(path, record)
        if broken_promises(record):
            kept = path.parent / f"{path.stem}-{kind}-{seed}"
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
        f"{record.kind} {record.seed} ({record.engine}): {record.faults} faults in {record.duration_s:.0f} s; "
        f"{ends.streams} streams, {ends.well} well{errors}; gap p50 {gap} ms"
        + "".join(f"\n  BROKEN: {one}" for one in broken)
        + "".join(f"\n  {note}" for note in record.notes[:5])
    )


def _parse() -> argparse.Namespace:
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
    commands.add_parser("report", help="write docs/chaos.md")
    return parser.parse_args()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
