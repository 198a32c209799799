"""What placement looks at, a column for each kind of number and a row for each worker of one model; pure.

Choosing among a thousand workers costs little more than among ten: a few operations on whole columns."""

import math
from typing import NamedTuple

import numpy as np

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Rows = np.ndarray[tuple[int], np.dtype[np.intp]]
Table = np.ndarray[tuple[int, int], np.dtype[np.float64]]

_FIRST_ROWS = 16
WORK_DECAY_S = 10.0
"""After so long a third of a worker's recent work still counts."""
_PEAK_DECAY_S = 600.0
"""And after so long a third of the most that it has ever done."""
_HALF_UTILIZED_SHARE = 0.05
"""Of its most work: what has done less lately is idle more than half."""
_LATE_EVENT_S = 0.5
"""A worker that is heard of after so long may have been out of sight."""
_UTILIZATION_TTL_S = 0.05
"""So long it is not computed anew."""
_MAX_SLOWDOWN_LOG2 = 4.0


class WorkerRow(NamedTuple):
    """One worker's row, as its card, its events and its bookings say."""

    is_open: bool
    """It may be given work, if it has been heard of lately."""
    last_seen_at: float
    step_age_ms: float
    context_length: int
    block_size: int
    """Tokens; 0 where it has no blocks."""
    prefill_tokens: int
    """Prompt tokens that it has still to compute, with those that were just sent there."""
    used_blocks: int
    """Blocks that its running sequences hold, with those that were just sent there."""
    total_blocks: int
    requests: int
    """Running, waiting and just sent there."""
    max_num_seqs: int
    max_requests: int
    """With so many there another one would only wait."""
    waiting_requests: int
    """Requests that would wait for a place there if one more came, with that one."""
    free_tokens: float
    """Tokens that its memory has room for; without end where it has no blocks."""
    prefill_slowdown: float = 1.0
    """How many times longer than the fastest it takes for prompts: a power of 2, so that chance decides little."""
    decode_slowdown: float = 1.0
    """Likewise for streams."""
    utilization: float = 0.0
    """Near 1 where it has computed much of late, beside the most that it ever had; 0 where it has been idle."""
    last_chosen: int = 0
    """A number that is larger the later it was chosen last; 0 for never."""


class _Eligible(NamedTuple):
    """Which rows were eligible when that was last looked at, and how long and for what they must still be."""

    rows: Rows
    until: float
    min_context: float


_FIRST_DERIVED = WorkerRow._fields.index("prefill_slowdown")
"""The first of those that its own word does not set."""
_COLUMN = {name: at for at, name in enumerate(WorkerRow._fields)}


class WorkerTable:
    """The rows of one model's workers. A row is a worker's place in the prefix index.

    Who has been silent for `silent_s`, or is at a step older than `max_step_age_ms`, gets no new work."""

    def __init__(self, silent_s: float, max_step_age_ms: float) -> None:
        self._silent_s = silent_s
        self._max_step_age_ms = max_step_age_ms
        self._values = np.zeros((len(WorkerRow._fields), _FIRST_ROWS))
        self._work = np.zeros(_FIRST_ROWS)
        self._worked_at = np.zeros(_FIRST_ROWS)
        self._peak = np.zeros(_FIRST_ROWS)
        self._utilization_at = -math.inf
        self._eligible = _Eligible(np.zeros(0, np.intp), -math.inf, 0.0)

    def __repr__(self) -> str:
        return f"<WorkerTable of {self._values.shape[1]} rows>"

    def add_worker(self, row: int) -> None:
        """A worker has that row from now on."""
        while row >= self._values.shape[1]:
            self._grow()
        self.clear(row)

    def update(self, row: int, values: WorkerRow) -> None:
        """Notes what is known of a worker now."""
        column = self._values[:, row]
        was_late, is_late = column[2] > self._max_step_age_ms, values.step_age_ms > self._max_step_age_ms
        is_back = values.last_seen_at - column[1] > _LATE_EVENT_S
        if is_back or was_late != is_late or (values.is_open, values.context_length) != (column[0], column[3]):
            self._eligible = self._eligible._replace(until=-math.inf)
        column[:_FIRST_DERIVED] = values[:_FIRST_DERIVED]

    def matches(self, row: int, values: WorkerRow) -> bool:
        """Whether that is what was noted of a worker last."""
        return np.array_equal(self._values[:_FIRST_DERIVED, row], values[:_FIRST_DERIVED])

    def clear(self, row: int) -> None:
        """The worker is gone."""
        self._eligible = self._eligible._replace(until=-math.inf)
        self._values[:, row] = 0.0
        self._values[_COLUMN["prefill_slowdown"], row] = self._values[_COLUMN["decode_slowdown"], row] = 1.0
        self._work[row] = self._peak[row] = 0.0

    def mark_chosen(self, row: int, turn: int) -> None:
        """It was that worker's turn."""
        self._values[_COLUMN["last_chosen"], row] = turn

    def record_work(self, row: int, tokens: float, now: float) -> None:
        """A worker has computed that many tokens lately."""
        since = now - self._worked_at[row]
        self._work[row] = self._work[row] * math.exp(-since / WORK_DECAY_S) + tokens
        self._peak[row] = max(self._peak[row] * math.exp(-since / _PEAK_DECAY_S), self._work[row])
        self._worked_at[row] = now

    def eligible(self, now: float, num_tokens: int = 0) -> Rows:
        """The workers that may be given a prompt of so many tokens now."""
        if now < self._eligible.until and num_tokens < self._eligible.min_context:
            return self._eligible.rows
        is_open, last_seen_at, step_age_ms, context_length = self._values[:4]
        fits = last_seen_at > now - self._silent_s
        fits &= is_open > 0
        fits &= step_age_ms <= self._max_step_age_ms
        rows: Rows = fits.nonzero()[0]
        if len(rows):
            until = float(last_seen_at[rows].min()) + self._silent_s
            self._eligible = _Eligible(rows, until, float(context_length[rows].min()))
        long_enough: Rows = rows[context_length[rows] > num_tokens]
        return long_enough

    def columns_of(self, rows: Rows, now: float) -> Table:
        """All that is known of some rows, a column for each number; not to be written to."""
        if now - self._utilization_at > _UTILIZATION_TTL_S:
            self._update_utilization(now)
        if is_contiguous(rows):
            return self._values[:, : len(rows)]
        return self._values.take(rows, axis=1)

    def has_capacity(self, rows: Rows) -> bool:
        """Whether one of them would begin with another request at once, or nearly so."""
        return bool((self.column("requests")[rows] < self.column("max_requests")[rows]).any())

    def column(self, name: str) -> Floats:
        """All rows of one column, those of no worker among them."""
        found: Floats = self._values[_COLUMN[name]]
        return found

    def update_slowdowns(self, prefill_s_per_token: Floats, itl_s: Floats) -> None:
        """Notes how long each row takes for a token of a prompt and of a stream; 0 where it is not known."""
        for name, seconds in (("prefill_slowdown", prefill_s_per_token), ("decode_slowdown", itl_s)):
            known = (seconds > 0).nonzero()[0]
            slowdown = self.column(name)
            slowdown[:] = 1.0
            if len(known):
                octaves = np.floor(np.log2(seconds[known] / seconds[known].min()))
                slowdown[known] = 2.0 ** np.minimum(octaves, _MAX_SLOWDOWN_LOG2)

    def _update_utilization(self, now: float) -> None:
        self._utilization_at = now
        recent = self._work * np.exp((self._worked_at - now) / WORK_DECAY_S) / np.maximum(self._peak, 1.0)
        self.column("utilization")[:] = recent / (recent + _HALF_UTILIZED_SHARE)

    def _grow(self) -> None:
        self._values = np.concatenate([self._values, np.zeros_like(self._values)], axis=1)
        self._work = np.concatenate([self._work, np.zeros_like(self._work)])
        self._worked_at = np.concatenate([self._worked_at, np.zeros_like(self._worked_at)])
        self._peak = np.concatenate([self._peak, np.zeros_like(self._peak)])


def is_contiguous(rows: Rows) -> bool:
    """Whether these are the first rows, without a gap: what is known of them needs no copy."""
    return bool(rows[-1] + 1 == len(rows))
