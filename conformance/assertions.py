"""What can be said of a rule: it holds, it is broken, or it could not be tried here."""

from typing import Any

Message = dict[str, Any]
"""A message as its encoding gives it, with nothing assumed about it."""


class BrokenError(Exception):
    """The system did something else than the rule says; the text is what was seen instead."""


class SkippedError(Exception):
    """The rule can't be tried against this system; the text is why."""


def expect(holds: bool, seen: str) -> None:
    """Raises BrokenError with what was seen instead unless the condition holds."""
    if not holds:
        raise BrokenError(seen)


def shorten(value: object) -> str:
    """A value as it is shown in a verdict: on one line, and not much of it."""
    text = repr(value)
    return text if len(text) <= 160 else text[:157] + "..."
