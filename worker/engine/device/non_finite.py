"""Finds numbers that are not finite, NaN and infinity (decision 0066).

Of each step's logits, some rows are summarized, which takes a fraction of a millisecond, and the shares of rows that
are not finite are discarded. Keys and values are tested as they lie in memory."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Listing

import numpy as np
import structlog

from tokenbus.worker.engine.device.draws import Matrix
from tokenbus.worker.engine.device.sampler import Sampler, summarize
from tokenbus.worker.engine.scheduling.plan import LogitsSummary, Outcome, ScheduledTokens, SeenLogits, Undone
from tokenbus.worker.files.number_types import NumberType

_CHUNK = 1 << 15
"""Numbers tested at a time, few enough for the processor's cache."""
_INTERVAL_S = 1.0
_MAX_POISONED = 8
"""The most non-finite rows summarized per step; there may be as many as sequences."""
_NOTHING = SeenLogits()
_STRIDE = 1_024
"""One logit in this many is checked. Each is a product with the whole last state, which is non-finite throughout if any
of its numbers is, since normalization divides by its length. All logits of 64 rows would take a few milliseconds."""


def all_finite(data: bytes | bytearray | memoryview, kind: NumberType) -> bool:
    """Whether all numbers are finite in data that consists only of numbers of this type, in whole groups.

    A number that is not finite has all bits of its exponent set. Testing bits takes a sixteenth of the time of
    `numpy.isfinite` for 16 bits. A quantized type has a few 16-bit scales at the beginning of each group; its other
    bits always represent finite numbers."""
    words = np.frombuffer(data, f"<u{kind.width // 8}")
    if kind.num_scales:
        words = words.reshape(-1, kind.group_bytes * 8 // kind.width)[:, : kind.num_scales]
    return not any(
        (words[start : start + _CHUNK] & kind.exponent).max() == kind.exponent for start in range(0, len(words), _CHUNK)
    )


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


def sort_out(
    batch: Listing[ScheduledTokens], rows: Matrix, sampler: Sampler, health: LogitsHealth
) -> dict[int, Outcome]:
    """Returns the outcome of each share, by its lane. `rows` are the logits after the last token of each share; they
    are overwritten."""
    poisoned = are_poisoned(rows)
    health.look(batch, rows, poisoned)
    outcomes: dict[int, Outcome] = {
        part.lane: Undone.POISONED if bad else None for part, bad in zip(batch, poisoned, strict=True)
    }
    sampled = [n for n, part in enumerate(batch) if part.samples and not poisoned[n]]
    if sampled:
        # As long as all is well, the shares that sample come first; then nothing is copied.
        wanted = rows[: len(sampled)] if sampled[-1] == len(sampled) - 1 else rows[sampled]
        results = sampler.sample(wanted, [batch[n].sequence for n in sampled])
        outcomes |= {batch[n].lane: one for n, one in zip(sampled, results, strict=True)}
    return outcomes


def are_poisoned(rows: Matrix) -> list[bool]:
    """Returns for each row whether it has non-finite logits. Minus infinity is allowed: it rules tokens out."""
    seen = rows[:, ::_STRIDE]
    return [not bool((row < np.inf).all()) for row in seen]
