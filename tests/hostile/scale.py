"""How often a hostile test repeats: few times in `make test`, many in `make hostile`."""

import os

IS_LONG = os.environ.get("TOKENBUS_HOSTILE") == "long"
chosen: dict[str, list[int]] = {}
"""What `times` has given to each test, for the report."""


def times(short: int, long: int) -> int:
    """`long` where TOKENBUS_HOSTILE is `long`, else `short`."""
    count = long if IS_LONG else short
    running = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
    chosen.setdefault(running, []).append(count)
    return count
