"""Writes what the rounds have shown as a page, every number of which comes from their records."""

from collections.abc import Iterable, Mapping, Sequence

from tests.chaos.plans import KINDS
from tests.chaos.reading import UNSEALED
from tests.chaos.results import Ends, Record, percentile, sum_up, violations

_HEAD = f"""# Streams under faults

<!-- Written by `python -m tests.chaos report` from build/chaos.jsonl. -->

This page shows the results of `make chaos`. It runs real processes (one nats-server, two routers, and three workers
with the simulated engine or two with the demo model) with 32 open streams at all times (16 of the library, 12 of plain
clients and 4 with `stream: false`), and causes one fault after another. Every text is compared byte by byte with that
of an undisturbed stream. [guarantees.md](guarantees.md) says what is promised. Where a system or its streams had
another size, the flags of `python -m tests.chaos run` that gave it follow the kind.

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
    groups = _groups(records)
    sections = [_section(title, chosen) for title, chosen in groups.items()]
    return "\n".join([_HEAD, _overview(groups), *sections])


def summary(records: Sequence[Record]) -> list[str]:
    """Returns a line for each kind and size of rounds."""
    return [f"{title}: {_outcome(chosen)}; {_facts(chosen)}" for title, chosen in _groups(records).items()]


def _groups(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Returns the records by kind and size."""
    found: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: (list(KINDS).index(record.kind), record.sizes)):
        found.setdefault(record.title, []).append(record)
    return found


def _outcome(records: Sequence[Record]) -> str:
    total = sum(sum_up(records).values(), Ends())
    return f"{total.streams:,} streams, {total.well:,} completed, broken promises: {_broken(records)}"


def _broken(records: Sequence[Record]) -> str:
    broken = violations(records[0].kind, sum_up(records))
    return "; ".join(broken + [record.failure for record in records if record.failure]) or "none"


def _overview(groups: Mapping[str, Sequence[Record]]) -> str:
    rows = ["| faults | aim | rounds | streams | completed | broken promises |", "|---|---|---|---|---|---|"]
    for title, chosen in groups.items():
        total = sum(sum_up(chosen).values(), Ends())
        count, aim = sum(record.faults for record in chosen), KINDS[chosen[0].kind].aim
        cells = [f"{count:,} {title}", f"{aim:,}", len(chosen), f"{total.streams:,}", f"{total.well:,}"]
        rows.append(_row([*cells, _broken(chosen)]))
    return "\n".join([*rows, ""])


def _section(title: str, records: Sequence[Record]) -> str:
    lines = [
        f"## {title}",
        "",
        "| client | streams | completed | wrong | diverged | holes | lost terminals | no answer | errors |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for client, ends in sum_up(records).items():
        errors = ", ".join(f"{count:,} {code}" for code, count in sorted(ends.errors.items())) or "none"
        counts = (ends.streams, ends.well, ends.wrong, ends.parted, ends.holes, ends.lost, ends.unanswered)
        lines.append(_row([client, *(f"{count:,}" for count in counts), errors]))
    return "\n".join([*lines, "", _facts(records), ""])


def _facts(records: Sequence[Record]) -> str:
    gaps, aim = [gap for record in records for gap in record.gaps_ms], KINDS[records[0].kind].max_gap_ms
    faults = {engine: sum(one.faults for one in records if one.engine == engine) for engine in ("sim", "demo")}
    duration_s = sum(record.duration_s for record in records)
    dates = sorted({record.date for record in records})
    aim_text = f" (aim {_seconds(aim)})" if aim else ""
    facts = [
        f"{sum(faults.values()):,} faults, {faults['demo']:,} of them on the demo model",
        f"gap p50 {_seconds(percentile(gaps, 0.5))}{aim_text}, p99 {_seconds(percentile(gaps, 0.99))}, "
        f"longest {_seconds(percentile(gaps, 1.0))}, of {len(gaps):,} gaps",
        f"longest silence {_seconds(max(record.longest_silence_ms for record in records))}",
        f"the clients' own process stood still for up to {_seconds(max(one.longest_stall_ms for one in records))}",
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
