"""All rules, in the order in which they are told."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tokenbus.cli.wirecheck import (
    rules_encoding,
    rules_endings,
    rules_features,
    rules_fields,
    rules_ids,
    rules_models,
    rules_resync,
    rules_runs,
    rules_sampling,
    rules_stream,
    rules_workers,
)
from tokenbus.cli.wirecheck.probe import Probe

Check = Callable[[Probe], Awaitable[None]]


class Rule(NamedTuple):
    """One sentence of the wire, and how to hold a system against it."""

    name: str
    check: Check
    alone: bool
    """Nothing else may run meanwhile."""


def all_rules() -> list[Rule]:
    return [
        *_made(rules_stream.RULES),
        *_made(rules_sampling.RULES, alone=True),
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


def _made(checks: tuple[Check, ...], *, alone: bool = False) -> list[Rule]:
    return [Rule(name_of(check), check, alone) for check in checks]


def name_of(check: Check) -> str:
    """The rule as it is printed: its docstring."""
    assert check.__doc__, check
    return " ".join(check.__doc__.split()).removesuffix(".")
