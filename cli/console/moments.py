"""Durations and moments as people write them: `30d`, `2027-01-31`."""

import datetime
import re
import time

from tokenbus.cli.console.arguments import ArgumentType

_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)([smhdw])")
_LAST_S = 253_402_300_799
"""The last second of the year 9999."""


def duration_s(text: str) -> float:
    """Returns the seconds of a number with a unit. Raises ValueError."""
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is not a duration")
    return float(found[1]) * _UNITS_S[found[2]]


def moment(text: str) -> float:
    """Returns the Unix time of a date, which is UTC unless it says otherwise, or of a duration from now. Raises
    ValueError."""
    try:
        found = time.time() + duration_s(text)
    except ValueError:
        at = datetime.datetime.fromisoformat(text)
        found = (at if at.tzinfo else at.replace(tzinfo=datetime.UTC)).timestamp()
    if not 0 <= found <= _LAST_S:
        raise ValueError(f"{text!r} is out of range")
    return found


def text_of_moment(at: float) -> str:
    """Returns a Unix time as `2027-01-31 12:00 UTC`, without a midnight's hour."""
    found = datetime.datetime.fromtimestamp(at, datetime.UTC)
    return f"{found:%Y-%m-%d}" if at % 86_400 == 0 else f"{found:%Y-%m-%d %H:%M} UTC"


_UNITS = "s, m, h, d or w"
DURATION = ArgumentType(duration_s, f"a number with a unit ({_UNITS}), such as 12h or 30d", "DURATION")
MOMENT = ArgumentType(moment, f"a date such as 2027-01-31 or a duration such as 30d ({_UNITS})", "DATE|DURATION")
