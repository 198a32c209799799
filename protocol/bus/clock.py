"""The clock for leases: unlike `time.monotonic` it keeps running while the machine sleeps."""

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Linux stops CLOCK_MONOTONIC during a suspend. Elsewhere that clock keeps running, or there is nothing better."""


def now() -> float:
    """Returns seconds since some fixed moment in the past. Never goes backwards."""
    return time.clock_gettime(_CLOCK)
