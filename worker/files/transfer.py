"""Measures the progress, the rate and the remaining time of a long transfer."""

from collections import deque
from collections.abc import Callable

OnBytes = Callable[[int, int], None]
"""Called with the bytes transferred so far and the total."""
_WINDOW_S = 10.0
"""The rate is that of the last few seconds, since a connection may become slower."""
_INTERVAL_S = 0.1
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class DownloadRate:
    """Measures a transfer, which may have started with some bytes already present."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque()

    def __repr__(self) -> str:
        return f"<DownloadRate of {len(self._readings)} readings>"

    def update(self, done_bytes: int, now: float) -> float:
        """Returns the bytes per second. If a transfer restarts, so does the measurement."""
        if self._readings and done_bytes < self._readings[-1][1]:
            self._readings.clear()
        if not self._readings or now - self._readings[-1][0] >= _INTERVAL_S:
            self._readings.append((now, done_bytes))
        while now - self._readings[0][0] > _WINDOW_S and len(self._readings) > 2:
            self._readings.popleft()
        since, had = self._readings[0]
        return (done_bytes - had) / (now - since) if now > since else 0.0


def seconds_left(done_bytes: int, total_bytes: int, bytes_per_s: float) -> float | None:
    """Returns the time that the rest will take at this rate; None if nothing is moving."""
    return (total_bytes - done_bytes) / bytes_per_s if bytes_per_s > 0 else None


def describe(done_bytes: int, total_bytes: int, bytes_per_s: float) -> str:
    """Returns a line such as `1.20 GB of 4.10 GB (29 %), 52.1 MB/s, 0:55 left`."""
    share = done_bytes / total_bytes if total_bytes else 1.0
    left_s = seconds_left(done_bytes, total_bytes, bytes_per_s)
    rest = "" if left_s is None else f", {_clock(round(left_s))} left"
    return f"{size(done_bytes)} of {size(total_bytes)} ({share:.0%}), {size(round(bytes_per_s))}/s{rest}"


def size(num_bytes: int) -> str:
    """Returns a size in decimal units, as the Hub and disk vendors state them."""
    for factor, unit in _UNITS:
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes} B"


def _clock(seconds: int) -> str:
    hours, rest = divmod(seconds, 3_600)
    minutes = f"{rest // 60:02}" if hours else str(rest // 60)
    return f"{hours}:{minutes}:{rest % 60:02}" if hours else f"{minutes}:{rest % 60:02}"
