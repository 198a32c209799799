"""Runs checks and prints a line for each: `ok NAME` or `not ok NAME: REASON`."""

import sys
from collections.abc import Callable


def run(*checks: Callable[[], None]) -> None:
    """Runs functions that are named after what they check."""
    for check in checks:
        name = check.__name__.replace("_", " ")
        try:
            check()
        except Exception as error:
            reason = f"{type(error).__name__} {error}".replace("\n", " ")
            print(f"not ok {name}: {reason[:500]}")
        else:
            print(f"ok {name}")
        sys.stdout.flush()
