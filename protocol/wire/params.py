"""The parameters of a generation, declared once: their types, ranges and meaning.

`generate` and `run` carry them as they are, with None for what the client left open; an engine gets them with every
default filled in (`worker.contract.Sampling`). A range is part of the field's annotation and is checked after decoding
(validation.py), not by the decoder, so that a refusal can carry the request's id and both ends of the range.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import msgspec

from tokenbus.protocol.wire import limits

_EXCLUSIVE_STEP = 1e-6
"""Distance that `clamp` keeps from an exclusive bound."""


class Range(NamedTuple):
    """The values that a number may have, from `low` to `high`; `low` itself is excluded where `above` is set."""

    low: float
    high: float
    above: bool = False

    def contains(self, value: float) -> bool:
        """Whether the value is in the range; NaN never is."""
        # Comparisons with NaN are false, so this must test what is allowed, not what is forbidden.
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def clamp(self, value: float) -> float:
        """Returns the nearest value that is in the range."""
        return min(max(value, self.low + _EXCLUSIVE_STEP if self.above else self.low), self.high)

    def __str__(self) -> str:
        return f"{'above' if self.above else 'at least'} {self.low:.12g} and at most {self.high:.12g}"


COUNT = Range(0, limits.MAX_TOKENS)
TIMEOUT_MS = Range(0, 1e12, above=True)
DURATION_MS = Range(0, 1e12)
SECONDS = Range(0, 86_400)
"""A time that an operator sets."""
PRIORITY = Range(-1_000, 1_000)
REMAINING_MS = Range(-1e12, 1e12)
"""A signed duration: time left, negative once the deadline has passed, or time elapsed."""


@functools.cache
def ranges_of(struct: type[msgspec.Struct]) -> Mapping[str, Range]:
    """Returns the ranges that a struct's annotations declare, by field."""
    hints = get_type_hints(struct, include_extras=True)
    notes = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: note for name, found in notes.items() for note in found if isinstance(note, Range)}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Says how tokens are chosen, and when the completion ends."""

    max_tokens: Annotated[int | None, COUNT] = None
    """Tokens to generate; 0 only computes the prompt, so that it is cached. If absent: the model's own limit, else what
    the context leaves, but no more than the worker's `--max-new-tokens`."""
    min_tokens: Annotated[int | None, COUNT] = None
    """Tokens before which the completion does not stop. 0 if absent."""
    temperature: Annotated[float | None, Range(0, 100)] = None
    """Divides the logits before sampling; 0 always takes the likeliest token. The model's own if absent, else 0.7."""
    top_p: Annotated[float | None, Range(0, 1, above=True)] = None
    """Samples among the likeliest tokens whose probabilities add up to this. The model's own if absent, else 0.9."""
    top_k: Annotated[int | None, COUNT] = None
    """Samples among this many of the likeliest tokens; 0 is off. The model's own if absent, else 40."""
    min_p: Annotated[float | None, Range(0, 1)] = None
    """Drops tokens that have less than this share of the likeliest one's probability; 0 is off. The model's own if
    absent, else 0."""
    seed: Annotated[int | None, Range(0, 2**32 - 1)] = None
    """Makes an answer repeatable: the same request, run alone on the same build, gives the same tokens."""
    repetition_penalty: Annotated[float | None, Range(0.01, 10)] = None
    """Divides the positive logits of recent tokens by this and multiplies the others; 1 is off. The model's own if
    absent, else 1."""
    repetition_last_n: Annotated[int | None, COUNT] = None
    """Recent tokens, of prompt and completion, that the penalties look at. 64 if absent."""
    presence_penalty: Annotated[float | None, Range(-2, 2)] = None
    """Subtracted from the logit of every recent token. 0 if absent."""
    frequency_penalty: Annotated[float | None, Range(-2, 2)] = None
    """Subtracted from the logit of every recent token, once for each time it occurs. 0 if absent."""
    logit_bias: dict[str | int, float] | None = None
    """Added to the logits of tokens, by token id: a decimal string, or in MessagePack also a number."""
    logprobs: Annotated[int | None, Range(0, limits.MAX_LOGPROBS)] = None
    """Number of likeliest tokens to report with each sampled one. If absent, no probabilities are reported."""
    prompt_logprobs: Annotated[int | None, Range(0, limits.MAX_LOGPROBS)] = None
    """Number of likeliest tokens to report with each token of the prompt, in `prompt_logprobs` of chunks that come
    before the first token. If absent, no probabilities of the prompt are computed."""
    prompt_logprobs_from: Annotated[int | None, COUNT] = None
    """Position of the first token of the prompt whose log probability is wanted; cached tokens before it need not be
    computed again. 0 if absent."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the completion, in addition to the model's own end tokens; at most 128."""
    ignore_eos: bool | None = None
    """Whether the model's own end tokens are never sampled. false if absent."""


DEFAULTS = SamplingParams(temperature=0.7, top_p=0.9, top_k=40, min_p=0.0, repetition_penalty=1.0)
"""Defaults for the fields that neither the request nor the model's files set."""


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A JSON schema in the form of OpenAI's chat API."""

    schema: dict[str, Any] | None = None
    """The schema, as JSON of at most 64 KiB, with at most 1,000 properties, 64 `patternProperties` and 64 levels. An
    object has only the members that its `properties` name, unless the schema has `additionalProperties`, or several
    schemas describe the same object (`allOf`)."""
    name: str | None = None
    """Ignored."""
    strict: bool | None = None
    """Whether the schema is refused unless it follows OpenAI's rules: each object has `additionalProperties: false` and
    requires all its properties. The answer follows the schema in any case. false if absent."""
    description: str | None = None
    """Ignored."""


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Constrains the output to JSON; `text` leaves it free."""

    type: Literal["text", "json_object", "json_schema"]
    """`text`, `json_object` or `json_schema`."""
    json_schema: JsonSchema | None = None
    """Holds the schema, if `type` is `json_schema`."""


class CacheControl(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A hint for how long a prefix is to be kept in a worker's cache."""

    ttl_ms: Annotated[float, Range(0, limits.MAX_CACHE_TTL_MS)] = limits.DEFAULT_CACHE_TTL_MS
    """Time after the answer's end for which the prompt and the answer are kept longer than prefixes without a hint; 0:
    they are evicted first. 300,000 if absent, at most a day, and no more than the worker's `--max-kept-s`."""


class Lora(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A LoRA adapter that is loaded on the model, and its scale."""

    name: str
    """Name under which the adapter was loaded."""
    scale: Annotated[float, Range(0, limits.MAX_ADAPTER_SCALE)] = 1.0
    """Factor by which its weights are multiplied, at most 4; 0 turns it off."""


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Says how long a model may reason before it answers `messages`."""

    max_tokens: Annotated[int | None, COUNT] = None
    """Tokens of the answer that may be reasoning. After these, the reasoning is closed with the model's own marker, and
    the answer continues; 0 closes it as soon as it begins. The tokens that close it are not counted. Also sets the
    template's variable `thinking_budget`, unless `chat_template_kwargs` has it."""
    effort: str | None = None
    """`none`, `minimal`, `low`, `medium`, `high`, `xhigh`, or another value that the chat template knows. Sets its
    variables `enable_thinking` (false for the first two) and `reasoning_effort`, unless `chat_template_kwargs` has
    them. If the template doesn't read the latter, and there is no `max_tokens` here, at most 0, 10, 20, 50, 80 or 95 %
    of the answer's `max_tokens` may be reasoning. At most 64 bytes."""
    optional: bool | None = None
    """Whether models whose reasoning can't be closed ignore `max_tokens` instead of refusing it. false if absent."""


class GenerationParams(SamplingParams, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that the worker needs to know about the requested completion, except the prompt."""

    stop: str | list[str] | None = None
    """Strings that end the completion and are not part of it: one, or up to 16, each of 1 to 1,024 bytes."""
    stream: bool | None = None
    """If false, the terminal is the only message and holds the whole text. true if absent."""
    tools: list[dict[str, Any]] | None = None
    """At most 128 functions that the model may call: `{type: "function", function: {name, description, parameters}}`.
    Names have 1 to 128 of `A-Za-z0-9_.-`, and `parameters` is a JSON schema. Only with `messages`."""
    tool_choice: str | dict[str, Any] | None = None
    """`auto` (the default), `none`, `required`, or `{type: "function", function: {name}}` for one of the tools."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have more than one call. true if absent."""
    reasoning: ReasoningOptions | None = None
    """Bounds the reasoning of the answer. Only with `messages`."""
    continue_final_message: bool | None = None
    """Whether the answer continues the last of the `messages`, an assistant's with a text and without calls, instead of
    beginning a message. Only for models that have the feature of this name: routers and workers of earlier versions,
    none of which has it, ignore the field. false if absent."""
    parse_output: bool | None = None
    """Whether reasoning and tool calls are told apart from the text of the answer to `messages`. true if absent."""
    return_token_ids: bool | None = None
    """Asks for `token_ids` in every chunk."""
    return_sampling: bool | None = None
    """Asks for `sampling` in the head of each attempt and in the terminal. Workers of earlier versions ignore this."""
    return_progress: bool | None = None
    """Asks for `progress` while the prompt is computed, and once when it is done, before the first token."""
    cache_prompt: bool | None = None
    """Whether this prompt's KV may be reused and kept. true if absent."""
    cache_salt: str | None = None
    """Keeps caches apart within a tenant: only requests with the same salt share one. At most 256 bytes."""
    cache_control: CacheControl | None = None
    """A hint for how long this prompt's KV is worth keeping."""
    session_id: str | None = None
    """A hint that keeps the requests of a conversation on one worker. At most 256 bytes."""
    priority: Annotated[int | None, PRIORITY] = None
    """Lower is served sooner. 0 if absent."""

    lora: list[Lora] | None = None
    """Adapters to use, at most 4: they must be loaded on the model, for all tenants or for this one."""
    response_format: ResponseFormat | None = None
    """Constrains the output to JSON. At most one of this, `regex`, `choice` and `grammar` may be given, without
    `ignore_eos`."""
    regex: str | None = None
    """Constrains the output to what a regular expression of at most 16 KiB matches as a whole."""
    choice: list[str] | None = None
    """Constrains the output to one of these texts: at most 1,000, of 64 KiB together."""
    grammar: str | None = None
    """Constrains the output to a grammar of at most 64 KiB and 500 rules: in GBNF if it has a rule `name ::= ...`,
    otherwise in llguidance's Lark."""

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def called_tools(self) -> list[dict[str, Any]]:
        """The tools, unless none of them may be called."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def is_streamed(self) -> bool:
        """Whether the client wants chunks before the terminal."""
        return self.stream is not False
