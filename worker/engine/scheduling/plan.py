"""Step plans: the tokens that a step computes, its results for each sequence, and a summary of its logits."""

import enum
from array import array
from typing import NamedTuple

import msgspec

from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.worker.contract import engine_output
from tokenbus.worker.engine.kv.ops import KvOp
from tokenbus.worker.engine.kv.prefix_tree import BlockLabel
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, Sequence


class ScheduledTokens(NamedTuple):
    """One sequence's share of a step: `num_tokens` of its tokens from `start` on."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the step samples a token: only after the sequence's last one."""
        return self.start + self.num_tokens == self.sequence.num_tokens

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def first_row(self) -> int | None:
        """The first of its positions whose logits give a wanted log probability of the prompt; so do all after it. None
        if there is none."""
        first = self.sequence.first_row
        return None if first is None or first >= self.end else max(first, self.start)

    @property
    def lane(self) -> int:
        assert self.sequence.lane is not None, self.sequence
        return self.sequence.lane

    @property
    def token_ids(self) -> "array[int]":
        return self.sequence.token_ids[self.start : self.start + self.num_tokens]


class StepPlan(NamedTuple):
    """The shares of one step, in the order in which the runner returns their tokens."""

    scheduled: tuple[ScheduledTokens, ...]
    started: tuple[Sequence, ...] = ()
    """Sequences that have just been given their first lane."""
    kv_ops: tuple[KvOp, ...] = ()
    """Changes to the lanes, applied first."""
    preempted: tuple[Sequence, ...] = ()
    """Sequences that have lost their lane since the previous plan."""
    labels: tuple[tuple[int, BlockLabel], ...] = ()
    """The blocks of the copies that these changes make, by copy id."""

    @property
    def num_tokens(self) -> int:
        return sum(one.num_tokens for one in self.scheduled)

    @property
    def is_ahead(self) -> bool:
        """Whether it computes a turn that is only expected, and nothing else."""
        return any(one.sequence.is_ahead for one in self.scheduled)

    def batches(self) -> list[list[ScheduledTokens]]:
        """Returns the shares in batches that can be computed together: one for each adapter set, then those of
        suspects, apart from all others.

        Every batch is part of the step, so no set waits for another."""
        batches: dict[tuple[int, tuple[Adapter, ...]], list[ScheduledTokens]] = {}
        for one in self.scheduled:
            batches.setdefault((one.sequence.apart, one.sequence.adapters), []).append(one)
        return [batches[key] for key in sorted(batches, key=lambda key: key[0])]


class SampledToken(NamedTuple):
    """A sampled token, with its log probability if requested, and the tokens that are certain to follow."""

    token_id: int
    logprob: engine_output.Logprob | None = None
    followers: tuple[int, ...] = ()
    """Tokens that need not be sampled. The next step computes them together with the sampled one."""

    @property
    def token_ids(self) -> list[int]:
        return [self.token_id, *self.followers]


class Undone(enum.Enum):
    """The reason why a step's share was left undone. Anything a lane holds beyond its length is overwritten before
    anything else is computed."""

    NO_ROOM = "the device had less KV memory than it said; the lane is as it was before the step"
    POISONED = "the model computed non-finite numbers; the lane is as it was before the step"
    LOST = "the model computed non-finite numbers, and the lane can't be cut: it is empty"


Outcome = SampledToken | EngineFinishReason | Undone | None
"""The outcome of a share; None for one that was computed without sampling."""


class StepResult(NamedTuple):
    """The result of a step for one sequence."""

    sequence: Sequence
    sampled: SampledToken | None
    """None if the sequence ended without a token."""
    finish_reason: EngineFinishReason | None


class ScoredTokens(NamedTuple):
    """Log probabilities of consecutive tokens of a prompt."""

    seq_no: int
    first: int
    """The position of the first of these tokens."""
    num_tokens: int
    packed: bytes
    """The records of `worker/contract/prompt_logprobs.py`."""

    @property
    def end(self) -> int:
        return self.first + self.num_tokens

    def extended(self, num_tokens: int, packed: bytes) -> "ScoredTokens":
        """Returns these and the tokens that follow."""
        return self._replace(num_tokens=self.num_tokens + num_tokens, packed=self.packed + packed)


class LogitsSummary(msgspec.Struct, frozen=True, array_like=True):
    """Counts the logits of a row that are no numbers, and sums up the others."""

    nan: int
    pos_inf: int
    neg_inf: int
    """Tokens that the model rules out, or one of those that are no numbers."""
    finite: int
    mean: float
    """The mean of the finite ones; it and the next two are 0 if there is none."""
    smallest: float
    largest: float

    def to_log(self) -> dict[str, float]:
        """Returns it for a log line."""
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in msgspec.structs.asdict(self).items()
        }


class SeenLogits(NamedTuple):
    """The rows that were summed up since the last step."""

    sampled: LogitsSummary | None = None
    """A row that was looked at because it was time to."""
    poisoned: dict[int, LogitsSummary] = {}
    """Rows that are not finite, by the numbers of their sequences."""

    @property
    def non_finite(self) -> tuple[int, int, int]:
        """The logits of all these rows that are NaN, infinity and minus infinity. In a healthy row, the latter only
        rule tokens out, and do not count."""
        rows = [*self.poisoned.values()]
        nan, pos_inf, neg_inf = (sum(getattr(one, kind) for one in rows) for kind in ("nan", "pos_inf", "neg_inf"))
        if self.sampled is not None:
            nan, pos_inf = nan + self.sampled.nan, pos_inf + self.sampled.pos_inf
        return nan, pos_inf, neg_inf
