"""Limits how fast blocks move while a worker computes, so that its streams don't wait for them."""

BYTES_PER_S = 32 * 1024 * 1024
_BURST_S = 0.05


class Pace:
    """Spreads bytes over time. Times are seconds of one monotonic clock."""

    def __init__(self, bytes_per_s: float = BYTES_PER_S) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def __repr__(self) -> str:
        return f"<Pace {self._bytes_per_s / 1e6:.0f} MB/s>"

    def delay_s(self, num_bytes: int, now: float) -> float:
        """Returns how long to wait before these bytes may move."""
        delay_s = max(0.0, self._free_at - _BURST_S - now)
        self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_s
        return delay_s
