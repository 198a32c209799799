"""The fields common to several of OpenAI's endpoints, and all names under which clients ask for reasoning."""

from typing import Any, Literal, NamedTuple

import msgspec

from tokenbus.gateway.serving.seeds import wire_seed
from tokenbus.protocol.wire import errors, limits, reasoning
from tokenbus.protocol.wire import messages as wire
from tokenbus.protocol.wire.params import Range

_RETENTIONS = {
    "in_memory": wire.CacheControl(),
    "in-memory": wire.CacheControl(),
    "24h": wire.CacheControl(ttl_ms=limits.MAX_CACHE_TTL_MS),
}
_PRIORITIES = {"priority": -100, "fast": -100, "flex": 100}
"""Service tiers as wire priorities."""
_SAME_ON_THE_WIRE = (
    "temperature",
    "top_p",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "top_k",
    "min_p",
    "repetition_penalty",
    "regex",
    "choice",
    "grammar",
    "cache_salt",
    "timeout_ms",
    "ignore_eos",
    "min_tokens",
    "stop_token_ids",
)
"""Fields with the same name and meaning as on the wire."""


class WireFields(NamedTuple):
    """The fields of a wire request that a body sets."""

    fields: dict[str, Any]
    names: dict[str, str]
    """The body's names for wire fields, where they differ."""


class CommonFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields common to all of OpenAI's endpoints that generate.

    OpenAI's own Responses API has no `stop`, `seed`, `logit_bias` or penalties."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str | int, float] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    """Identifies the conversation, which is kept on one worker."""
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """The time for which the prompt is worth keeping; `in-memory` is an older spelling."""
    top_k: int | None = None
    """This field and those up to `stop_token_ids` are not OpenAI's; they have the same meaning as on the wire."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    priority: int | None = None
    timeout_ms: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None

    def to_wire(self, session: str | None) -> WireFields:
        """Returns the fields of a wire request, with `session_id` set to `session` if none is given here. Raises
        RequestError for names that contradict each other.

        It is always streamed, so that a worker notices if this gateway dies."""
        fields = {name: getattr(self, name) for name in _SAME_ON_THE_WIRE} | {
            "seed": wire_seed("seed", self.seed),
            "cache_control": _RETENTIONS.get(self.prompt_cache_retention or ""),
            "session_id": self.session_id or self.prompt_cache_key or session,
            "priority": _PRIORITIES.get(self.service_tier or "") if self.priority is None else self.priority,
        }
        is_renamed = self.prompt_cache_key and not self.session_id
        return WireFields(fields, {"session_id": "prompt_cache_key"} if is_renamed else {})


BUDGETS = ("thinking_token_budget", "reasoning_budget_tokens", "thinking_budget_tokens")
"""vLLM's and llama-server's names for `reasoning.max_tokens`.

Only the first is refused for models whose reasoning can't be closed, as vLLM does. The others are hints, as in the
servers that they come from."""
_UNLIMITED = -1
ALLOWED_BUDGETS = Range(_UNLIMITED, limits.MAX_TOKENS)


class ReasoningConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The `reasoning` of a response."""

    effort: str | None = None
    summary: str | None = None


class RequestedReasoning(ReasoningConfig, frozen=True, kw_only=True):
    """The `reasoning` of a request: OpenAI's, with OpenRouter's additions."""

    max_tokens: int | None = None
    enabled: bool | None = None
    """false: the effort is `none`."""
    exclude: Any = None
    """Refused unless false."""
    generate_summary: str | None = None
    """The former name of `summary`."""


class ReasoningWishes(NamedTuple):
    """The same in the wire's form."""

    options: wire.ReasoningOptions | None
    template_arguments: dict[str, Any] | None
    """Variables for the chat template."""
    names: dict[str, str]
    """The body's names for wire fields, where they differ."""


def read_wishes(
    body: msgspec.Struct,
    asked: RequestedReasoning | None,
    template_arguments: dict[str, Any] | None,
    effort: str | None = None,
) -> ReasoningWishes:
    """Returns how long a model should reason: `body` has the fields named in BUDGETS, and `asked` is its `reasoning`.
    An `effort` given in a separate field takes precedence. Raises RequestError for an invalid budget."""
    asked = asked or RequestedReasoning()
    names = {} if effort is None else {"reasoning.effort": "reasoning_effort"}
    effort = effort or ("none" if asked.enabled is False else asked.effort)
    budget, is_hint = asked.max_tokens, True
    given = [(name, value) for name in BUDGETS if (value := getattr(body, name)) is not None]
    for name, value in given:
        if not ALLOWED_BUDGETS.contains(value):
            raise errors.invalid_field(name, f"must be {ALLOWED_BUDGETS}, got {value}")
    if budget is None and given:
        name, value = given[0]
        budget, is_hint = None if value == _UNLIMITED else value, name != BUDGETS[0]
        names["reasoning.max_tokens"] = name
    options = None
    if effort is not None or budget is not None:
        is_optional = True if budget is not None and is_hint else None
        options = wire.ReasoningOptions(effort=effort, max_tokens=budget, optional=is_optional)
    return ReasoningWishes(options, reasoning.template_arguments(effort, template_arguments), names)
