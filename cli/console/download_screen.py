"""Shows a download on standard error."""

import sys
import time

from tokenbus.worker.files import transfer

_ON_TERMINAL_S = 0.2
_IN_LOG_S = 5.0
_START_OF_LINE = "\r\x1b[K"


def start_of_line() -> str:
    """Returns what clears an unfinished line on a terminal, before an error."""
    return _START_OF_LINE if sys.stderr.isatty() else ""


class DownloadScreen:
    """On a terminal it is one line that changes, otherwise a line every few seconds."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._rate = transfer.DownloadRate()
        self._on_terminal = sys.stderr.isatty()
        self._shown_at = float("-inf")
        self._last = (0, 0)

    def __repr__(self) -> str:
        return f"<DownloadScreen of {self._model} {self._last}>"

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        bytes_per_s = self._rate.update(done_bytes, now)
        self._last = done_bytes, total_bytes
        if now - self._shown_at >= (_ON_TERMINAL_S if self._on_terminal else _IN_LOG_S):
            self._shown_at = now
            self._write(transfer.describe(done_bytes, total_bytes, bytes_per_s))

    def _write(self, line: str) -> None:
        start, end = (_START_OF_LINE, "") if self._on_terminal else ("", "\n")
        print(f"{start}{self._model}: {line}", end=end, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Shows that everything is there."""
        if self._last[1]:
            self._write(f"{transfer.size(self._last[1])}, complete")
            if self._on_terminal:
                print(file=sys.stderr)
