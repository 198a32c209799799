"""Examines logits: a row about once a second, and each row that is not finite.

Summarizing a row takes a fraction of a millisecond, which is negligible for a step."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Listing

import numpy as np
import structlog

from tokenbus.worker.engine.device.draws import Matrix, Row
from tokenbus.worker.engine.logits_summary import LogitsSummary, SeenLogits
from tokenbus.worker.engine.scheduling.plan import ScheduledTokens

_INTERVAL_S = 1.0
_MAX_POISONED = 8
"""The most non-finite rows summarized per step; there may be as many as sequences."""


class LogitsHealth:
    """The logits of one runner since the last step."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sampled_at = float("-inf")
        self._sampled: LogitsSummary | None = None
        self._poisoned: dict[int, LogitsSummary] = {}
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<LogitsHealth {self._sampled}, {len(self._poisoned)} poisoned>"

    def look(self, batch: Listing[ScheduledTokens], rows: Matrix, poisoned: Listing[bool]) -> None:
        """Examines the logits after each share of a batch, before anything changes them."""
        if any(poisoned):
            for part, row, is_poisoned in zip(batch, rows, poisoned, strict=True):
                if is_poisoned and len(self._poisoned) < _MAX_POISONED:
                    self._poisoned[part.sequence.seq_no] = summarize(row)
        now = self._clock()
        if now - self._sampled_at >= _INTERVAL_S and not all(poisoned):
            number = poisoned.index(False)
            self._sampled, self._sampled_at = summarize(rows[number]), now
            self._log.debug("logits_sampled", seq_no=batch[number].sequence.seq_no, logits=self._sampled.to_log())

    def take(self) -> SeenLogits:
        """Returns what was seen since the last call."""
        if self._sampled is None and not self._poisoned:  # the usual case
            return _NOTHING
        seen = SeenLogits(self._sampled, self._poisoned)
        self._sampled, self._poisoned = None, {}
        return seen


_NOTHING = SeenLogits()


def summarize(row: Row) -> LogitsSummary:
    """Summarizes a row."""
    numbers = row[np.isfinite(row)]
    nan, pos_inf = int(np.isnan(row).sum()), int(np.isposinf(row).sum())
    neg_inf = len(row) - len(numbers) - nan - pos_inf
    if not len(numbers):
        return LogitsSummary(nan, pos_inf, neg_inf, 0, 0.0, 0.0, 0.0)
    mean = float(numbers.mean(dtype=np.float64))
    return LogitsSummary(nan, pos_inf, neg_inf, len(numbers), mean, float(numbers.min()), float(numbers.max()))
