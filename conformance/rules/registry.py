"""All rules, in the order in which they are reported: every public coroutine of a rules module is one."""

import inspect
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tokenbus.conformance.probing.probe import Probe
from tokenbus.conformance.rules import (
    encoding,
    endings,
    features,
    fields,
    fleet,
    guardians,
    ids,
    models,
    resync,
    runs,
    sampling,
    stream,
    traces,
    workers,
)

_MODULES = (
    stream,
    sampling,
    encoding,
    fields,
    ids,
    endings,
    resync,
    features,
    models,
    fleet,
    traces,
    workers,
    runs,
    guardians,
)


class Rule(NamedTuple):
    """One sentence of the wire contract and its check."""

    name: str
    check: Callable[[Probe], Awaitable[None]]
    exclusive: bool
    """Whether no other rule may run at the same time."""


def all_rules() -> list[Rule]:
    """Returns the rules. The text of each is the docstring of its check."""
    return [
        Rule(" ".join((check.__doc__ or name).split()).removesuffix("."), check, exclusive=module is sampling)
        for module in _MODULES
        for name, check in vars(module).items()
        if inspect.iscoroutinefunction(check) and check.__module__ == module.__name__ and not name.startswith("_")
    ]
