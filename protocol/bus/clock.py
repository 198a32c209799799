"""The clock for leases: unlike `time.monotonic` it goes on while the machine sleeps."""

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Linux stops CLOCK_MONOTONIC during a suspend. Elsewhere that clock goes on, or there is nothing better."""


def now() -> float:
    """Returns seconds since some moment in the past. Never goes back."""
    return time.clock_gettime(_CLOCK)
