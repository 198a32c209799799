"""The fields common to several of OpenAI's endpoints, with the same meaning as on the wire."""

from typing import Any, Literal

import msgspec

from tokenbus.gateway.generation import conversation
from tokenbus.protocol.wire import errors, limits
from tokenbus.protocol.wire import messages as wire

MAX_CHOICES = 128
"""OpenAI's limit on `n`."""

_RETENTIONS = {
    "in_memory": wire.CacheControl(),
    "in-memory": wire.CacheControl(),
    "24h": wire.CacheControl(ttl_ms=limits.MAX_CACHE_TTL_MS),
}


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None
    """Adds an event with the usage before the end."""


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

    @property
    def renamed(self) -> dict[str, str]:
        """The wire fields that this request sets under other names, with these names."""
        return {"session_id": "prompt_cache_key"} if self.prompt_cache_key and not self.session_id else {}

    def to_wire(self, session: str | None) -> dict[str, Any]:
        """Returns the fields of a wire request, with `session_id` set to `session` if none is given here.

        It is always streamed, so that a worker notices if this gateway dies."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": self.seed,
            "stop": self.stop,
            "logit_bias": self.logit_bias,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "cache_control": _RETENTIONS.get(self.prompt_cache_retention or ""),
            "cache_salt": self.cache_salt,
            "session_id": self.session_id or self.prompt_cache_key or session,
            "priority": conversation.priority_of(self.service_tier) if self.priority is None else self.priority,
            "timeout_ms": self.timeout_ms,
            "ignore_eos": self.ignore_eos,
            "min_tokens": self.min_tokens,
            "stop_token_ids": self.stop_token_ids,
        }


class SamplingFields(CommonFields, frozen=True, kw_only=True):
    """The fields common to chat completions and completions. The Responses API has others instead."""

    max_tokens: int | None = None
    n: int | None = None
    stream_options: StreamOptions | None = None
    response_format: wire.ResponseFormat | None = None

    def check_answers(self) -> None:
        """Checks fields without a counterpart on the wire. Raises RequestError."""
        if self.n is not None and not 1 <= self.n <= MAX_CHOICES:
            raise errors.invalid_field("n", f"must be 1 to {MAX_CHOICES}, got {self.n}")
        if self.stream_options is not None and not self.stream:
            raise errors.invalid_field("stream_options", "needs stream: true")

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage event."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def to_wire(self, session: str | None) -> dict[str, Any]:
        """Returns the fields of a wire request."""
        own = {"max_tokens": self.max_tokens, "response_format": self.response_format}
        return super().to_wire(session) | own
