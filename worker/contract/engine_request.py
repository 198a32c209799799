"""A request for one generation, as an engine receives it: checked, with every default filled in."""

import enum
from collections.abc import Sequence
from typing import Any

import msgspec

from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.protocol.wire.params import SamplingParams
from tokenbus.worker.contract.engine_output import FirstTokenStats, Logprob


class Sampling(SamplingParams, frozen=True, kw_only=True):
    """The sampling parameters of a request, with every default filled in."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    repetition_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # type: ignore[assignment]  # a tuple can't be changed by mistake
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def has_penalties(self) -> bool:
        """Whether the choice of a token depends on the tokens before it."""
        return self.repetition_last_n > 0 and (
            self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        )


class ResumedCompletion(FirstTokenStats, frozen=True, kw_only=True):
    """The beginning of a completion that another worker has sampled, with that worker's account of its first token."""

    token_ids: Sequence[int]
    """At least one. An array, where there may be many."""
    logprobs: list[Logprob] = []
    """Those of the last tokens; tokens that come from a client have none."""
    elapsed_ms: float = 0.0
    """Time since the first accept."""


class OutputParsing(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for reasoning and tool calls to be separated from the text, by the model's own chat format."""

    tools: dict[str, dict[str, Any]] | None = None
    """The JSON schema of each tool's parameters, by name; None: calls stay text."""
    generation_prompt: str | None = None
    """The end of the prompt that belongs to the answer, such as `<think>`; None: the chat format's own value."""
    continues: bool = False
    """Whether the answer continues a text that is in the prompt."""
    hold_calls: bool = False
    """Whether a call is handed out only once complete, so that a truncated one is dropped."""


class ReasoningLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that an answer may spend on reasoning. Then it is closed, and the answer continues."""

    max_tokens: int
    """0 closes it where it begins. The tokens that close it are not counted."""
    parsing: OutputParsing
    """The way to recognize reasoning, whether or not the answer is parsed."""
    message: str = ""
    """A text written at the end of reasoning that is cut short."""


class ConstraintKind(enum.StrEnum):
    """The languages in which a constraint can be written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    """A JSON list of strings."""
    GBNF = "gbnf"
    LARK = "lark"
    """llguidance's dialect, with `<[123]>` for a token id and `%json {...}` for a nested schema."""


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar that restricts an output."""

    kind: ConstraintKind
    source: str
    param: str
    """The field of the request that errors name."""
    rule_params: dict[str, str] = {}
    """The fields that single rules of the source are made from, where these differ."""
    is_written: bool = False
    """Whether the source is a Lark grammar generated from the schemas of tools rather than written by a client."""
    preamble: str = ""
    """A grammar in llguidance's Lark for what comes first, such as the model's reasoning, followed by `@body`, which
    stands for the constraint itself; empty if nothing comes first."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for one generation, checked and complete."""

    key: str
    token_ids: Sequence[int]
    """The prompt: an array, where it may be long."""
    sampling: Sampling
    stop: tuple[str, ...] = ()
    tenant: str = ""
    """The tenant as a subject token. Tenants share no cache."""
    cache_salt: str = ""
    """Requests of one tenant share cache only if this is the same."""
    cache_prompt: bool = True
    """Whether it may use cached prefixes and leave one."""
    session_id: str = ""
    """The tenant's name for the conversation that it belongs to, or empty."""
    cache_ttl_s: float | None = None
    """The time to keep its prefix after it has ended; 0: evicted first. None: no preference."""
    is_warm_up: bool = False
    """Whether only the prompt is computed: the answer has no tokens, and `max_tokens` is 1 for the engine's sake."""
    priority: int = 0
    """Lower values run first."""
    adapters: tuple[Adapter, ...] = ()
    """The adapters to use, by digest and each at most once. All are loaded; sorted."""
    return_progress: bool = False
    """Whether to report the progress of the prompt."""
    resumed: ResumedCompletion | None = None
    """The tokens sampled so far, if it continues a completion."""
    parsing: OutputParsing | None = None
    """The way in which the answer is parsed; None: all of it is text."""
    constraint: Constraint | None = None
    """The grammar of the output; None: any text."""
    reasoning_limit: ReasoningLimit | None = None
    """None: reasoning is unlimited. Where a constraint leaves no choice, the limit gives way."""
    expected_cached_tokens: int = 0
    """Tokens of its prompt that need not be computed, as far as its router knows; until it starts, only the others
    count as load."""
    is_held: bool = False
    """Whether it is computed only after `release`. An engine that takes over a dead engine's requests holds none
    back."""
    has_remote_prefill: bool = False
    """Whether another worker computes its prompt while it is held, so that the prompt does not count as load here."""


class ExpectedTurn(msgspec.Struct, frozen=True, array_like=True):
    """The prompt with which a conversation is expected to continue, as far as it can be known."""

    token_ids: bytes
    """Unsigned 32-bit little-endian integers."""
    num_known: int
    """Leading tokens that are those of the last prompt."""
    tenant: str = ""
    cache_salt: str = ""
    session_id: str = ""
    adapters: tuple[Adapter, ...] = ()
    cache_ttl_s: float | None = None
    """The time for which the last request wants its prefix kept."""
