"""Decides whether another worker computes a prompt for the one that gets the request; pure.

That is called a *leg*: the worker of the request fetches the blocks while the other one goes on, and samples. It pays
where it brings the first token earlier, or spares the streams that run where the request goes:

    own worker     |-- queued there --|---- missing tokens ----|* first token
    its streams    .....................|  all of them slower  |.....
    another one    |-- queued --|-- missing there --|-- move --|* first token

All times are estimates, and nothing but time depends on them: whatever becomes of a leg, its prompt is computed."""

from typing import NamedTuple

import numpy as np

from tokenbus.protocol.wire.messages import WorkerRole
from tokenbus.router.placement.worker_table import Floats, Rows

MIN_LEG_TOKENS = 512
"""Shorter prompts are computed where they are answered, unless a router is told another number."""
_MIN_MISSING_SHARE = 0.5
"""Where most of a prompt is cached already, the rest is computed there."""
_STREAM_WEIGHT = 0.25
"""A running stream is delayed by so much of the time for which a prompt is computed beside it."""
_DECODE_PATIENCE = 2.0
"""A decode worker computes a long prompt itself only where another one would take so many times as long."""
_UNKNOWN_TOKEN_S = 0.01
"""The time to compute a token before any worker has shown one: that of a slow CPU, so that none waits too short."""


class PrefillState(NamedTuple):
    """The work of all workers of a model, by row, before the first token of a prompt."""

    missing_tokens: Floats
    """Tokens of the prompt that each does not have."""
    queued_tokens: Floats
    """Tokens of other prompts that each has to compute."""
    token_s: Floats
    """The time in which each computes a token; 0 if unknown."""


class Prefill(NamedTuple):
    """The same of one worker."""

    missing_tokens: float
    queued_tokens: float
    token_s: float

    @property
    def compute_s(self) -> float:
        """The time for the prompt alone."""
        return self.missing_tokens * self.token_s

    @property
    def first_token_s(self) -> float:
        """The time until the whole prompt is computed."""
        return (self.queued_tokens + self.missing_tokens) * self.token_s


class LegChoice(NamedTuple):
    """The worker that should compute a prompt for another one."""

    row: int
    seconds: float
    """The time after which its blocks should be there."""


def is_long(prompt_tokens: float, missing_tokens: float, min_tokens: int) -> bool:
    """Whether so much of a prompt is missing that a leg may pay; with a `min_tokens` of 0 it never does."""
    return 0 < min_tokens <= missing_tokens and missing_tokens >= _MIN_MISSING_SHARE * prompt_tokens


def pays(own: Prefill, num_streams: int, role: WorkerRole, leg_s: float) -> bool:
    """Whether a leg that takes `leg_s` is better than that a worker of this role, which has `num_streams` requests,
    computes a prompt itself."""
    delayed_s = own.compute_s * num_streams * _STREAM_WEIGHT
    patience = _DECODE_PATIENCE if role is WorkerRole.DECODE else 1.0
    return leg_s < patience * own.first_token_s + delayed_s


def choose(
    state: PrefillState, rows: Rows, own: Prefill, num_streams: int, role: WorkerRole, move_s: float
) -> LegChoice | None:
    """Returns the one of the workers in `rows`, at least one, that would compute a prompt first, if that pays.

    `own` is what the worker of the request would do itself, and `move_s` the time for what it lacks to move there."""
    token_s = np.where(state.token_s > 0, state.token_s, _UNKNOWN_TOKEN_S)
    seconds: Floats = (state.queued_tokens[rows] + state.missing_tokens[rows]) * token_s[rows]
    first = int(seconds.argmin())
    leg_s = float(seconds[first]) + move_s
    own = own if own.token_s > 0 else own._replace(token_s=_UNKNOWN_TOKEN_S)
    return LegChoice(int(rows[first]), leg_s) if pays(own, num_streams, role, leg_s) else None
