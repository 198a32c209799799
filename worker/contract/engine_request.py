"""A request for one generation, as an engine gets it: checked, and with every default filled in."""

import enum
from typing import Any

import msgspec

from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.protocol.wire.params import SamplingParams
from tokenbus.worker.contract.engine_output import Logprob


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


class ResumedCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of a completion, which another worker has sampled."""

    token_ids: list[int]
    """At least one."""
    logprobs: list[Logprob] = []
    """Those of the last tokens; they are unknown for tokens that come from a client."""
    cached_tokens: int = 0
    """Prompt tokens that the first worker had cached."""
    queue_ms: float = 0.0
    """Time from the first accept to the first step."""
    prefill_ms: float = 0.0
    """Time from the first step to the first token."""
    elapsed_ms: float = 0.0
    """Time since the first accept."""


class OutputParsing(msgspec.Struct, frozen=True, kw_only=True):
    """Asks that reasoning and tool calls are told apart from the text, in the model's own chat format."""

    tools: dict[str, dict[str, Any]] | None = None
    """The JSON schema of each tool's parameters, by name; None: calls stay text."""
    generation_prompt: str | None = None
    """The end of the prompt that belongs to the answer, such as `<think>`; None: what the chat format says of every
    answer."""
    hold_calls: bool = False
    """Whether a call is handed out only once it is complete, so that one that is cut off is dropped."""


class ReasoningLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that an answer may spend on reasoning. Then it is closed, and the answer continues."""

    max_tokens: int
    """0 closes it where it begins. The tokens that close it come on top."""
    parsing: OutputParsing
    """The way in which reasoning is told apart, whether or not the answer is parsed."""
    message: str = ""
    """A text to be written at the end of reasoning that is closed."""


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
    """A grammar that says what an output may be."""

    kind: ConstraintKind
    source: str
    param: str
    """The field of the request that errors name."""
    rule_params: dict[str, str] = {}
    """The fields, where they are others, that single rules of the source are made of."""
    is_written: bool = False
    """Whether the source is a grammar in Lark that was written for the schemas of tools, and by no client."""
    preamble: str = ""
    """A grammar in llguidance's Lark of what comes before, such as the model's reasoning, and of `@body`, which stands
    for the constraint itself; empty if nothing does."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for one generation, checked and complete."""

    key: str
    token_ids: list[int]
    sampling: Sampling
    stop: tuple[str, ...] = ()
    tenant: str = ""
    """The tenant in the form of a subject token. Tenants share no cache."""
    cache_salt: str = ""
    """Requests of one tenant share cache only if this is the same."""
    cache_prompt: bool = True
    """Whether it may use what is cached and leave something."""
    session_id: str = ""
    """The tenant's name for the conversation that it belongs to; empty if it has none."""
    cache_ttl_s: float | None = None
    """The time for which its prefix is to be kept once it has ended; 0: it goes first. None: no wish."""
    is_warm_up: bool = False
    """Whether only the prompt is computed: the answer has no tokens, and `max_tokens` is 1 for the engine's sake."""
    priority: int = 0
    """Lower is sooner."""
    adapters: tuple[Adapter, ...] = ()
    """The adapters to use, by digest and each at most once. They are loaded, and sorted."""
    return_progress: bool = False
    """Whether to report how far the prompt is computed."""
    resumed: ResumedCompletion | None = None
    """The tokens that the completion begins with, if it continues one."""
    parsing: OutputParsing | None = None
    """The way in which the answer is parsed; None: all of it is text."""
    constraint: Constraint | None = None
    """The grammar of the output, which may be any text if this is None."""
    reasoning_limit: ReasoningLimit | None = None
    """None: the answer may reason as long as it likes. Where a constraint leaves no choice, the limit gives way."""
    is_held: bool = False
    """Whether it is computed only after `release`. An engine that takes over a dead one's requests holds none back."""
    has_leg: bool = False
    """Whether another worker computes its prompt while it is held, so that the prompt is no load here."""
