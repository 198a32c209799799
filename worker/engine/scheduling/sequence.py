"""One generation inside the engine: its tokens and its counters. There are no phases, only counts."""

import enum
from array import array

from tokenbus.worker import contract
from tokenbus.worker.engine.kv.prefix_tree import Domain


class EngineFinishReason(enum.StrEnum):
    """Why the engine stopped computing a sequence."""

    STOP_TOKEN = "stop_token"
    LENGTH = "length"
    ABORTED = "aborted"
    INSUFFICIENT_MEMORY = "insufficient_memory"
    """The KV memory had no room although it was promised."""
    BAD_LOGITS = "bad_logits"
    """The model computed NaN or infinite logits."""
    FAILED = "failed"
    """The engine could not take it: a bug, and its alone."""


class Sequence:
    """Tokens of a prompt and its completion.

        0 <= num_computed < num_tokens = num_prompt + num_sampled
        |--- computed: in the KV memory ---|--- to be computed ---|

    What is to be computed is one token while decoding and more while the prompt is not done yet, or has to be computed
    again because the sequence was preempted."""

    __slots__ = (
        "_stop_token_ids",
        "arrived_at",
        "domain",
        "isolated",
        "lane",
        "num_cached",
        "num_computed",
        "num_prompt",
        "preemptions",
        "priority",
        "sampling",
        "seq_no",
        "token_ids",
    )

    def __init__(
        self,
        seq_no: int,
        token_ids: "array[int]",
        sampling: contract.Sampling,
        end_token_ids: frozenset[int],
        *,
        domain: Domain | None = None,
        priority: int = 0,
        arrived_at: float = 0.0,
        num_sampled: int = 0,
        isolated: bool = False,
    ) -> None:
        assert len(token_ids) > num_sampled, "a prompt has at least one token"
        assert sampling.max_tokens >= 1, sampling.max_tokens
        self.seq_no = seq_no
        self.sampling = sampling
        self.domain = domain
        """Whose cache it uses and leaves its own to; None for nobody's."""
        self.priority = priority
        self.arrived_at = arrived_at
        self.token_ids = array("I", token_ids)
        self.num_prompt = len(token_ids) - num_sampled
        self.isolated = isolated
        """No other may share its steps until it has a new token: one that did may have ended an engine."""
        self.num_computed = 0
        self.num_cached = 0
        """Tokens of the prompt that it did not have to compute."""
        self.preemptions = 0
        self.lane: int | None = None
        self._stop_token_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else end_token_ids
        )

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
    def max_num_tokens(self) -> int:
        """What it may ever hold: the size of the promise it needs."""
        return self.num_prompt + self.sampling.max_tokens

    @property
    def may_stop(self) -> bool:
        """Whether the next token may be one that ends the sequence."""
        return self.num_sampled >= self.sampling.min_tokens

    def reuse_prefix(self, num_computed: int) -> None:
        """Notes that tokens are there which it did not compute."""
        assert self.num_computed <= num_computed < self.num_tokens, (self, num_computed)
        if not self.num_sampled:
            self.num_cached += num_computed - self.num_computed
        self.num_computed = num_computed

    def preempt(self) -> None:
        """It has lost its place: what it computed is to be computed again, what it sampled stays."""
        self.preemptions += 1
        self.num_computed = 0
        self.num_cached = self.num_cached if self.num_sampled else 0
        self.lane = None

    def append_token(self, token_id: int) -> EngineFinishReason | None:
        """Takes a sampled token; says why the sequence ends with it, if it does."""
        assert self.num_computed == self.num_tokens, self
        self.token_ids.append(token_id)
        self.isolated = False
        if token_id in self._stop_token_ids and self.num_sampled > self.sampling.min_tokens:
            return EngineFinishReason.STOP_TOKEN
        return EngineFinishReason.LENGTH if self.num_sampled >= self.sampling.max_tokens else None

    def skip_steps(self, steps: int, token_id: int) -> None:
        """Takes the results of that many steps, in each of which this token was sampled and ended nothing."""
        assert self.num_uncomputed == 1, self
        assert token_id not in self._stop_token_ids, token_id
        self.token_ids.extend(array("I", [token_id]) * steps)
        self.num_computed += steps
        assert self.num_sampled < self.sampling.max_tokens, self

    def check_integrity(self) -> None:
        assert 0 <= self.num_computed <= self.num_tokens <= self.max_num_tokens, self
        assert 0 <= self.num_cached < self.num_prompt, self
