"""Logs the progress of a long transfer every few seconds."""

import time
from collections.abc import Callable

import structlog

from tokenbus.worker.files import transfer

_INTERVAL_S = 5.0


class LoggedTransfer:
    """An `OnBytes` for processes that log. `progress` is called with the share transferred, from 0 to 1."""

    def __init__(self, model: str, progress: Callable[[float], None]) -> None:
        self._model = model
        self._progress = progress
        self._rate = transfer.DownloadRate()
        self._logged_at = time.monotonic()

    def __repr__(self) -> str:
        return f"<LoggedTransfer of {self._model}>"

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        bytes_per_s = self._rate.update(done_bytes, now)
        if now - self._logged_at >= _INTERVAL_S:
            self._logged_at = now
            structlog.get_logger().info(
                "model_downloading", repo=self._model, progress=transfer.describe(done_bytes, total_bytes, bytes_per_s)
            )
        self._progress(min(1.0, done_bytes / total_bytes) if total_bytes else 1.0)
