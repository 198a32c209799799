"""Validates requests and runs field by field, and says which features they need (decision 0001).

A router checks each request, and a worker checks each run again, since it can't know which router sent it. Errors name
the field, what is wrong with it and what is allowed.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tokenbus.protocol.wire import block_hash, codec, errors, generate, internal, limits, messages, reasoning, subjects
from tokenbus.protocol.wire.checks.strict_schema import check_strict
from tokenbus.protocol.wire.errors import invalid_field
from tokenbus.protocol.wire.params import GenerationParams, JsonSchema, Range, ranges_of
from tokenbus.protocol.wire.tools import (
    check_free_form,
    check_json_size,
    check_members,
    check_template_arguments,
    check_tool_choice,
    check_tools,
)

_REQUEST = messages.GenerateRequest
_TOOLS_NEED_MESSAGES = "need messages: a prompt has no place for them"
REASONING_BUDGET = "reasoning_budget"
"""The feature of workers that can end reasoning early."""
CONTINUE = "continue_final_message"
"""The feature of workers that can continue a message, and the field that asks for it."""
_MAX_SETS = 1_024
"""Sets of given fields that are remembered."""
_MAX_DIGITS = 32
"""Digits of a number that an error repeats."""


class RequiredFeature(NamedTuple):
    """A feature that a worker must have to serve a request, and the field that asks for it."""

    feature: str
    param: str


_resyncs = codec.Decoder(messages.ResyncRequest)


def check_request(request: messages.GenerateRequest) -> messages.GenerateRequest:
    """Returns the request, with its prompt packed if that is a list of token ids. Raises RequestError for the first
    field that is not allowed."""
    check_id(request.id)
    check_id(request.copy_of, "copy_of")
    _check_one_prompt(request)
    _check_given(request)
    if request.token_ids is None:
        return request
    packed = _packed(request.token_ids)
    return request if packed is request.token_ids else codec.replace(request, token_ids=packed)


def _check_prompt_fields(request: messages.GenerateRequest) -> None:
    """Checks what only some kinds of prompts may have."""
    if request.messages is not None:
        _check_messages(request.messages)
    check_template_arguments(request.chat_template_kwargs)
    if request.tools and request.messages is None:
        raise invalid_field("tools", _TOOLS_NEED_MESSAGES)
    if request.reasoning is not None and request.messages is None:
        raise invalid_field("reasoning", "needs messages: only the answers to conversations have a known format")
    if request.continue_final_message:
        _check_continued(request.messages)
        if request.tool_choice and request.tool_choice not in ("auto", "none"):
            raise invalid_field("tool_choice", f"must be auto or none with {CONTINUE}: the answer has begun with text")
    if request.suffix and request.prompt is None:
        raise invalid_field("suffix", "needs prompt: other prompts have no gap to fill")
    if request.resume_from is not None:
        _check_resume_from(request.resume_from, request)


def check_run(run: internal.Run) -> None:
    """Raises RequestError for a run that no router makes from a request that it has checked."""
    check_key(run.request_id)
    check_router_id(run.router_id)
    check_ranges(run)
    _check_given(run.params)
    for index, one in enumerate(run.adapters):
        check_ranges(one, f"adapters[{index}].")
    if run.resume_from is not None:
        check_ranges(run.resume_from, "resume_from.")
        if not run.resume_from.token_ids:
            raise invalid_field("resume_from.token_ids", "must not be empty")
    if run.fetch_from is not None:
        _check_fetch_source(run.fetch_from)


def check_resume(request: messages.GenerateRequest, hash_scheme: str) -> None:
    """Raises RequestError for a request that continues a stream of a hash scheme that differs from the model workers',
    which would misread its tokens. A client that does not name its stream's scheme is trusted."""
    resume_from = request.resume_from
    if resume_from is not None and resume_from.hash_scheme not in (None, hash_scheme):
        problem = f"resume_from.hash_scheme: the model's workers have {hash_scheme} now"
        raise errors.request_error(errors.Code.UNSUPPORTED, problem, param="resume_from.hash_scheme")


def check_tokenize(request: internal.Tokenize) -> None:
    """Raises RequestError unless there is either one text or one conversation that a request may have."""
    check_ranges(request)
    if (request.text is None) == (request.messages is None):
        raise invalid_field("text", "exactly one of text and messages must be given")
    _check_messages(request.messages or [])
    if request.continue_final_message:
        _check_continued(request.messages)
    check_template_arguments(request.chat_template_kwargs)
    check_tools(request.tools or [])


def check_tokenize_request(request: messages.TokenizeRequest) -> None:
    """Raises RequestError for the first field that is not allowed."""
    check_id(request.id)
    check_ranges(request)
    if (request.prompt is None) == (request.messages is None):
        raise invalid_field("prompt", "exactly one of messages and prompt must be given")
    if request.messages is None:
        if request.tools:
            raise invalid_field("tools", _TOOLS_NEED_MESSAGES)
    elif not request.messages:
        raise invalid_field("messages", "must not be empty")
    else:
        _check_messages(request.messages)
    if request.continue_final_message:
        _check_continued(request.messages)
    check_template_arguments(request.chat_template_kwargs)
    check_tools(request.tools or [])


def check_cache_request(request: messages.CacheRequest) -> None:
    """Raises RequestError for the first field that is not allowed."""
    check_id(request.id)
    if not request.session_id:
        raise invalid_field("session_id", "is required")
    _check_salts(request, "session_id")
    if request.cache_control is None:
        raise invalid_field("cache_control", "is required")
    check_ranges(request.cache_control, "cache_control.")


def check_detokenize_request(request: messages.DetokenizeRequest) -> None:
    """Raises RequestError for the first field that is not allowed."""
    check_id(request.id)
    check_ranges(request)
    if request.token_ids is None:
        raise invalid_field("token_ids", "is required")
    _check_token_ids("token_ids", request.token_ids)


def check_control(control: internal.Control) -> None:
    """Raises RequestError for a `drop` that does not name an attempt of a request, another command about a request that
    names none, and numbers out of their ranges."""
    if control.op in ("drop", "cancel", "resync", "stop"):
        check_key(control.request_id)
    if control.op == "drop" and control.attempt is None:
        raise invalid_field("attempt", "is required")
    check_ranges(control)


def check_take(take: internal.Take) -> None:
    """Raises RequestError for a `take` that does not name an attempt of a request."""
    check_key(take.request_id)
    check_ranges(take)


def check_next_turn(turn: internal.NextTurn) -> None:
    """Raises RequestError for a turn that no router expects."""
    check_key(turn.request_id)
    check_ranges(turn)
    if not turn.token_ids or len(turn.token_ids) % block_hash.TOKEN_BYTES:
        raise invalid_field("token_ids", "must be 32-bit integers, at least one")


def check_beat(beat: internal.Beat) -> None:
    """Raises RequestError for a beat that no process sends."""
    check_ranges(beat)
    if len(beat.seqs) > limits.MAX_PROCESS_WORKERS:
        raise invalid_field("seqs", f"must name at most {limits.MAX_PROCESS_WORKERS} workers, got {len(beat.seqs)}")


def check_key(key: str | None) -> None:
    """Raises RequestError for anything but `<tenant token>:<request id>`."""
    if key is None or not subjects.is_request_key(key):
        raise invalid_field("request_id", "must be an encoded tenant name, a colon and a request id")


def check_router_id(router_id: str) -> None:
    """Raises RequestError for a name that can't be a router's."""
    if not 0 < len(router_id.encode()) <= limits.MAX_NAME_BYTES:
        raise invalid_field("router_id", f"must have 1 to {limits.MAX_NAME_BYTES} bytes")


def _check_fetch_source(source: internal.FetchSource) -> None:
    if not 0 < len(source.worker_id.encode()) <= limits.MAX_NAME_BYTES:
        raise invalid_field("fetch_from.worker_id", f"must have 1 to {limits.MAX_NAME_BYTES} bytes")
    check_ranges(source, "fetch_from.")


_NO_RESYNC = messages.ResyncRequest(offset=0)


def read_resync(
    headers: Mapping[str, str] | None, data: bytes
) -> tuple[codec.Encoding, messages.ResyncRequest, errors.Error | None]:
    """Reads a resync; returns the encoding of its answer, the request, and an error if an offset is not valid."""
    encoding = codec.Encoding.JSON
    try:
        encoding = codec.encoding_of(headers)
        asked = _resyncs.decode(data, encoding)
        for name, offset in (("offset", asked.offset), ("prompt_offset", asked.prompt_offset or 0)):
            if offset < 0:
                raise errors.invalid_field(name, f"must be 0 or more, got {offset}")
    except codec.MediaTypeError as error:
        return encoding, _NO_RESYNC, errors.make_error(errors.Code.INVALID_REQUEST, str(error))
    except errors.RequestError as error:
        return encoding, _NO_RESYNC, error.error
    return encoding, asked, None


def check_id(request_id: str | None, path: str = "id") -> None:
    """Raises RequestError for an id that can't be part of a subject."""
    if request_id is not None and not subjects.is_request_id(request_id):
        raise invalid_field(path, f"must be 1 to {limits.MAX_ID_BYTES} of A-Z a-z 0-9 _ -")


def check_ranges(struct: msgspec.Struct, path: str = "") -> None:
    """Raises RequestError for the first number outside the range that its annotation declares.

    `path` comes before its name in the error."""
    for name, allowed in ranges_of(type(struct)).items():
        _check_range(path + name, getattr(struct, name), allowed)


def _check_range(path: str, value: float | None, allowed: Range) -> None:
    if value is not None and not allowed.contains(value):
        raise invalid_field(path, f"must be {allowed}, got {str(value)[:_MAX_DIGITS]}")


def required_features(request: messages.GenerateRequest) -> Iterator[RequiredFeature]:
    """Yields the features that a request needs beyond plain generation. A value that changes nothing needs none."""
    yield from required_run_features(request)
    if request.suffix:
        yield RequiredFeature("fim", "suffix")
    if request.resume_from is not None:
        yield RequiredFeature("resume", "resume_from")
    if request.routing is not None and request.routing.explain:
        yield RequiredFeature("explain", "routing.explain")


def required_run_features(params: GenerationParams) -> Iterator[RequiredFeature]:
    """Yields those features that a worker can see in a run."""
    if params.prompt_logprobs is not None:
        yield RequiredFeature("prompt_logprobs", "prompt_logprobs")
    elif params.max_tokens == 0:
        yield RequiredFeature("cache_control", "max_tokens")
    if params.logprobs is not None:
        yield RequiredFeature("logprobs", "logprobs")
    if params.repetition_penalty not in (None, 1):
        yield RequiredFeature("penalties", "repetition_penalty")
    if params.presence_penalty:
        yield RequiredFeature("penalties", "presence_penalty")
    if params.frequency_penalty:
        yield RequiredFeature("penalties", "frequency_penalty")
    if params.logit_bias and any(params.logit_bias.values()):
        yield RequiredFeature("logit_bias", "logit_bias")
    if params.return_progress:
        yield RequiredFeature("progress", "return_progress")
    if params.called_tools:
        yield RequiredFeature("tools", "tools")
    if params.continue_final_message:
        yield RequiredFeature(CONTINUE, CONTINUE)
    if needs_reasoning_budget(params):
        yield RequiredFeature(REASONING_BUDGET, "reasoning.max_tokens")
    for name in constraints_given(params):
        yield RequiredFeature("grammar" if name == "grammar" else "structured_output", name)


def needs_reasoning_budget(params: GenerationParams) -> bool:
    """Whether the reasoning must be closed after some tokens. Workers of earlier versions would ignore that."""
    asked = params.reasoning
    return asked is not None and asked.max_tokens is not None and not asked.optional


def constraints_given(params: GenerationParams) -> list[str]:
    """Returns the fields that constrain the output."""
    wanted = params.response_format
    given = [] if wanted is None or wanted.type == "text" else ["response_format"]
    return given + [name for name in ("regex", "choice", "grammar") if getattr(params, name)]


def to_params(request: messages.GenerateRequest) -> GenerationParams:
    """Returns the generation parameters of a request, for its run.

    Workers don't see the variables of the chat template. A constrained answer must not begin with reasoning if these
    turn it off, so the parameters say so."""
    params = {name: getattr(request, name) for name in _given(request).params}
    if constraints_given(request) or request.called_tools:
        params["reasoning"] = reasoning.as_switched(request.reasoning, request.chat_template_kwargs)
    return GenerationParams(**params)


def params_bytes(params: GenerationParams) -> int:
    """Returns the size of the parameters that may be large: tools and constraints."""
    large = [getattr(params, name) for name in ("tools", "response_format", "regex", "choice", "grammar")]
    return len(msgspec.msgpack.encode(large)) if any(large) else 0


def message_text(message: messages.ChatMessage) -> str:
    """Returns the text of a checked message, with its parts joined."""
    if isinstance(message.content, list):
        return "".join(part.text or "" for part in message.content)
    return message.content or ""


class _Given(NamedTuple):
    """The checks of requests, or of runs' parameters, that give a certain set of fields."""

    ranges: tuple[tuple[str, Range], ...]
    """The given numbers and their ranges."""
    checks: tuple[Callable[[Any], None], ...]
    params: tuple[str, ...]
    """The given fields that are parameters of the generation."""


def _check_given(params: GenerationParams) -> None:
    """Checks the fields of a request or of a run's parameters, of which most are absent in most requests."""
    given = _given(params)
    for name, allowed in given.ranges:
        _check_range(name, getattr(params, name), allowed)
    for check in given.checks:
        check(params)


def _given(params: GenerationParams) -> _Given:
    kind = type(params)
    return _find_given(kind, tuple(map(operator.is_not, msgspec.structs.astuple(params), _defaults(kind))))


@functools.cache
def _defaults(kind: type[GenerationParams]) -> tuple[object, ...]:
    return msgspec.structs.astuple(kind())


@functools.lru_cache(_MAX_SETS)
def _find_given(kind: type[GenerationParams], are_given: tuple[bool, ...]) -> _Given:
    names = list(itertools.compress(kind.__struct_fields__, are_given))
    ranges = ranges_of(kind)
    return _Given(
        tuple((name, ranges[name]) for name in ranges if name in names),
        tuple(
            check
            for fields, check in _CHECKS
            if not fields.isdisjoint(names) and (check is not _check_prompt_fields or issubclass(kind, _REQUEST))
        ),
        tuple(name for name in names if name in GenerationParams.__struct_fields__),
    )


def _check_stop_token_ids(params: GenerationParams) -> None:
    stop_ids = params.stop_token_ids or []
    if len(stop_ids) > limits.MAX_STOP_TOKEN_IDS:
        raise invalid_field(
            "stop_token_ids", f"at most {limits.MAX_STOP_TOKEN_IDS} ids are allowed, got {len(stop_ids)}"
        )
    _check_token_ids("stop_token_ids", stop_ids)


def _check_tool_fields(params: GenerationParams) -> None:
    check_free_form(params.tool_choice, "tool_choice")
    check_tools(params.tools or [])
    check_tool_choice(params.tool_choice, params.tools or [])


def _check_hints(params: GenerationParams) -> None:
    _check_salts(params, "cache_salt", "session_id")
    if params.cache_control is not None:
        check_ranges(params.cache_control, "cache_control.")


def _check_reasoning(params: GenerationParams) -> None:
    if params.reasoning is not None:
        check_ranges(params.reasoning, "reasoning.")
        _check_size("reasoning.effort", params.reasoning.effort or "", limits.MAX_EFFORT_BYTES)


def _check_salts(struct: msgspec.Struct, *names: str) -> None:
    for name in names:
        value = getattr(struct, name)
        if value is not None and len(value.encode()) > limits.MAX_SALT_BYTES:
            raise invalid_field(name, f"must have at most {limits.MAX_SALT_BYTES} bytes")


def _check_one_prompt(request: messages.GenerateRequest) -> None:
    given = [name for name in ("messages", "prompt", "token_ids") if getattr(request, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        problem = f"exactly one of messages, prompt and token_ids must be given, got {found}"
        raise invalid_field(given[-1] if given else "prompt", problem)
    if not getattr(request, given[0]):
        raise invalid_field(given[0], "must not be empty")


def _check_messages(conversation: list[messages.ChatMessage]) -> None:
    if len(conversation) > limits.MAX_MESSAGES:
        raise invalid_field("messages", f"at most {limits.MAX_MESSAGES} messages are allowed, got {len(conversation)}")
    for index, message in enumerate(conversation):
        path = f"messages[{index}]"
        check_free_form(message.tool_calls, f"{path}.tool_calls")
        if not message.role:
            raise invalid_field(f"{path}.role", "must not be empty")
        if isinstance(message.content, list):
            _check_parts(message.content, f"{path}.content")
        elif message.content is None and not message.tool_calls:
            raise invalid_field(f"{path}.content", "is required")


def _check_continued(conversation: list[messages.ChatMessage] | None) -> None:
    """Raises RequestError unless the last message can be continued, which has been checked like the others."""
    if not conversation:
        raise invalid_field(CONTINUE, "needs messages: a prompt is always continued")
    last, path = conversation[-1], f"messages[{len(conversation) - 1}]"
    if last.role != "assistant":
        raise invalid_field(f"{path}.role", f"must be assistant with {CONTINUE}, got {last.role[:40]!r}")
    if last.tool_calls:
        raise invalid_field(f"{path}.tool_calls", f"must be empty with {CONTINUE}: only a text can be continued")
    if not message_text(last):
        raise invalid_field(f"{path}.content", f"must not be empty with {CONTINUE}: only a text can be continued")


def needed_feature(params: GenerationParams) -> str:
    """Returns the feature that a request's worker must have and that workers of earlier versions lack; empty if there
    is none. Those that can continue a message can close reasoning too, if the model's can be closed."""
    if params.continue_final_message:
        return CONTINUE
    return REASONING_BUDGET if needs_reasoning_budget(params) else ""


def _check_parts(parts: list[messages.ContentPart], path: str) -> None:
    for index, part in enumerate(parts):
        if part.type != "text":
            where = f"{path}[{index}].type"
            raise errors.request_error(errors.Code.UNSUPPORTED, f"{where}: only text parts are served", param=where)
        if part.text is None:
            raise invalid_field(f"{path}[{index}].text", "is required")


def _check_resume_from(resume_from: generate.ResumeFrom, params: GenerationParams) -> None:
    count = len(resume_from.token_ids)
    if not count:
        raise invalid_field("resume_from.token_ids", "must not be empty")
    _check_token_ids("resume_from.token_ids", resume_from.token_ids)
    if params.max_tokens is not None and count >= params.max_tokens:
        raise invalid_field("resume_from.token_ids", f"must be fewer than max_tokens, {params.max_tokens}, got {count}")
    if not params.is_streamed and (params.logprobs is not None or params.prompt_logprobs is not None):
        problem = "resume_from: the whole answer has no log probabilities of tokens that were given: stream it"
        raise errors.request_error(errors.Code.UNSUPPORTED, problem, param="resume_from")


def _check_token_ids(name: str, token_ids: Sequence[int]) -> None:
    _pack(name, token_ids)


def _packed(token_ids: list[int] | bytes) -> bytes:
    """Returns the ids of a prompt in packed form."""
    if not isinstance(token_ids, bytes):
        return _pack("token_ids", token_ids)
    if len(token_ids) % block_hash.TOKEN_BYTES:
        problem = f"packed ids must have {block_hash.TOKEN_BYTES} bytes each, got {len(token_ids)} bytes"
        raise invalid_field("token_ids", problem)
    return token_ids


def _pack(name: str, token_ids: Sequence[int]) -> bytes:
    # There may be millions. This is a loop in C; the position of a wrong id is searched only if there is one.
    try:
        return block_hash.pack_token_ids(token_ids)
    except OverflowError:
        index = next(i for i, token in enumerate(token_ids) if not 0 <= token <= limits.MAX_TOKEN_ID)
        raise invalid_field(f"{name}[{index}]", f"must be a token id from 0 to {limits.MAX_TOKEN_ID}") from None


def _check_lora(params: GenerationParams) -> None:
    lora = params.lora or []
    if len(lora) > limits.MAX_ADAPTERS:
        raise invalid_field("lora", f"at most {limits.MAX_ADAPTERS} adapters are allowed, got {len(lora)}")
    for index, one in enumerate(lora):
        if any(one.name == other.name for other in lora[:index]):
            raise invalid_field(f"lora[{index}].name", "is named twice")
        check_ranges(one, f"lora[{index}].")


def _check_stops(params: GenerationParams) -> None:
    stops = params.stop_strings
    if len(stops) > limits.MAX_STOP_STRINGS:
        raise invalid_field("stop", f"at most {limits.MAX_STOP_STRINGS} strings are allowed, got {len(stops)}")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop.encode()) <= limits.MAX_STOP_BYTES:
            path = "stop" if isinstance(params.stop, str) else f"stop[{index}]"
            raise invalid_field(path, f"must have 1 to {limits.MAX_STOP_BYTES} bytes")


def _check_constraint(params: GenerationParams) -> None:
    given = constraints_given(params)
    if len(given) > 1:
        problem = f"at most one of response_format, regex, choice and grammar is allowed, got {' and '.join(given)}"
        raise invalid_field(given[-1], problem)
    if given and params.ignore_eos:
        raise invalid_field("ignore_eos", f"must not be true with {given[0]}, whose answer ends with an end token")
    if given and given != ["response_format"] and params.called_tools:
        raise invalid_field(given[0], "can't be used with tools")
    if params.response_format is not None and params.response_format.type == "json_schema":
        _check_schema(params.response_format.json_schema)
    _check_size("regex", params.regex or "", limits.MAX_REGEX_BYTES)
    _check_size("grammar", params.grammar or "", limits.MAX_GRAMMAR_BYTES)
    if (params.grammar or "").count("::=") > limits.MAX_GRAMMAR_RULES:
        raise invalid_field("grammar", f"must have at most {limits.MAX_GRAMMAR_RULES} rules")
    choices = params.choice or []
    if len(choices) > limits.MAX_CHOICES:
        raise invalid_field("choice", f"at most {limits.MAX_CHOICES} texts are allowed, got {len(choices)}")
    if not all(choices):
        raise invalid_field(f"choice[{choices.index('')}]", "must not be empty")
    _check_size("choice", "".join(choices), limits.MAX_CHOICE_BYTES)


def _check_schema(given: JsonSchema | None) -> None:
    path = "response_format.json_schema.schema"
    schema = given.schema if given is not None else None
    if schema is None:
        raise invalid_field(path, "is required")
    check_free_form(schema, path)
    check_json_size(schema, path, limits.MAX_SCHEMA_BYTES)
    check_members(schema, path, limits.MAX_SCHEMA_PROPERTIES)
    if given is not None and given.strict:
        check_strict(schema, path)


def _check_size(name: str, text: str, most: int) -> None:
    size = len(text.encode())
    if size > most:
        raise invalid_field(name, f"must have at most {most} bytes, got {size}")


def _check_logit_bias(params: GenerationParams) -> None:
    logit_bias = params.logit_bias or {}
    if len(logit_bias) > limits.MAX_LOGIT_BIASES:
        raise invalid_field(
            "logit_bias", f"at most {limits.MAX_LOGIT_BIASES} tokens are allowed, got {len(logit_bias)}"
        )
    most = limits.MAX_LOGIT_BIAS
    for name, bias in logit_bias.items():
        # isdigit alone would accept digits of other scripts, and int() is slow for very long strings.
        is_id = isinstance(name, int) or (name.isascii() and name.isdigit() and len(name) <= 10)
        if not is_id or not 0 <= int(name) <= limits.MAX_TOKEN_ID:
            problem = f"must map token ids from 0 to {limits.MAX_TOKEN_ID}, got {str(name)[:20]!r}"
            raise invalid_field("logit_bias", problem)
        if not abs(bias) <= most:  # written so that NaN is refused
            raise invalid_field("logit_bias", f"a bias must be at least -{most:g} and at most {most:g}")


_CHECKS: Sequence[tuple[frozenset[str], Callable[[Any], None]]] = (
    (frozenset({"stop_token_ids"}), _check_stop_token_ids),
    (frozenset({"stop"}), _check_stops),
    (frozenset({"logit_bias"}), _check_logit_bias),
    (frozenset({"response_format", "regex", "choice", "grammar"}), _check_constraint),
    (frozenset({"tools", "tool_choice"}), _check_tool_fields),
    (frozenset({"lora"}), _check_lora),
    (frozenset({"cache_salt", "session_id", "cache_control"}), _check_hints),
    (frozenset({"reasoning"}), _check_reasoning),
    (
        frozenset(
            {
                "messages",
                "chat_template_kwargs",
                "tools",
                "reasoning",
                "continue_final_message",
                "suffix",
                "resume_from",
            }
        ),
        _check_prompt_fields,
    ),
)
"""The checks of a request in their order, each with the fields that it is about: it allows them all to be absent."""
