"""The sampling options of Ollama's requests, and its other fields that all requests share."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tokenbus.gateway.serving.dialect import UnservedField
from tokenbus.gateway.serving.seeds import wire_seed
from tokenbus.protocol.wire import errors, limits, reasoning
from tokenbus.protocol.wire import messages as wire

_DURATION = re.compile(r"-?\d+|-?((\d+(\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h))+", re.ASCII)
_LATEST = ":latest"
_EFFORTS = (*reasoning.EFFORTS, "max")


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `options` of a request. Those up to `reasoning_effort` are served, with the limits of the wire."""

    seed: int | None = None
    """Negative: a random one."""
    num_predict: int | None = None
    """The most tokens of the answer; negative: as many as the context allows."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_last_n: int | None = None
    """Tokens that the penalties look at; -1: all."""
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    reasoning_effort: str | None = None
    """Open WebUI's, and not Ollama's: an effort for requests without `think`."""
    mirostat: int | None = None
    """This and the three below are samplers that are not served: they are refused unless they are turned off."""
    tfs_z: float | None = None
    typical_p: float | None = None
    penalize_newline: bool | None = None
    mirostat_tau: float | None = None
    """Without effect, like all below: settings of a sampler that is off, and of how Ollama loads a model."""
    mirostat_eta: float | None = None
    num_keep: int | None = None
    num_ctx: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    num_thread: int | None = None
    main_gpu: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None


_UNSERVED: Mapping[str, UnservedField] = {
    "mirostat": UnservedField("only 0 is served", (None, 0)),
    "tfs_z": UnservedField("only 1 is served", (None, 1)),
    "typical_p": UnservedField("only 1 is served", (None, 1)),
    "penalize_newline": UnservedField("only true is served", (None, True)),
}
IGNORED = {
    "keep_alive": "operators decide how long a model stays loaded; 0 without a prompt is refused",
    "truncate": "a prompt that does not fit is refused, never cut",
    "shift": "a prompt that does not fit is refused, never cut",
}
"""Fields that change no answer, with the reason."""
_NAMES = {
    "max_tokens": "num_predict",
    "seed": "seed",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_last_n": "repeat_last_n",
    "repetition_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "stop": "stop",
}
"""Ollama's names of the wire's fields."""
NAMES = {field: f"options.{name}" for field, name in _NAMES.items()} | {
    "response_format": "format",
    "response_format.json_schema.schema": "format",
    "reasoning": "think",
    "logprobs": "top_logprobs",
}
"""The places of the wire's fields in a body."""


class OllamaRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that all requests for a completion have."""

    model: str | None = None
    options: Options | None = None
    format: str | dict[str, Any] | None = None
    """`json`, or a JSON schema that the answer follows."""
    stream: bool | None = None
    """true if absent."""
    think: bool | str | None = None
    """Whether the model reasons, or its effort, such as `low`. The model's default if absent."""
    keep_alive: float | str | None = None
    """The time for which the model stays loaded. Here its operator decides that."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    truncate: bool | None = None
    """Without effect, like `shift`: a prompt that does not fit is refused, and never cut."""
    shift: bool | None = None
    timeout_ms: float | None = None
    """Not Ollama's; has the same meaning as on the wire."""

    @property
    def is_streamed(self) -> bool:
        return self.stream is not False

    def common_fields(self, session: str | None) -> dict[str, Any]:
        """Returns the fields of a wire request that don't depend on the kind of prompt. Raises RequestError with
        Ollama's name for the field at fault."""
        if self.top_logprobs and not self.logprobs:
            raise errors.invalid_field("top_logprobs", "needs logprobs: true")
        check_keep_alive(self.keep_alive)
        return sampling_fields(self.options) | {
            "response_format": _response_format(self.format),
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
            "session_id": session,
            "timeout_ms": self.timeout_ms,
        }

    def thinking_fields(self) -> dict[str, Any]:
        """Returns the fields of a wire request for a conversation that say whether its model reasons."""
        effort = None if self.options is None else self.options.reasoning_effort
        place, given = ("think", self.think) if self.think is not None else ("options.reasoning_effort", effort)
        match given:
            case None:
                return {}
            case bool():
                return {"chat_template_kwargs": {"enable_thinking": given}} | (
                    {} if given else {"reasoning": wire.ReasoningOptions(effort="none")}
                )
            case effort if effort not in _EFFORTS:
                switches = "true, false, " if place == "think" else ""
                allowed = f"{switches}{', '.join(_EFFORTS[:-1])} or {_EFFORTS[-1]}"
                raise errors.invalid_field(place, f"must be {allowed}, got {effort[:40]!r}")
            case effort:
                return {
                    "reasoning": wire.ReasoningOptions(effort=effort),
                    "chat_template_kwargs": reasoning.template_arguments(effort, None),
                }


def sampling_fields(options: Options | None) -> dict[str, Any]:
    """Returns the wire's fields for options. Raises RequestError for one that is not served."""
    if options is None:
        return {}
    for name, field in _UNSERVED.items():
        if getattr(options, name) not in field.harmless:
            raise errors.unsupported_field(f"options.{name}", field.problem)
    given = {field: getattr(options, name) for field, name in _NAMES.items()}
    for name in ("max_tokens", "repetition_last_n"):
        if given[name] is not None and given[name] < 0:
            given[name] = limits.MAX_TOKENS
    given["seed"] = None if options.seed is not None and options.seed < 0 else wire_seed("options.seed", options.seed)
    if options.top_k is not None and options.top_k < 0:
        given["top_k"] = 0
    return given


def check_keep_alive(given: float | str | None) -> None:
    """Raises RequestError for what is not a duration: a number of seconds, or a text such as `5m`."""
    if isinstance(given, str) and not _DURATION.fullmatch(given):
        raise errors.invalid_field("keep_alive", f"must be seconds or a duration such as 5m, got {given[:40]!r}")


def asks_to_unload(given: float | str | None) -> bool:
    """Whether a valid `keep_alive` is 0."""
    return given == 0 or (isinstance(given, str) and not any(digit in given for digit in "123456789"))


def untagged(model: str) -> str:
    """Returns a model's name without the tag `latest`, which Ollama's clients add to names that have none."""
    return model.removesuffix(_LATEST) or model


def _response_format(given: str | dict[str, Any] | None) -> wire.ResponseFormat | None:
    match given:
        case None | "":
            return None
        case "json":
            return wire.ResponseFormat(type="json_object")
        case dict():
            return wire.ResponseFormat(type="json_schema", json_schema=wire.JsonSchema(schema=given))
        case _:
            raise errors.invalid_field("format", f"must be json or a JSON schema, got {given[:40]!r}")
