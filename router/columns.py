"""What placement looks at, a column for each kind of number and a row for each worker of one model; pure.

Choosing among a thousand workers costs little more than among ten: a few operations on whole columns."""

import math
from typing import NamedTuple

import numpy as np

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Rows = np.ndarray[tuple[int], np.dtype[np.intp]]

_FIRST_ROWS = 16
WORK_FADES_S = 10.0
"""After so long a third of a worker's recent work still counts."""
_MOST_OCTAVES = 4.0
_PEAK_FADES_S = 600.0
"""And after so long a third of the most that it has ever done."""


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


class Columns:
    """The rows of one model's workers. A row is a worker's place in the prefix index."""

    def __init__(self) -> None:
        self._numbers = np.zeros((len(Numbers._fields), _FIRST_ROWS))
        self._work = np.zeros(_FIRST_ROWS)
        self._worked_at = np.zeros(_FIRST_ROWS)
        self._peak = np.zeros(_FIRST_ROWS)
        self._slowness = np.ones((2, _FIRST_ROWS))

    def __repr__(self) -> str:
        return f"<Columns of {self._numbers.shape[1]} rows>"

    def set(self, row: int, numbers: Numbers) -> None:
        """Notes what is known of a worker now."""
        while row >= self._numbers.shape[1]:
            self._grow()
        self._numbers[:, row] = numbers

    def clear(self, row: int) -> None:
        """The worker is gone."""
        self._numbers[:, row] = 0.0
        self._work[row] = self._peak[row] = 0.0
        self._slowness[:, row] = 1.0

    def worked(self, row: int, tokens: float, now: float) -> None:
        """A worker has computed that many tokens lately."""
        since = now - self._worked_at[row]
        self._work[row] = self._work[row] * math.exp(-since / WORK_FADES_S) + tokens
        self._peak[row] = max(self._peak[row] * math.exp(-since / _PEAK_FADES_S), self._work[row])
        self._worked_at[row] = now

    def eligible(self, now: float, silent_s: float, oldest_step_ms: float, num_tokens: int) -> Rows:
        """The workers that may be given a prompt of so many tokens now."""
        column = self.column
        fits = (column("is_open") > 0) & (now - column("heard_at") < silent_s)
        fits &= (column("step_age_ms") <= oldest_step_ms) & (column("context_length") > num_tokens)
        return np.flatnonzero(fits)

    def has_room(self, rows: Rows) -> bool:
        """Whether one of them would begin with another request at once, or nearly so."""
        return bool((self.column("requests")[rows] < self.column("most_requests")[rows]).any())

    def column(self, name: str) -> Floats:
        """All rows of one column, those of no worker among them."""
        found: Floats = self._numbers[Numbers._fields.index(name)]
        return found

    def compare(self, prefill_s: Floats, gap_s: Floats) -> None:
        """Notes how long each row takes for a token of a prompt and of a stream; 0 where it is not known."""
        for slowness, seconds in zip(self._slowness, (prefill_s, gap_s), strict=True):
            known = seconds > 0
            slowness[:] = 1.0
            if known.any():
                octaves = np.floor(np.log2(seconds[known] / seconds[known].min()))
                slowness[: len(known)][known] = 2.0 ** np.minimum(octaves, _MOST_OCTAVES)

    @property
    def prefill_slowness(self) -> Floats:
        """How many times longer than the fastest a row takes for prompts: a power of 2, so that chance decides little."""
        slowness: Floats = self._slowness[0]
        return slowness

    @property
    def decode_slowness(self) -> Floats:
        """Likewise for streams."""
        slowness: Floats = self._slowness[1]
        return slowness

    def recent_share(self, now: float) -> Floats:
        """What each worker has computed lately, the older the less, as a share of the most that it had ever."""
        recent: Floats = self._work * np.exp((self._worked_at - now) / WORK_FADES_S)
        recent /= np.maximum(self._peak, 1.0)
        return recent

    def _grow(self) -> None:
        self._numbers = np.concatenate([self._numbers, np.zeros_like(self._numbers)], axis=1)
        self._work = np.concatenate([self._work, np.zeros_like(self._work)])
        self._worked_at = np.concatenate([self._worked_at, np.zeros_like(self._worked_at)])
        self._peak = np.concatenate([self._peak, np.zeros_like(self._peak)])
        self._slowness = np.concatenate([self._slowness, np.ones_like(self._slowness)], axis=1)
