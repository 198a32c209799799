"""The outcomes of rules, as text or JSON."""

import enum
import json
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class RuleVerdict(enum.StrEnum):
    OK = "ok"
    BROKEN = "broken"
    SKIPPED = "skipped"


class Outcome(NamedTuple):
    """The verdict on one rule and its reason."""

    rule: str
    verdict: RuleVerdict
    reason: str
    took_ms: float


def line(outcome: Outcome) -> str:
    """Returns the outcome as a line of text."""
    if outcome.verdict is RuleVerdict.OK:
        return f"ok       {outcome.rule}"
    label = "BROKEN" if outcome.verdict is RuleVerdict.BROKEN else "skipped"
    return f"{label:<8} {outcome.rule}: {outcome.reason}"


def json_line(outcome: Outcome) -> str:
    fields = outcome._asdict() | {"took_ms": round(outcome.took_ms, 1)}
    return json.dumps(fields, ensure_ascii=False)


def summary(outcomes: Sequence[Outcome]) -> str:
    count = Counter(outcome.verdict for outcome in outcomes)
    return (
        f"{count[RuleVerdict.OK]} rules hold, {count[RuleVerdict.BROKEN]} broken, {count[RuleVerdict.SKIPPED]} skipped"
    )
