"""Checks a generation request field by field, at a router and again at its worker; says which features it needs."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tokenbus.protocol.wire import codec, errors, internal, limits, messages, subjects

_ID = re.compile(rf"[A-Za-z0-9_-]{{1,{limits.MAX_ID_BYTES}}}")


class Range(NamedTuple):
    """The values that a number may have; `above` is exclusive."""

    low: float
    high: float
    above: bool = False

    def contains(self, value: float) -> bool:
        """False for NaN, whatever the range."""
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"{'above' if self.above else 'at least'} {self.low:.12g} and at most {self.high:.12g}"


RANGES = {
    "max_tokens": Range(1, limits.MAX_TOKENS),
    "min_tokens": Range(0, limits.MAX_TOKENS),
    "temperature": Range(0, 100),
    "top_p": Range(0, 1, above=True),
    "top_k": Range(0, limits.MAX_TOKENS),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0.01, 10),
    "repetition_last_n": Range(0, limits.MAX_TOKENS),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "seed": Range(0, 2**32 - 1),
    "logprobs": Range(0, limits.MAX_LOGPROBS),
    "priority": Range(-1_000, 1_000),
    "timeout_ms": Range(0, 1e12, above=True),
}


_RUN_RANGES = {
    "attempt": Range(0, limits.MAX_TOKENS),
    "remaining_ms": Range(-1e12, 1e12),
    "age_ms": Range(-1e12, 1e12),
}


class RequiredFeature(NamedTuple):
    """A feature that a worker must have for a request, and the field that asks for it."""

    feature: str
    param: str


def check_request(request: messages.GenerateRequest) -> None:
    """Raises RequestError(invalid_request), naming the field and what it may be, for the first thing wrong."""
    check_id(request.id)
    _check_one_prompt(request)
    _check_params(request)
    if request.messages is not None:
        _check_messages(request.messages)
    _check_token_ids("token_ids", request.token_ids)
    for name in ("chat_template_kwargs", "tools", "tool_choice"):
        codec.check_free_form(getattr(request, name), name)
    if request.response_format is not None:
        codec.check_free_form(request.response_format.json_schema, "response_format.json_schema")


def check_run(run: internal.Run) -> None:
    """The same of a run. Raises RequestError for one that no router makes of a request that it has checked."""
    check_key(run.request_id)
    _check_ranges(run, _RUN_RANGES)
    _check_params(run.params)
    if run.resume_from is not None:
        raise errors.request_error(
            errors.Code.UNSUPPORTED, "resume_from is not served by this worker", param="resume_from"
        )


def check_tokenize(asked: internal.Tokenize) -> None:
    """Raises RequestError(invalid_request) for anything but one text, or one conversation that a request may hold."""
    if (asked.text is None) == (asked.messages is None):
        raise _invalid("text", "exactly one of text, messages")
    _check_messages(asked.messages or [])
    codec.check_free_form(asked.chat_template_kwargs, "chat_template_kwargs")


def check_key(key: str | None) -> None:
    """Raises RequestError(invalid_request) for what is no `<tenant token>:<id>`."""
    if key is None or not subjects.is_request_key(key):
        raise _invalid("request_id", "must be a tenant in subject form, a colon and a request id")


def check_attempt(control: internal.Control) -> None:
    """Raises RequestError(invalid_request) where a drop does not say which attempt of which request it means."""
    check_key(control.request_id)
    if control.attempt is None:
        raise _invalid("attempt", "is required")
    _check_ranges(control, {"attempt": _RUN_RANGES["attempt"]})


def check_id(request_id: str | None) -> None:
    """Raises RequestError(invalid_request) for an id that can't be part of a subject."""
    if request_id is not None and not _ID.fullmatch(request_id):
        raise _invalid("id", f"must be 1 to {limits.MAX_ID_BYTES} of A-Z a-z 0-9 _ -")


def required_features(request: messages.GenerateRequest) -> Iterator[RequiredFeature]:
    """The features that this request needs beyond plain generation. A value that changes nothing needs none."""
    yield from required_run_features(request)
    if request.response_format is not None and request.response_format.type != "text":
        yield RequiredFeature("structured_output", "response_format")
    if request.grammar:
        yield RequiredFeature("grammar", "grammar")
    if request.tools:
        yield RequiredFeature("tools", "tools")
    if request.tool_choice not in (None, "none", "auto", {}):
        yield RequiredFeature("tools", "tool_choice")
    if request.lora:
        yield RequiredFeature("lora", "lora")
    if request.resume_from is not None:
        yield RequiredFeature("resume", "resume_from")
    if request.routing is not None and request.routing.explain:
        yield RequiredFeature("explain", "routing.explain")


def required_run_features(asked: messages.GenerateRequest | internal.GenerationParams) -> Iterator[RequiredFeature]:
    """Those of them that a worker can see in a run as well."""
    if asked.logprobs is not None:
        yield RequiredFeature("logprobs", "logprobs")
    if asked.repetition_penalty not in (None, 1):
        yield RequiredFeature("penalties", "repetition_penalty")
    if asked.presence_penalty:
        yield RequiredFeature("penalties", "presence_penalty")
    if asked.frequency_penalty:
        yield RequiredFeature("penalties", "frequency_penalty")
    if asked.logit_bias and any(asked.logit_bias.values()):
        yield RequiredFeature("logit_bias", "logit_bias")
    if asked.return_progress:
        yield RequiredFeature("progress", "return_progress")


def to_params(request: messages.GenerateRequest) -> internal.GenerationParams:
    """What a worker must know of a checked request, beside its prompt."""
    return internal.GenerationParams(
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens or 0,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=request.seed,
        repetition_penalty=request.repetition_penalty,
        repetition_last_n=request.repetition_last_n,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias={int(token_id): bias for token_id, bias in (request.logit_bias or {}).items()},
        logprobs=request.logprobs,
        stop=stop_strings(request),
        stop_token_ids=request.stop_token_ids or [],
        ignore_eos=bool(request.ignore_eos),
        stream=request.stream is not False,
        return_token_ids=bool(request.return_token_ids),
        return_progress=bool(request.return_progress),
        cache_prompt=request.cache_prompt is not False,
        cache_salt=request.cache_salt or "",
        session_id=request.session_id,
        priority=request.priority or 0,
    )


def stop_strings(request: messages.GenerateRequest | internal.GenerationParams) -> list[str]:
    return [request.stop] if isinstance(request.stop, str) else request.stop or []


def message_text(message: messages.ChatMessage) -> str:
    """The text of a checked message's content, its parts joined."""
    if isinstance(message.content, list):
        return "".join(part.text or "" for part in message.content)
    return message.content or ""


def _check_params(asked: messages.GenerateRequest | internal.GenerationParams) -> None:
    """How tokens are to be chosen and when to end: a client's words, or a router's for them."""
    _check_ranges(asked, RANGES)
    _check_token_ids("stop_token_ids", asked.stop_token_ids)
    _check_stops(asked)
    _check_logit_bias(asked.logit_bias or {})
    _check_text_sizes(asked)


def _check_ranges(message: messages.Message | internal.GenerationParams, ranges: Mapping[str, Range]) -> None:
    for name, allowed in ranges.items():
        value = getattr(message, name, None)
        if value is not None and not allowed.contains(value):
            raise _invalid(name, f"must be {allowed}")


def _check_one_prompt(request: messages.GenerateRequest) -> None:
    given = [name for name in ("messages", "prompt", "token_ids") if getattr(request, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise _invalid(given[-1] if given else "prompt", f"exactly one of messages, prompt, token_ids; got {found}")
    if not getattr(request, given[0]):
        raise _invalid(given[0], "must not be empty")


def _check_messages(conversation: list[messages.ChatMessage]) -> None:
    if len(conversation) > limits.MAX_MESSAGES:
        raise _invalid("messages", f"at most {limits.MAX_MESSAGES} messages, got {len(conversation)}")
    for index, message in enumerate(conversation):
        path = f"messages[{index}]"
        codec.check_free_form(message.tool_calls, f"{path}.tool_calls")
        if not message.role:
            raise _invalid(f"{path}.role", "must not be empty")
        if isinstance(message.content, list):
            _check_parts(message.content, f"{path}.content")
        elif message.content is None and not message.tool_calls:
            raise _invalid(f"{path}.content", "is required")


def _check_parts(parts: list[messages.ContentPart], path: str) -> None:
    for index, part in enumerate(parts):
        if part.type != "text":
            where = f"{path}[{index}].type"
            raise errors.request_error(errors.Code.UNSUPPORTED, f"{where}: only text parts are served", param=where)
        if part.text is None:
            raise _invalid(f"{path}[{index}].text", "is required")


def _check_token_ids(name: str, token_ids: list[int] | None) -> None:
    if name == "stop_token_ids" and token_ids and len(token_ids) > limits.MAX_STOP_TOKEN_IDS:
        raise _invalid(name, f"at most {limits.MAX_STOP_TOKEN_IDS} ids, got {len(token_ids)}")
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) <= limits.MAX_TOKEN_ID):
        index = next(i for i, token in enumerate(token_ids) if not 0 <= token <= limits.MAX_TOKEN_ID)
        raise _invalid(f"{name}[{index}]", f"must be a token id from 0 to {limits.MAX_TOKEN_ID}")


def _check_stops(request: messages.GenerateRequest | internal.GenerationParams) -> None:
    stops = stop_strings(request)
    if len(stops) > limits.MAX_STOP_STRINGS:
        raise _invalid("stop", f"at most {limits.MAX_STOP_STRINGS} strings, got {len(stops)}")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop.encode()) <= limits.MAX_STOP_BYTES:
            path = "stop" if isinstance(request.stop, str) else f"stop[{index}]"
            raise _invalid(path, f"must have 1 to {limits.MAX_STOP_BYTES} bytes")


def _check_logit_bias(logit_bias: Mapping[str | int, float] | Mapping[int, float]) -> None:
    if len(logit_bias) > limits.MAX_LOGIT_BIASES:
        raise _invalid("logit_bias", f"at most {limits.MAX_LOGIT_BIASES} tokens, got {len(logit_bias)}")
    for name, bias in logit_bias.items():
        is_id = isinstance(name, int) or (name.isascii() and name.isdigit() and len(name) <= 10)
        if not is_id or not 0 <= int(name) <= limits.MAX_TOKEN_ID:
            raise _invalid("logit_bias", f"must map token ids from 0 to {limits.MAX_TOKEN_ID}, got {str(name)[:20]!r}")
        if not abs(bias) <= limits.MAX_LOGIT_BIAS:
            raise _invalid(
                "logit_bias",
                f"a bias must be at least -{limits.MAX_LOGIT_BIAS:g} and at most {limits.MAX_LOGIT_BIAS:g}",
            )


def _check_text_sizes(request: messages.GenerateRequest | internal.GenerationParams) -> None:
    for name in ("cache_salt", "session_id"):
        value = getattr(request, name)
        if value is not None and len(value.encode()) > limits.MAX_SALT_BYTES:
            raise _invalid(name, f"must have at most {limits.MAX_SALT_BYTES} bytes")


def _invalid(param: str, problem: str) -> errors.RequestError:
    return errors.request_error(errors.Code.INVALID_REQUEST, f"{param}: {problem}", param=param)
