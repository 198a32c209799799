"""The meaning of a request's `reasoning`: variables of the chat template, and a limit on reasoning tokens."""

from collections.abc import Mapping
from typing import Any

from tokenbus.protocol.wire.params import ReasoningOptions

_OFF = ("none", "minimal")
"""Efforts that ask for no reasoning."""
_SHARES = {"none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": 0.95}
"""The share of `max_tokens` that may be reasoning, by effort."""
SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates turn reasoning on and off."""
EFFORTS = tuple(_SHARES)
"""The efforts that mean the same for all models. Templates may know others."""


def template_arguments(
    effort: str | None, given: Mapping[str, Any] | None, max_tokens: int | None = None
) -> dict[str, Any] | None:
    """Returns the variables for the chat template that an effort and a limit on reasoning tokens mean; those that were
    `given` prevail."""
    meant: dict[str, Any] = {} if max_tokens is None else {"thinking_budget": max_tokens}
    if effort:
        meant["enable_thinking"] = effort not in _OFF
        if effort not in _OFF:
            meant["reasoning_effort"] = effort
    return meant | dict(given or {}) if meant or given is not None else None


def is_off(asked: ReasoningOptions | None) -> bool:
    """Returns whether an answer must have no reasoning."""
    if asked is None:
        return False
    return asked.effort == "none" if asked.max_tokens is None else asked.max_tokens == 0


def as_switched(asked: ReasoningOptions | None, given: Mapping[str, Any] | None) -> ReasoningOptions | None:
    """Returns the options with the effort `none` if the chat template is given a switch that turns reasoning off."""
    is_on = all((given or {}).get(name) is not False for name in SWITCHES)
    if is_on or (asked is not None and (asked.effort is not None or asked.max_tokens is not None)):
        return asked
    return ReasoningOptions(effort="none", optional=None if asked is None else asked.optional)


def token_limit(asked: ReasoningOptions | None, max_tokens: int, *, takes_effort: bool) -> int | None:
    """Returns the maximum reasoning tokens of an answer of `max_tokens`; None if there is no limit.

    `takes_effort`: the model itself follows the effort, so it sets no limit."""
    if asked is None or asked.max_tokens is not None:
        return None if asked is None else asked.max_tokens
    share = None if takes_effort else _SHARES.get(asked.effort or "")
    return None if share is None else int(share * max_tokens)
