"""Writes what the rounds have shown as a page, every number of which comes from their records."""

from collections.abc import Iterable, Sequence

from tests.chaos.plans import KINDS
from tests.chaos.reading import UNSEALED
from tests.chaos.results import Ends, Record, percentile, sum_up, violations

_HEAD = f"""# Streams under faults

<!-- Written by `python -m tests.chaos report` from build/chaos.jsonl. -->

This page shows the results of `make chaos`. It runs real processes (one nats-server, two routers, and three workers
with the simulated engine or two with the demo model) with 32 open streams at all times (16 of the library, 12 of plain
clients and 4 with `stream: false`), and causes one fault after another. Every text is compared byte by byte with that
of an undisturbed stream. [guarantees.md](guarantees.md) says what is promised.

- *Aim*: how many faults of a kind it takes for that kind to count as tested.
- *Completed*: streams that reached their full length, or that their own client cancelled.
- *Wrong*: streams with a byte that differs from the undisturbed text, a repetition, a wrong `usage`, or a message after
  the terminal.
- *Diverged*: streams of the demo model that continued with a different token than the undisturbed stream, at a point
  where two tokens are so close that rounding decides.
- *Holes*: streams that lost a message, as their offsets show.
- *Lost terminals*: streams that a worker had accepted, and that had no terminal by the time their client gave up.
- *No answer*: requests that no worker had accepted, and that had no terminal by the time their client gave up.
- `{UNSEALED}`: a router's error when it can't know what a client has read, because the seal of the
  last step or an entry of the event log is missing.
- *Gap*: the pause in a plain client's text before another attempt continued it.
"""


def render(records: Sequence[Record]) -> str:
    """Returns the page."""
    kinds = [kind for kind in KINDS if any(record.kind == kind for record in records)]
    sections = [_section(kind, [record for record in records if record.kind == kind]) for kind in kinds]
    return "\n".join([_HEAD, _overview(records, kinds), *sections])


def _overview(records: Sequence[Record], kinds: Iterable[str]) -> str:
    rows = ["| faults | aim | rounds | streams | completed | broken promises |", "|---|---|---|---|---|---|"]
    for kind in kinds:
        chosen = [record for record in records if record.kind == kind]
        total = sum(sum_up(chosen).values(), Ends())
        count = sum(record.faults for record in chosen)
        broken = violations(kind, sum_up(chosen)) + [record.failure for record in chosen if record.failure]
        cells = [f"{count:,} {kind}", f"{KINDS[kind].aim:,}", len(chosen), f"{total.streams:,}", f"{total.well:,}"]
        rows.append(_row([*cells, "; ".join(broken) or "none"]))
    return "\n".join([*rows, ""])


def _section(kind: str, records: Sequence[Record]) -> str:
    lines = [
        f"## {kind}",
        "",
        "| client | streams | completed | wrong | diverged | holes | lost terminals | no answer | errors |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for client, ends in sum_up(records).items():
        errors = ", ".join(f"{count:,} {code}" for code, count in sorted(ends.errors.items())) or "none"
        counts = (ends.streams, ends.well, ends.wrong, ends.parted, ends.holes, ends.lost, ends.unanswered)
        lines.append(_row([client, *(f"{count:,}" for count in counts), errors]))
    return "\n".join([*lines, "", _facts(kind, records), ""])


def _facts(kind: str, records: Sequence[Record]) -> str:
    gaps, aim = [gap for record in records for gap in record.gaps_ms], KINDS[kind].max_gap_ms
    faults = {engine: sum(one.faults for one in records if one.engine == engine) for engine in ("sim", "demo")}
    duration_s = sum(record.duration_s for record in records)
    dates = sorted({record.date for record in records})
    aim_text = f" (aim {_seconds(aim)})" if aim else ""
    facts = [
        f"{sum(faults.values()):,} faults, {faults['demo']:,} of them on the demo model",
        f"gap p50 {_seconds(percentile(gaps, 0.5))}{aim_text}, p99 {_seconds(percentile(gaps, 0.99))}, "
        f"of {len(gaps):,} gaps",
        f"longest silence {_seconds(max(record.longest_silence_ms for record in records))}",
        f"a fault took up to {max(record.longest_fault_s for record in records):g} s, "
        f"the median stream at least {min(record.median_stream_s for record in records):g} s",
        f"{len(records)} rounds with the seeds {_ranges(sorted({record.seed for record in records}))}, "
        f"{duration_s / 60:.0f} minutes, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}",
        f"commit {', '.join(sorted({record.commit for record in records}))}",
        f"on {' and '.join(sorted({record.machine for record in records}))}",
    ]
    return "; ".join(facts) + "."


def _ranges(numbers: Sequence[int]) -> str:
    """Returns sorted numbers as ranges: `0 to 4, 7`."""
    starts = [one for one in numbers if one - 1 not in numbers]
    ends = [one for one in numbers if one + 1 not in numbers]
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True))


def _seconds(milliseconds: int | None) -> str:
    return "none" if milliseconds is None else f"{milliseconds / 1e3:.2f} s"


def _row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
