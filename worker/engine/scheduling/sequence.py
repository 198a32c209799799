"""A sequence is one generation inside the engine: its tokens and counters. It has no phases, only counts."""

import dataclasses
import enum
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Listing
from typing import TYPE_CHECKING

from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.worker.chat_format.reasoning_budget import ReasoningBudget
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.kv.allocation import Allocation
from tokenbus.worker.engine.kv.prefix_tree import Domain
from tokenbus.worker.engine.kv.retention import NO_HINT, CacheHint

if TYPE_CHECKING:  # a frontend imports this module, and does not need grammars
    from tokenbus.worker.engine.constraints.matcher import SequenceMatcher


class EngineFinishReason(enum.StrEnum):
    """Why the engine stopped computing a sequence."""

    STOP_TOKEN = "stop_token"
    LENGTH = "length"
    ABORTED = "aborted"
    INSUFFICIENT_MEMORY = "insufficient_memory"
    """The device had less KV memory than it reported, too little for this sequence alone."""
    BAD_LOGITS = "bad_logits"
    """The model computes NaN or infinite numbers for it, even when computed alone."""
    FAILED = "failed"
    """The engine could not start it because of a bug that affects no other sequence."""
    CONSTRAINT_FAILED = "constraint_failed"
    """Its constraint has become too costly to follow."""


class FinishRule:
    """Says which sampled tokens end a sequence. Stop strings are not an engine's concern.

    A constraint allows the model's end tokens only where the output is complete, so they end it even before
    `min_tokens`."""

    __slots__ = ("_final_token_ids", "_sampling", "_stop_token_ids")

    def __init__(
        self, sampling: engine_request.Sampling, end_token_ids: Iterable[int], *, constrained: bool = False
    ) -> None:
        self._sampling = sampling
        self._stop_token_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else end_token_ids)}
        self._final_token_ids = frozenset(end_token_ids if constrained else ())

    def finish_reason(self, token_id: int, num_sampled: int) -> EngineFinishReason | None:
        """Returns the finish reason if the sequence ends with this token, the last of `num_sampled`."""
        if token_id in self._final_token_ids:
            return EngineFinishReason.STOP_TOKEN
        if token_id in self._stop_token_ids and num_sampled > self._sampling.min_tokens:
            return EngineFinishReason.STOP_TOKEN
        return EngineFinishReason.LENGTH if num_sampled >= self._sampling.max_tokens else None


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """The tokens of a prompt and its completion.

        0 <= num_computed < num_tokens = num_prompt + num_sampled
        |--- computed: in the KV memory ---|--- to be computed ---|

    While it decodes, only the tokens that the last step added remain to be computed: one, and those that were certain
    to follow it. More remain while its prompt is unfinished, or must be recomputed after a preemption."""

    seq_no: int
    token_ids: "array[int]"
    sampling: engine_request.Sampling
    end_token_ids: dataclasses.InitVar[Iterable[int]]
    _: dataclasses.KW_ONLY
    num_resumed: dataclasses.InitVar[int] = 0
    """The number of its last tokens that an earlier engine has sampled."""
    adapters: tuple[Adapter, ...] = ()
    """The adapters with which it is computed; their order is the same in all sequences."""
    domain: Domain | None = None
    """Sequences of the same domain share cached blocks; one without a domain neither uses nor leaves any."""
    hint: CacheHint = NO_HINT
    """The client's hint about what it leaves in the cache."""
    priority: int = 0
    arrived_at: float = 0.0
    isolated: bool = False
    """It has its steps to itself until it has a new token, because an engine died in a step with it."""
    is_ahead: bool = False
    """It only computes the prompt of a turn that is expected, all but the last token, and samples nothing."""
    ahead: range = range(0)
    """The tokens of its prompt that were computed ahead for it."""
    matcher: "SequenceMatcher | None" = None
    """The state of its constraint after all sampled tokens; None if its output is unconstrained."""
    reasoning_budget: ReasoningBudget | None = None
    """Its reasoning budget after all sampled tokens; None if its reasoning is unlimited."""
    logprobs_from: int | None = None
    """The position of the next token of its prompt whose log probability is wanted; None if none is. What is cached
    can't replace computing the token before it."""
    num_prompt: int = dataclasses.field(init=False)
    num_computed: int = dataclasses.field(default=0, init=False)
    num_cached: int = dataclasses.field(default=0, init=False)
    """Tokens of the prompt that did not have to be computed."""
    num_lost: int = dataclasses.field(default=0, init=False)
    """Tokens that were computed when it was last preempted."""
    preemptions: int = dataclasses.field(default=0, init=False)
    is_proven: bool = dataclasses.field(default=False, init=False)
    """One of its rows has been finite since it got its memory, so everything in its lane was finite then."""
    apart: int = dataclasses.field(default=0, init=False)
    """The number of the batch in which it is computed apart from others while suspected of poisoning them (see
    suspects.py); 0 if it is not."""
    poisoned_at: int = dataclasses.field(default=0, init=False)
    """The end of the share whose numbers were not finite, until it gets past it; 0 if there is none."""
    poisonings: int = dataclasses.field(default=0, init=False)
    """The number of times in a row that only its own numbers in a batch were not finite."""
    lane: int | None = dataclasses.field(default=None, init=False)
    """None while it waits."""
    kv: Allocation = dataclasses.field(init=False)
    """Its KV memory, from `start` on."""
    _num_new: int = dataclasses.field(default=1, init=False)
    """Tokens that the last step added."""
    _finish_rule: FinishRule = dataclasses.field(init=False)

    def __post_init__(self, end_token_ids: Iterable[int], num_resumed: int) -> None:
        assert len(self.token_ids) > num_resumed, "a prompt has at least one token"
        assert self.sampling.max_tokens >= 1, self.sampling.max_tokens
        assert self.domain is None or self.domain.adapters == self.adapters, self.domain
        self.token_ids = array("I", self.token_ids)
        self.num_prompt = len(self.token_ids) - num_resumed
        self._finish_rule = FinishRule(self.sampling, end_token_ids, constrained=self.matcher is not None)

    def __repr__(self) -> str:
        return f"<Sequence {self.seq_no}: {self.num_computed}/{self.num_tokens} computed, {self.num_sampled} sampled>"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def num_until_stop(self) -> int:
        """The number of its prompt's tokens that a step may compute."""
        stop = self.kv.stop
        return self.num_uncomputed if stop is None else min(self.num_uncomputed, stop - self.num_computed)

    @property
    def first_row(self) -> int | None:
        """The position of the first token whose logits give a log probability of its prompt; None if nothing more is
        wanted."""
        if self.logprobs_from is None or self.logprobs_from >= self.num_prompt:
            return None
        return max(0, self.logprobs_from - 1)

    @property
    def max_reused(self) -> int:
        """The most tokens that it may get from the cache: at least one is computed, since only that gives logits."""
        last = self.num_tokens - 1
        return last if self.first_row is None else min(last, self.first_row)

    @property
    def is_decoding(self) -> bool:
        """Whether its client waits for its next token, and only what the last step added remains to be computed."""
        return self.num_uncomputed <= self._num_new

    @property
    def is_ready(self) -> bool:
        """Whether its next token can be sampled: its constraint may not be ready yet."""
        return self.matcher is None or self.matcher.is_ready

    @property
    def max_num_tokens(self) -> int:
        """The maximum number of tokens it may ever have."""
        return self.num_prompt + self.sampling.max_tokens

    @property
    def may_stop(self) -> bool:
        """Whether the next token may end the sequence."""
        return self.num_sampled >= self.sampling.min_tokens

    def start(self, kv: Allocation) -> None:
        """Gives a waiting sequence its KV memory."""
        self.kv, self.lane, self.is_proven = kv, kv.lane, False

    def reuse_prefix(self, num_computed: int) -> None:
        """Records that the first `num_computed` tokens are present, some of them computed by others."""
        assert self.num_computed <= num_computed < self.num_tokens, (self, num_computed)
        if not self.num_sampled:
            self.num_cached += num_computed - self.num_computed
        self.num_computed = num_computed

    def compute(self, num_tokens: int) -> None:
        """Records that a step has computed its next tokens, and what their logits give."""
        self.num_computed += num_tokens
        if self.logprobs_from is not None:
            self.logprobs_from = max(self.logprobs_from, min(self.num_computed + 1, self.num_prompt))

    def preempt(self) -> None:
        """Records the loss of its KV memory: all tokens must be recomputed, but none resampled."""
        self.preemptions += 1
        self.num_lost = max(self.num_lost, self.num_computed)
        self.num_computed = 0
        self.num_cached = self.num_cached if self.num_sampled else 0  # reported with the first token
        self.lane = None

    def num_regained(self, since: int) -> int:
        """Returns how many of the tokens after the first `since` that it had when preempted it has regained."""
        return max(0, min(self.num_computed, self.num_lost) - since)

    def append(self, token_ids: Listing[int]) -> EngineFinishReason | None:
        """Adds a sampled token and those that follow it, up to one that ends the sequence; returns the finish reason if
        there is one."""
        assert self.num_computed == self.num_tokens, self
        self.isolated = False
        finish_reason = None
        for count, token_id in enumerate(token_ids, start=1):
            self.token_ids.append(token_id)
            self._num_new = count
            finish_reason = self._finish_rule.finish_reason(token_id, self.num_sampled)
            if finish_reason is not None:
                break
        return finish_reason

    def check_integrity(self) -> None:
        assert 0 <= self.num_computed <= self.num_tokens <= self.max_num_tokens, self
        assert 0 <= self.num_cached < self.num_prompt, self
