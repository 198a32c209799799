"""What placement looks at, a column for each kind of number and a row for each worker of one model; pure.

Choosing among a thousand workers costs little more than among ten: a few operations on whole columns."""

import math
from typing import NamedTuple

import numpy as np

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Rows = np.ndarray[tuple[int], np.dtype[np.intp]]
Table = np.ndarray[tuple[int, int], np.dtype[np.float64]]

_FIRST_ROWS = 16
WORK_FADES_S = 10.0
"""After so long a third of a worker's recent work still counts."""
_PEAK_FADES_S = 600.0
"""And after so long a third of the most that it has ever done."""
_IDLE_SHARE = 0.05
"""Of its most work: what has done less lately is idle more than half."""
_SOON_HEARD_S = 0.5
"""A worker that is heard of after so long may have been out of sight."""
_SHARE_HOLDS_S = 0.05
"""So long it is not computed anew."""
_MOST_OCTAVES = 4.0


class Numbers(NamedTuple):
    """One worker's row, as its card, its events and its bookings say."""

    is_open: bool
    """It may be given work, if it has been heard of lately."""
    heard_at: float
    step_age_ms: float
    context_length: int
    block_size: int
    """Tokens; 0 where it has no blocks."""
    prefill_tokens: int
    """Prompt tokens that it has still to compute, with those that were just sent there."""
    held_blocks: int
    """Blocks that its running sequences hold, with those that were just sent there."""
    total_blocks: int
    requests: int
    """Running, waiting and just sent there."""
    max_num_seqs: int
    most_requests: int
    """With so many there another one would only wait."""
    waits: int
    """Requests that would wait for a place there if one more came, with that one."""
    free_tokens: float
    """Tokens that its memory has room for; without end where it has no blocks."""
    prefill_slowness: float = 1.0
    """How many times longer than the fastest it takes for prompts: a power of 2, so that chance decides little."""
    decode_slowness: float = 1.0
    """Likewise for streams."""
    busyness: float = 0.0
    """Near 1 where it has computed much of late, beside the most that it ever had; 0 where it has been idle."""
    turn: int = 0
    """A number that is larger the later it was chosen last; 0 for never."""


class _Ready(NamedTuple):
    """Which rows were eligible when that was last looked at, and how long and for what they must still be."""

    rows: Rows
    until: float
    least_context: float


_SAID = Numbers._fields.index("prefill_slowness")
"""The first of those that its own word does not set."""
_AT = {name: at for at, name in enumerate(Numbers._fields)}


class Columns:
    """The rows of one model's workers. A row is a worker's place in the prefix index.

    Who has been silent for `silent_s`, or is at a step older than `oldest_step_ms`, gets no new work."""

    def __init__(self, silent_s: float, oldest_step_ms: float) -> None:
        self._silent_s = silent_s
        self._oldest_step_ms = oldest_step_ms
        self._numbers = np.zeros((len(Numbers._fields), _FIRST_ROWS))
        self._work = np.zeros(_FIRST_ROWS)
        self._worked_at = np.zeros(_FIRST_ROWS)
        self._peak = np.zeros(_FIRST_ROWS)
        self._shared_at = -math.inf
        self._ready = _Ready(np.zeros(0, np.intp), -math.inf, 0.0)

    def __repr__(self) -> str:
        return f"<Columns of {self._numbers.shape[1]} rows>"

    def join(self, row: int) -> None:
        """A worker has that row from now on."""
        while row >= self._numbers.shape[1]:
            self._grow()
        self.clear(row)

    def set(self, row: int, numbers: Numbers) -> None:
        """Notes what is known of a worker now."""
        column = self._numbers[:, row]
        was_late, is_late = column[2] > self._oldest_step_ms, numbers.step_age_ms > self._oldest_step_ms
        is_back = numbers.heard_at - column[1] > _SOON_HEARD_S
        if is_back or was_late != is_late or (numbers.is_open, numbers.context_length) != (column[0], column[3]):
            self._ready = self._ready._replace(until=-math.inf)
        column[:_SAID] = numbers[:_SAID]

    def says(self, row: int, numbers: Numbers) -> bool:
        """Whether that is what was noted of a worker last."""
        return np.array_equal(self._numbers[:_SAID, row], numbers[:_SAID])

    def clear(self, row: int) -> None:
        """The worker is gone."""
        self._ready = self._ready._replace(until=-math.inf)
        self._numbers[:, row] = 0.0
        self._numbers[_AT["prefill_slowness"], row] = self._numbers[_AT["decode_slowness"], row] = 1.0
        self._work[row] = self._peak[row] = 0.0

    def choose(self, row: int, turn: int) -> None:
        """It was that worker's turn."""
        self._numbers[_AT["turn"], row] = turn

    def worked(self, row: int, tokens: float, now: float) -> None:
        """A worker has computed that many tokens lately."""
        since = now - self._worked_at[row]
        self._work[row] = self._work[row] * math.exp(-since / WORK_FADES_S) + tokens
        self._peak[row] = max(self._peak[row] * math.exp(-since / _PEAK_FADES_S), self._work[row])
        self._worked_at[row] = now

    def eligible(self, now: float, num_tokens: int = 0) -> Rows:
        """The workers that may be given a prompt of so many tokens now."""
        if now < self._ready.until and num_tokens < self._ready.least_context:
            return self._ready.rows
        is_open, heard_at, step_age_ms, context_length = self._numbers[:4]
        fits = heard_at > now - self._silent_s
        fits &= is_open > 0
        fits &= step_age_ms <= self._oldest_step_ms
        rows: Rows = fits.nonzero()[0]
        if len(rows):
            until = float(heard_at[rows].min()) + self._silent_s
            self._ready = _Ready(rows, until, float(context_length[rows].min()))
        long_enough: Rows = rows[context_length[rows] > num_tokens]
        return long_enough

    def of(self, rows: Rows, now: float) -> Table:
        """All that is known of some rows, a column for each number; not to be written to."""
        if now - self._shared_at > _SHARE_HOLDS_S:
            self._share(now)
        if is_dense(rows):
            return self._numbers[:, : len(rows)]
        return self._numbers.take(rows, axis=1)

    def has_room(self, rows: Rows) -> bool:
        """Whether one of them would begin with another request at once, or nearly so."""
        return bool((self.column("requests")[rows] < self.column("most_requests")[rows]).any())

    def column(self, name: str) -> Floats:
        """All rows of one column, those of no worker among them."""
        found: Floats = self._numbers[_AT[name]]
        return found

    def compare(self, prefill_s: Floats, gap_s: Floats) -> None:
        """Notes how long each row takes for a token of a prompt and of a stream; 0 where it is not known."""
        for name, seconds in (("prefill_slowness", prefill_s), ("decode_slowness", gap_s)):
            known = (seconds > 0).nonzero()[0]
            slowness = self.column(name)
            slowness[:] = 1.0
            if len(known):
                octaves = np.floor(np.log2(seconds[known] / seconds[known].min()))
                slowness[known] = 2.0 ** np.minimum(octaves, _MOST_OCTAVES)

    def _share(self, now: float) -> None:
        self._shared_at = now
        recent = self._work * np.exp((self._worked_at - now) / WORK_FADES_S) / np.maximum(self._peak, 1.0)
        self.column("busyness")[:] = recent / (recent + _IDLE_SHARE)

    def _grow(self) -> None:
        self._numbers = np.concatenate([self._numbers, np.zeros_like(self._numbers)], axis=1)
        self._work = np.concatenate([self._work, np.zeros_like(self._work)])
        self._worked_at = np.concatenate([self._worked_at, np.zeros_like(self._worked_at)])
        self._peak = np.concatenate([self._peak, np.zeros_like(self._peak)])


def is_dense(rows: Rows) -> bool:
    """Whether these are the first rows, without a gap: what is known of them needs no copy."""
    return bool(rows[-1] + 1 == len(rows))
