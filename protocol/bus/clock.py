"""The clock for what must not outlive a lease: unlike `time.monotonic` it goes on while the machine sleeps."""

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Linux stops CLOCK_MONOTONIC during a suspend; elsewhere that clock counts it, or there is nothing better."""


def now() -> float:
    """Seconds since some moment in the past; never goes back."""
    return time.clock_gettime(_CLOCK)
