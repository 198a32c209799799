"""Decides whether another worker computes a prompt for the one that gets the request (decision 0062).

That is called a *remote prefill*: the worker of the request fetches the blocks while the other computes them, and
then samples. A remote prefill pays if the first token comes earlier, or if it spares the streams running at the
request's worker:

    own worker     |-- queued there --|---- missing tokens ----|* first token
    its streams    .....................|  all of them slower  |.....
    another one    |-- queued --|-- missing there --|-- move --|* first token

All times are estimates, and only time depends on them: even if a remote prefill fails, its prompt is computed."""

from typing import NamedTuple

import numpy as np

from tokenbus.protocol.wire.messages import WorkerRole
from tokenbus.router.placement.worker_table import Floats, Rows

MIN_REMOTE_PREFILL_TOKENS = 512
"""Shorter prompts are computed where they are answered; a router setting overrides this."""
_MIN_MISSING_SHARE = 0.5
"""Where most of a prompt is already cached, the rest is computed there."""
_STREAM_WEIGHT = 0.25
"""A running stream is delayed by this share of the time that a prompt is computed beside it."""
_DECODE_PATIENCE = 2.0
"""A decode worker computes a long prompt itself only if another would take this many times as long."""
_UNKNOWN_TOKEN_S = 0.01
"""The time to compute a token before any has been observed: a slow CPU's, so that no wait is too short."""


class PrefillState(NamedTuple):
    """The work of all workers of a model, by row, before the first token of a prompt."""

    missing_tokens: Floats
    """Tokens of the prompt that each lacks."""
    queued_tokens: Floats
    """Tokens of other prompts that each has yet to compute."""
    token_s: Floats
    """Seconds that each takes to compute a token; 0 if unknown."""


class Prefill(NamedTuple):
    """The same for one worker."""

    missing_tokens: float
    queued_tokens: float
    token_s: float

    @property
    def compute_s(self) -> float:
        """The time to compute this prompt alone."""
        return self.missing_tokens * self.token_s

    @property
    def first_token_s(self) -> float:
        """The time until the whole prompt is computed."""
        return (self.queued_tokens + self.missing_tokens) * self.token_s


class RemotePrefillChoice(NamedTuple):
    """The worker that should compute a prompt for another one."""

    row: int
    seconds: float
    """The time until its blocks should be available."""


def is_long(prompt_tokens: float, missing_tokens: float, min_tokens: int) -> bool:
    """Whether enough of a prompt is missing for a remote prefill to pay; with a `min_tokens` of 0 it never does."""
    return 0 < min_tokens <= missing_tokens and missing_tokens >= _MIN_MISSING_SHARE * prompt_tokens


def pays(own: Prefill, num_streams: int, role: WorkerRole, remote_prefill_s: float) -> bool:
    """Whether a remote prefill that takes `remote_prefill_s` beats having a worker of this role, with
    `num_streams` requests, compute the prompt itself."""
    delayed_s = own.compute_s * num_streams * _STREAM_WEIGHT
    patience = _DECODE_PATIENCE if role is WorkerRole.DECODE else 1.0
    return remote_prefill_s < patience * own.first_token_s + delayed_s


def choose(
    state: PrefillState, rows: Rows, own: Prefill, num_streams: int, role: WorkerRole, move_s: float
) -> RemotePrefillChoice | None:
    """Returns the worker in `rows` (at least one) that would finish computing a prompt first, if that pays.

    `own` is what the worker of the request would compute itself, and `move_s` the time to move what it lacks there."""
    token_s = np.where(state.token_s > 0, state.token_s, _UNKNOWN_TOKEN_S)
    seconds: Floats = (state.queued_tokens[rows] + state.missing_tokens[rows]) * token_s[rows]
    first = int(seconds.argmin())
    remote_prefill_s = float(seconds[first]) + move_s
    own = own if own.token_s > 0 else own._replace(token_s=_UNKNOWN_TOKEN_S)
    return (
        RemotePrefillChoice(int(rows[first]), remote_prefill_s)
        if pays(own, num_streams, role, remote_prefill_s)
        else None
    )
