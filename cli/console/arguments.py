"""Argument types for flags: each parses a flag's text or raises ArgumentTypeError saying what is allowed.

`tokenbus health` loads this module every few seconds, so it must not import anything heavy."""

import argparse
from collections.abc import Callable


def port(text: str) -> int:
    """A TCP port; 0 asks the system for a free one."""
    value = int(text)
    if not 0 <= value <= 65_535:
        raise argparse.ArgumentTypeError(f"must be 0 to 65535, got {value}")
    return value


def ports(text: str) -> range:
    """One port, or an inclusive range such as `9100-9109`."""
    first, _, last = text.partition("-")
    found = range(port(first), port(last or first) + 1)
    if not found:
        raise argparse.ArgumentTypeError(f"must be a port or a range of ports such as 9100-9109, got {text}")
    return found


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """Returns the type of whole numbers from `low` to `high`, or from `low` on."""

    def number(text: str) -> int:  # argparse names the type in its error message
        value = int(text)
        if high is None and value < low:
            raise argparse.ArgumentTypeError(f"must be at least {low:,}, got {text}")
        if high is not None and not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be {low:,} to {high:,}, got {text}")
        return value

    return number


def real(low: float, high: float) -> Callable[[str], float]:
    """Returns the type of numbers from `low` to `high`."""

    def number(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be {low:g} to {high:,.0f}, got {text}")
        return value

    return number


def several(number: Callable[[str], float], at_most: int) -> Callable[[str], tuple[float, ...]]:
    """Returns the type of comma-separated numbers of this type."""

    def numbers(text: str) -> tuple[float, ...]:
        try:
            values = tuple(float(number(part)) for part in text.split(","))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"must be comma-separated numbers, got {text}") from error
        if len(values) > at_most:
            raise argparse.ArgumentTypeError(f"must be at most {at_most} numbers, got {len(values)}")
        return values

    return numbers


def seconds(text: str) -> float:
    """An interval in seconds."""
    value = float(text)
    if not 0.05 <= value <= 3_600:
        raise argparse.ArgumentTypeError(f"must be 0.05 to 3600 seconds, got {text}")
    return value


def one_of(*names: str) -> Callable[[str], str]:
    """Returns the type of strings that are one of `names`."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(names)}, got {text}")
        return text

    return parse


def names(text: str) -> tuple[str, ...]:
    """Comma-separated names, such as `CUDA0,CUDA1`."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(f"must be names with commas between them, got {text!r}")
    return found


def shares(text: str) -> tuple[float, ...]:
    """Comma-separated shares of a whole, such as `3,1`."""
    found = tuple(float(part) for part in text.split(","))
    if not found or min(found) < 0 or sum(found) <= 0:
        raise argparse.ArgumentTypeError(f"must be numbers of 0 or more, not all of them 0, got {text}")
    return found
