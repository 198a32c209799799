"""How the outcome of each rule is told."""

import enum
import json
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class Verdict(enum.StrEnum):
    OK = "ok"
    BROKEN = "broken"
    SKIPPED = "skipped"


class Outcome(NamedTuple):
    """What came of one rule, and why."""

    rule: str
    verdict: Verdict
    reason: str
    took_ms: float


def line(outcome: Outcome) -> str:
    """`ok  A rule`, or with the reason behind it."""
    if outcome.verdict is Verdict.OK:
        return f"ok       {outcome.rule}"
    label = "BROKEN" if outcome.verdict is Verdict.BROKEN else "skipped"
    return f"{label:<8} {outcome.rule}: {outcome.reason}"


def json_line(outcome: Outcome) -> str:
    fields = outcome._asdict() | {"took_ms": round(outcome.took_ms, 1)}
    return json.dumps(fields, ensure_ascii=False)


def summary(outcomes: Sequence[Outcome]) -> str:
    count = Counter(outcome.verdict for outcome in outcomes)
    return f"{count[Verdict.OK]} rules hold, {count[Verdict.BROKEN]} broken, {count[Verdict.SKIPPED]} skipped"
