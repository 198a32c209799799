"""Types of flags: each parses a flag's text, or raises ArgumentTypeError saying what is allowed.

`tokenbus health` loads this module every few seconds, so it must not import anything heavy."""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

MAX_COUNT = 1 << 40
"""Whole numbers without a limit of their own, and their product with a MiB, fit in 64 bits."""


class ArgumentType(NamedTuple):
    """The values that a flag takes."""

    convert: Callable[[str], Any]
    """Raises ValueError, or ArgumentTypeError with a better text than one made from `noun`."""
    noun: str
    """Names what is wanted where a text can't be converted; if empty, the error's own text is enough."""
    metavar: str
    allowed: str = ""
    """The allowed values in words, such as `0 to 64`; empty if every value that can be converted is."""
    contains: Callable[[Any], bool] = lambda _: True

    def __call__(self, text: str) -> Any:
        """Returns the value. Raises ArgumentTypeError."""
        try:
            value = self.convert(text)
        except (KeyError, ValueError) as error:
            problem = f"must be {self.noun}, got {text!r}" if self.noun else str(error)
            raise argparse.ArgumentTypeError(problem) from error
        if not self.contains(value):
            raise argparse.ArgumentTypeError(f"must be {self.allowed}, got {text}")
        return value


def text(metavar: str) -> ArgumentType:
    """Returns the type of any text."""
    return ArgumentType(str, "a text", metavar)


def whole(low: int, high: int | None = None, metavar: str = "N") -> ArgumentType:
    """Returns the type of whole numbers from `low` to `high`, or from `low` on."""
    return ArgumentType(_int, "a whole number", metavar, _range(low, high), _within(low, high))


def real(low: float, high: float | None = None, metavar: str = "X") -> ArgumentType:
    """Returns the type of numbers from `low` to `high`, or from `low` on."""
    return ArgumentType(float, "a number", metavar, _range(low, high), _within(low, high))


def above(low: float, high: float | None = None, metavar: str = "X") -> ArgumentType:
    """Returns the type of numbers above `low`, up to `high` if that is given."""
    allowed = f"above {_number(low)}" + (f", up to {_number(high)}" if high is not None else "")
    is_within = _within(low, high)
    return ArgumentType(float, "a number", metavar, allowed, lambda value: value != low and is_within(value))


def one_of(*names: str) -> ArgumentType:
    """Returns the type of texts that are one of `names`, in small or capital letters."""
    allowed = f"{', '.join(names[:-1])} or {names[-1]}"
    return ArgumentType(str.lower, allowed, "CHOICE", allowed, names.__contains__)


def several(number: ArgumentType, at_most: int) -> ArgumentType:
    """Returns the type of comma-separated numbers of this type."""

    def numbers(text: str) -> tuple[float, ...]:
        values = tuple(float(number.convert(part)) for part in text.split(","))
        for value, part in zip(values, text.split(","), strict=True):
            if not number.contains(value):
                raise argparse.ArgumentTypeError(f"must be {number.allowed}, got {part}")
        if len(values) > at_most:
            raise argparse.ArgumentTypeError(f"must be at most {at_most} numbers, got {len(values)}")
        return values

    return ArgumentType(numbers, "comma-separated numbers", "N,N", f"each {number.allowed}")


def _int(text: str) -> int:
    value = int(text)
    if value > MAX_COUNT:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_COUNT:,}, got {text}")
    return value


def _port_range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(PORT(first), PORT(last or first) + 1)


def _names(text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(","))
    if not all(found):
        raise ValueError
    return found


def _range(low: float, high: float | None) -> str:
    return f"{_number(low)} or more" if high is None else f"{_number(low)} to {_number(high)}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.10g}"


def _within(low: float, high: float | None) -> Callable[[float], bool]:
    # Comparisons with NaN are false, so these test what is allowed.
    return lambda value: low <= value < float("inf") if high is None else low <= value <= high


def _path(text: str) -> Any:
    from pathlib import Path  # takes too long for a health check

    return Path(text)


def _boolean(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.lower()]


SWITCH = ArgumentType(_boolean, "true or false", "")
"""The type of a flag without a value."""
TEXT = text("TEXT")
NAME = text("NAME")
PATTERN = text("PATTERN")
FILE = text("FILE")
DIR = text("DIR")
PATH = ArgumentType(_path, "a file", "FILE")
URL = text("URL")
PORT = ArgumentType(int, "a port", "PORT", "0 to 65535", _within(0, 65_535))
"""A TCP port; 0 asks the system for a free one."""
PORTS = ArgumentType(
    _port_range,
    "a port or a range of ports such as 9100-9109",
    "PORT[-PORT]",
    "a port or a range such as 9100-9109",
    bool,
)
"""One port, or an inclusive range such as `9100-9109`."""
INTERVAL = real(0.05, 3_600, "SECONDS")
"""An interval between repeated looks, in seconds."""
SECONDS = real(0, 86_400, "SECONDS")
"""A time that something may take; up to a day."""
MIB = whole(0, metavar="MIB")
COUNT = whole(0)
NAMES = ArgumentType(_names, "names with commas between them", "A,B,...")
"""Comma-separated names, such as `CUDA0,CUDA1`."""
SHARES = ArgumentType(
    lambda text: tuple(float(part) for part in text.split(",")),
    "numbers with commas between them",
    "A,B,...",
    "0 or more each, not all of them 0",
    lambda values: min(values) >= 0 and 0 < sum(values) < float("inf"),
)
"""Comma-separated shares of a whole, such as `3,1`."""
