"""The outcome of a check: it returns if its rule holds, and raises if the rule is broken or can't be checked."""

from typing import Any

Message = dict[str, Any]
"""A decoded message, not validated yet."""


class BrokenError(Exception):
    """The system broke the rule. The text says what it did."""


class SkippedError(Exception):
    """The rule can't be checked against this system. The text says why."""


def expect(holds: bool, seen: str) -> None:
    """Raises BrokenError with what was seen, unless the condition holds."""
    if not holds:
        raise BrokenError(seen)


def shorten(value: object) -> str:
    """Returns a value as text for a report: one line, truncated at 160 characters."""
    text = repr(value)
    return text if len(text) <= 160 else text[:157] + "..."
