"""How often a hostile test repeats: few times in `make test`, many in `make hostile`."""

import os


def times(short: int, long: int) -> int:
    """`long` where TOKENBUS_HOSTILE is `long`, else `short`."""
    return long if os.environ.get("TOKENBUS_HOSTILE") == "long" else short
