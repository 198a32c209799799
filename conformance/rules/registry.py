"""All rules, in the order in which they are reported."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tokenbus.conformance.probe import Probe
from tokenbus.conformance.rules import encoding as rules_encoding
from tokenbus.conformance.rules import endings as rules_endings
from tokenbus.conformance.rules import features as rules_features
from tokenbus.conformance.rules import fields as rules_fields
from tokenbus.conformance.rules import ids as rules_ids
from tokenbus.conformance.rules import models as rules_models
from tokenbus.conformance.rules import resync as rules_resync
from tokenbus.conformance.rules import runs as rules_runs
from tokenbus.conformance.rules import sampling as rules_sampling
from tokenbus.conformance.rules import stream as rules_stream
from tokenbus.conformance.rules import workers as rules_workers

Check = Callable[[Probe], Awaitable[None]]


class Rule(NamedTuple):
    """One sentence of the wire contract and its check."""

    name: str
    check: Check
    exclusive: bool
    """Whether no other rule may run at the same time."""


def all_rules() -> list[Rule]:
    return [
        *_made(rules_stream.RULES),
        *_made(rules_sampling.RULES, exclusive=True),
        *_made(rules_encoding.RULES),
        *_made(rules_fields.RULES),
        *_made(rules_ids.RULES),
        *_made(rules_endings.RULES),
        *_made(rules_resync.RULES),
        *_made(rules_features.RULES),
        *_made(rules_models.RULES),
        *_made(rules_workers.RULES),
        *_made(rules_runs.RULES),
    ]


def _made(checks: tuple[Check, ...], *, exclusive: bool = False) -> list[Rule]:
    return [Rule(rule_text(check), check, exclusive) for check in checks]


def rule_text(check: Check) -> str:
    """Returns the text of a rule: the docstring of its check."""
    assert check.__doc__, check
    return " ".join(check.__doc__.split()).removesuffix(".")
