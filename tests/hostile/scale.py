"""Repetitions of hostile tests: few in `make test`, many in `make hostile`."""

import os

IS_LONG = os.environ.get("TOKENBUS_HOSTILE") == "long"
chosen: dict[str, list[int]] = {}
"""The repetitions of each test, for the report."""


def times(short: int, long: int) -> int:
    """Returns `long` if TOKENBUS_HOSTILE is `long`, else `short`."""
    count = long if IS_LONG else short
    running = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
    chosen.setdefault(running, []).append(count)
    return count
