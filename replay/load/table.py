"""The tables that `tokenbus bench` prints: one for each run, one for the sweep, and a progress line."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from tokenbus.replay.load.histogram import LatencyStats
from tokenbus.replay.load.results import RunResult
from tokenbus.replay.load.stats import RunStats

ROWS = {
    "ttft_ms": "time to first token (TTFT)",
    "tpot_ms": "time per output token (TPOT)",
    "itl_ms": "inter-token latency (ITL)",
    "e2e_ms": "end to end",
    "accept_ms": "accepted by a worker",
    "queue_ms": "queued at the worker",
    "late_ms": "sent late by",
}
_MANY_WORKERS = 16
_LATE_MS = 20.0
"""A sender later than this spoils its own measurements."""


def run_table(run: RunResult) -> Table:
    """Returns a run's times: means and percentiles in milliseconds."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column("ms", no_wrap=True)
    for head in LatencyStats.__struct_fields__:
        made.add_column(head, justify="right", no_wrap=True)
    for name, title in ROWS.items():
        spread: LatencyStats = getattr(run, name)
        if name != "late_ms" or (spread.p99 or 0.0) >= 1.0:
            made.add_row(title, *(number(getattr(spread, field)) for field in LatencyStats.__struct_fields__))
    return made


def run_lines(run: RunResult) -> Iterator[str]:
    """Yields everything about a run that is not in its table."""
    yield (
        f"{run.finished} finished in {run.duration_s:,.1f} s: {number(run.requests_per_s)} requests/s, "
        f"{number(run.output_tokens_per_s)} output tokens/s, at most {run.peak_in_flight} in flight"
    )
    if run.cached_share is not None:
        yield f"prompts     {run.prompt_tokens:,} tokens, {run.cached_share:.1%} of them cached"
    if run.tokens_per_arrival is not None:
        yield f"arrivals    {number(run.tokens_per_arrival)} tokens each; ITL is the time between them"
    yield f"ended by    {_counts(run.finish_reasons) or 'nothing'}"
    if run.workers:
        yield f"workers     {_workers(run.workers)}"
    for code, count in run.errors.items():
        yield f"error       {code} {count}, for example: {run.error_examples[code]}"
    if run.not_sent:
        yield f"not sent    {run.not_sent}: --max-in-flight was reached; the system does not keep up"
    if run.interrupted:
        yield f"interrupted {run.cancelled} cancelled"
    if (run.late_ms.p99 or 0.0) >= _LATE_MS:
        yield "note        the benchmark itself was late: its machine is too busy for good measurements"


def sweep_table(runs: Sequence[RunResult]) -> Table:
    """Returns one row for each run; times are in milliseconds."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column(runs[0].load, justify="right", no_wrap=True)
    for head in ("req/s", "tok/s", "TTFT p50/p99", "TPOT p50/p99", "e2e p50/p99", "failed"):
        made.add_column(head, justify="right", no_wrap=True)
    for run in runs:
        spreads = (f"{number(one.p50)}/{number(one.p99)}" for one in (run.ttft_ms, run.tpot_ms, run.e2e_ms))
        rates = (number(run.requests_per_s), number(run.output_tokens_per_s))
        made.add_row(f"{run.value:g}", *rates, *spreads, str(run.failed + run.not_sent))
    return made


def progress(stats: RunStats, total: int | None, duration_s: float | None, now: float) -> str:
    """Returns the progress of a run in one short line."""
    passed_s = now - stats.began_at
    of_all = f"/{total}" if total else ""
    of_time = f"/{duration_s:g}" if duration_s else ""
    rate = stats.output_tokens / passed_s if passed_s > 0 else 0.0
    failed = f", {stats.failed} failed" if stats.failed else ""
    not_sent = f", {stats.not_sent} not sent" if stats.not_sent else ""
    done = f"{stats.ended + stats.not_sent}{of_all} done, {stats.in_flight} in flight"
    return f"{done}, {rate:,.0f} tokens/s, {passed_s:.0f}{of_time} s{failed}{not_sent}"


def number(value: float | None) -> str:
    """Formats a number to about three digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _workers(counts: dict[str, int]) -> str:
    if len(counts) <= _MANY_WORKERS:
        return _counts(counts)
    return f"{len(counts)} of them, with {min(counts.values())} to {max(counts.values())} requests each"
