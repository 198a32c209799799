"""The numbers that placement compares: a column for each kind of number, a row for each worker of one model.

Choosing among a thousand workers costs little more than among ten: a few numpy operations on whole columns.

Most numbers come from a worker itself. Some are derived here. *Utilization* is a worker's recent work as a share of
the most it has ever done: 0 when idle, near 1 at its usual peak. It spreads requests that arrive one by one, whose load
is gone before the next arrives. *Slowdown* compares its speed with the fastest worker's, in powers of two, so that
small differences don't decide. *Wait* is the time until it would begin to compute another prompt that has a place and
memory. *Last chosen* orders the workers by when they got their last request."""

import math
from typing import NamedTuple

import numpy as np

from tokenbus.protocol.wire import limits
from tokenbus.router.workers.speed import StepTimes
from tokenbus.router.workers.worker import WorkerRow

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Rows = np.ndarray[tuple[int], np.dtype[np.intp]]
Table = np.ndarray[tuple[int, int], np.dtype[np.float64]]

_FIRST_ROWS = 16
WORK_DECAY_S = 10.0
"""After this time a third of a worker's recent work still counts."""
_PEAK_DECAY_S = 600.0
"""After this time a third of its peak work still counts."""
_HALF_UTILIZED_SHARE = 0.05
"""The share of its peak work at which a worker counts as half utilized."""
_LATE_EVENT_S = 0.9
"""After this much silence a worker may have been ineligible, so eligibility is recomputed."""
_UTILIZATION_TTL_S = 0.05
"""The time for which a computed utilization is reused."""
_MAX_SLOWDOWN_LOG2 = 4.0
_DECODE_STEPS = 1.5
"""A prompt waits for half a decode step that is in progress, and its own step also has the streams' tokens."""


class _Eligible(NamedTuple):
    """The rows eligible when last computed. They remain so until `until`, for prompts shorter than `min_context`."""

    rows: Rows
    serving: Rows
    """Those of them that compute no prompts for others."""
    until: float
    min_context: float


_FIRST_DERIVED = WorkerRow._fields.index("prefill_slowdown")
"""The first number that `update` does not set."""
_COLUMN = {name: at for at, name in enumerate(WorkerRow._fields)}


class WorkerTable:
    """The numbers of one model's workers.

    A worker that counts as silent, or whose engine's step is older than `max_step_age_ms`, is not eligible."""

    def __init__(self, max_step_age_ms: float) -> None:
        self._max_step_age_ms = max_step_age_ms
        self._values = np.zeros((len(WorkerRow._fields), _FIRST_ROWS))
        self._work = np.zeros(_FIRST_ROWS)
        self._worked_at = np.zeros(_FIRST_ROWS)
        self._peak = np.zeros(_FIRST_ROWS)
        self._utilization_at = -math.inf
        self._known: list[WorkerRow | None] = [None] * _FIRST_ROWS
        """Each row's last values: to compare and to write few numbers in Python is quicker than in numpy."""
        no_rows = np.zeros(0, np.intp)
        self._eligible = _Eligible(no_rows, no_rows, -math.inf, 0.0)
        self._times = StepTimes()

    def __repr__(self) -> str:
        return f"<WorkerTable of {self._values.shape[1]} rows>"

    def add_worker(self, row: int) -> None:
        """Makes room for a worker in that row."""
        while row >= self._values.shape[1]:
            self._grow()
        self.clear(row)

    def update(self, row: int, values: WorkerRow) -> None:
        """Sets a worker's own numbers."""
        known, self._known[row] = self._known[row], values
        if known is None:
            self._eligible = self._eligible._replace(until=-math.inf)
            self._values[:_FIRST_DERIVED, row] = values[:_FIRST_DERIVED]
        else:
            # no other change to a row can affect eligibility before the time last computed
            was_late, is_late = known.step_age_ms > self._max_step_age_ms, values.step_age_ms > self._max_step_age_ms
            self.mark_heard(row, values.silent_at)
            if was_late != is_late or _kind(values) != _kind(known):
                self._eligible = self._eligible._replace(until=-math.inf)
            for at in range(_FIRST_DERIVED):
                if values[at] != known[at]:
                    self._values[at, row] = values[at]
        if values.requests and (known is None or not known.requests) and not self._peak[row]:
            self._utilization_at = -math.inf  # its first requests
        if known is None or values.requests != known.requests or values.prefill_tokens != known.prefill_tokens:
            self._values[_COLUMN["wait_s"], row] = self._wait_s(row, values)

    def mark_heard(self, row: int, silent_at: float) -> None:
        """Records a sign of life: the worker counts as silent from `silent_at` on."""
        before = self._values[1, row]
        if not 0.0 <= silent_at - before <= _LATE_EVENT_S:
            self._eligible = self._eligible._replace(until=-math.inf)
        self._values[1, row] = silent_at

    def matches(self, row: int, values: WorkerRow) -> bool:
        """Whether a worker's own numbers equal these."""
        return np.array_equal(self._values[:_FIRST_DERIVED, row], values[:_FIRST_DERIVED])

    def clear(self, row: int) -> None:
        """Clears the row of a removed worker."""
        self._eligible = self._eligible._replace(until=-math.inf)
        self._known[row] = None
        self._values[:, row] = 0.0
        self._values[_COLUMN["prefill_slowdown"], row] = self._values[_COLUMN["decode_slowdown"], row] = 1.0
        self._work[row] = self._peak[row] = 0.0

    def mark_chosen(self, row: int, turn: int) -> None:
        """Records that a worker was chosen; `turn` counts up."""
        self._values[_COLUMN["last_chosen"], row] = turn

    def record_work(self, row: int, tokens: float, now: float) -> None:
        """Records that a worker has just computed that many tokens."""
        since = now - self._worked_at[row]
        self._work[row] = self._work[row] * math.exp(-since / WORK_DECAY_S) + tokens
        self._peak[row] = max(self._peak[row] * math.exp(-since / _PEAK_DECAY_S), self._work[row])
        self._worked_at[row] = now

    def eligible(self, now: float, num_tokens: int = 0) -> Rows:
        """Returns the rows of workers that may be given a prompt of that length now."""
        if now < self._eligible.until and num_tokens < self._eligible.min_context:
            return self._eligible.rows
        is_open, silent_at, step_age_ms, context_length = self._values[:4]
        fits = silent_at > now
        fits &= is_open > 0
        fits &= step_age_ms <= self._max_step_age_ms
        rows: Rows = fits.nonzero()[0]
        if len(rows):
            until = float(silent_at[rows].min())
            self._eligible = _Eligible(rows, self._serving(rows), until, float(context_length[rows].min()))
        long_enough: Rows = rows[context_length[rows] > num_tokens]
        return long_enough

    def without_ejected(self, rows: Rows, now: float) -> Rows:
        """Filters rows to those not ejected, or returns all if none remain."""
        admitted: Rows = rows[self.column("ejected_until")[rows] <= now]
        return admitted if len(admitted) else rows

    def without_prefill(self, rows: Rows) -> Rows:
        """Filters rows to those that compute no prompts for others, or returns all if none remain."""
        return self._eligible.serving if rows is self._eligible.rows else self._serving(rows)

    def _serving(self, rows: Rows) -> Rows:
        serving: Rows = rows[self.column("is_prefill")[rows] == 0]
        return serving if len(serving) else rows

    def free_prefill(self, rows: Rows, num_tokens: int) -> Rows:
        """Filters rows to those that compute prompts for others and can take one more, of that many tokens."""
        is_free = self.column("is_prefill")[rows] > 0
        is_free &= self.column("requests")[rows] < limits.MAX_REMOTE_PREFILLS
        is_free &= self.column("free_tokens")[rows] >= num_tokens
        free: Rows = rows[is_free]
        return free

    def columns_of(self, rows: Rows, now: float) -> Table:
        """Returns all numbers of some rows, one array per number; often a view that must not be written to."""
        if now - self._utilization_at > _UTILIZATION_TTL_S:
            self._update_utilization(now)
        if is_contiguous(rows):
            return self._values[:, : len(rows)]  # no copy
        return self._values.take(rows, axis=1)

    def has_capacity(self, rows: Rows) -> bool:
        """Whether any of these rows may take another request: it would start soon and have enough memory."""
        has_place = self.column("requests")[rows] < self.column("max_requests")[rows]
        return bool((has_place & (self.column("free_tokens")[rows] > 0)).any())

    def column(self, name: str) -> Floats:
        """Returns one column with all rows, including those without a worker."""
        found: Floats = self._values[_COLUMN[name]]
        return found

    def update_speeds(self, prefill_s_per_token: Floats, itl_s: Floats, times: StepTimes) -> None:
        """Compares the speeds of all rows, given in seconds per prompt token and per stream token; 0 is unknown.
        `times` are those of the fastest."""
        for name, seconds in (("prefill_slowdown", prefill_s_per_token), ("decode_slowdown", itl_s)):
            known = (seconds > 0).nonzero()[0]
            slowdown = self.column(name)
            slowdown[:] = 1.0
            if len(known):
                exponents = np.floor(np.log2(seconds[known] / seconds[known].min()))
                slowdown[known] = 2.0 ** np.minimum(exponents, _MAX_SLOWDOWN_LOG2)
        self._times = times
        queued, wait_s = self.column("prefill_tokens"), self.column("wait_s")
        wait_s[:] = times.prompt_token_s * queued + times.prompt_step_s * (queued > 0)
        wait_s *= self.column("prefill_slowdown")
        has_streams = self.column("requests") > 0
        wait_s += _DECODE_STEPS * times.decode_step_s * self.column("decode_slowdown") * has_streams

    def slowdown(self, row: int, *, of_prompts: bool) -> float:
        """Returns how many times as long as the fastest worker one takes for prompts, or else for streams."""
        name = "prefill_slowdown" if of_prompts else "decode_slowdown"
        return float(self._values[_COLUMN[name], row])

    def _wait_s(self, row: int, values: WorkerRow) -> float:
        times, wait_s = self._times, 0.0
        if values.prefill_tokens:
            step_s = times.prompt_step_s + times.prompt_token_s * values.prefill_tokens
            wait_s += step_s * self.slowdown(row, of_prompts=True)
        if values.requests:
            wait_s += _DECODE_STEPS * times.decode_step_s * self.slowdown(row, of_prompts=False)
        return wait_s

    def _update_utilization(self, now: float) -> None:
        self._utilization_at = now
        recent = self._work * np.exp((self._worked_at - now) / WORK_DECAY_S) / np.maximum(self._peak, 1.0)
        # nonlinear, so that a little work already distinguishes a busy worker from an idle one
        utilization = recent / (recent + _HALF_UTILIZED_SHARE)
        has_worked = self._peak > 0
        # a worker that has only received its first requests would attract all others too, until it reports any work
        is_starting = ~has_worked & (self.column("requests") > 0)
        if is_starting.any() and has_worked.any():
            utilization[is_starting] = np.median(utilization[has_worked])
        self.column("utilization")[:] = utilization

    def _grow(self) -> None:
        self._known += [None] * len(self._known)
        self._values = np.concatenate([self._values, np.zeros_like(self._values)], axis=1)
        self._work = np.concatenate([self._work, np.zeros_like(self._work)])
        self._worked_at = np.concatenate([self._worked_at, np.zeros_like(self._worked_at)])
        self._peak = np.concatenate([self._peak, np.zeros_like(self._peak)])


def _kind(values: WorkerRow) -> tuple[float, float, float]:
    return values.is_open, values.context_length, values.is_prefill


def is_contiguous(rows: Rows) -> bool:
    """Whether these are the first rows, without gaps, so that their numbers need no copy."""
    return bool(rows[-1] + 1 == len(rows))
