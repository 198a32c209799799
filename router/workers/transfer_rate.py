"""Learns how fast KV blocks move between workers, from their reported fetches."""

import math

from tokenbus.protocol.wire import internal

FIRST_MB_PER_S = 60.0
"""The rate of NATS on one machine, assumed until a fetch has been measured."""
_SAMPLE_WEIGHT = 0.1
_MIN_FAILURE_MS = 50.0
"""A fetch that brought nothing in less time than this was refused, which says nothing about the rate."""


class TransferRate:
    """The mean rate of the latest fetches of one model's workers."""

    def __init__(self) -> None:
        self.mb_per_s = FIRST_MB_PER_S
        self._count = 0

    def __repr__(self) -> str:
        return f"<TransferRate {self.mb_per_s:.1f} MB/s>"

    def observe(self, fetched: internal.Fetched) -> None:
        """Learns from a finished fetch."""
        took_ms, brought = fetched.fetch_ms, max(0, fetched.fetched_bytes)
        if not 0.0 < took_ms < math.inf or (not brought and took_ms < _MIN_FAILURE_MS):
            return
        self._count += 1
        weight = max(_SAMPLE_WEIGHT, 1.0 / self._count)  # a plain mean at first, so that the initial guess is forgotten
        self.mb_per_s += weight * (brought / took_ms / 1e3 - self.mb_per_s)
