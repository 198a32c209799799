"""Parses the body of a chat completion and turns it into a request of our wire protocol; pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenbus.gateway.generation import conversation
from tokenbus.gateway.generation.answer_events import AnswerReader
from tokenbus.gateway.generation.dialect import ResponseHead
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.gateway.openai import chat_response, error_bodies
from tokenbus.protocol.wire import codec, errors, subjects, validation
from tokenbus.protocol.wire import messages as wire

MAX_CHOICES = 128
"""OpenAI's limit of `n`."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None
    """Adds one more event, with the usage, before the end."""


class ChatMessage(wire.ChatMessage, frozen=True, kw_only=True, omit_defaults=True):
    """A message of the conversation."""

    reasoning: str | None = None
    """Another name of `reasoning_content`."""


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a chat completion. Unknown fields are ignored, as OpenAI's clients expect."""

    model: str | None = None
    messages: list[ChatMessage] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """The newer name of `max_tokens`, which takes precedence."""
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str | int, float] | None = None
    response_format: wire.ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    """Names the conversation, which is kept on one worker."""
    top_k: int | None = None
    """This field and those below are not OpenAI's; they mean what they mean on the wire."""
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
    chat_template_kwargs: dict[str, Any] | None = None


_decoder = codec.Decoder(ChatRequest)


class ParsedChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request for a chat completion."""

    model: str
    request: wire.GenerateRequest
    stream: bool
    n: int
    include_usage: bool

    def encoder(self, head: ResponseHead) -> chat_response.ChunkEncoder:
        """Returns the encoder of a response that is streamed."""
        return chat_response.ChunkEncoder(head, include_usage=self.include_usage)

    def encode_whole(self, head: ResponseHead, answers: Sequence[AnswerReader]) -> bytes:
        """Returns the body of a response that is not streamed."""
        return chat_response.encode_whole(head, answers)

    def error_body(self, error: ErrorResponse) -> bytes:
        """Returns the body of an error response."""
        return error_bodies.encode(error)


def parse(body: bytes, headers: Mapping[str, str], request_id: str) -> ParsedChatRequest:
    """Parses a body, and validates it as a router would. Raises RequestError with OpenAI's name of the field at
    fault."""
    chat = _decoder.decode(body, codec.Encoding.JSON)
    model = checked_model(chat.model)
    _check(chat)
    request = _to_wire(chat, conversation.session_of(headers), request_id)
    try:
        validation.check_request(request)
    except errors.RequestError as refused:
        raise errors.RequestError(with_openai_names(refused.error, chat)) from refused
    usage = chat.stream_options is not None and bool(chat.stream_options.include_usage)
    return ParsedChatRequest(
        model=model, request=request, stream=bool(chat.stream), n=1 if chat.n is None else chat.n, include_usage=usage
    )


def with_openai_names(error: errors.Error, chat: ChatRequest) -> errors.Error:
    """Returns the error with OpenAI's name of its field."""
    theirs = _openai_name(error.param, chat)
    if error.param is None or theirs == error.param:
        return error
    # Messages of validation begin with the field's name.
    problem = error.message.removeprefix(error.param)
    message = error.message if problem == error.message else f"{theirs}{problem}"
    return errors.make_error(error.code, message, param=theirs, retry_after_ms=error.retry_after_ms)


def _openai_name(param: str | None, chat: ChatRequest) -> str | None:
    if param == "max_tokens" and chat.max_completion_tokens is not None:
        return "max_completion_tokens"
    if param == "logprobs" and chat.top_logprobs is not None:
        return "top_logprobs"
    return param


def checked_model(model: str | None) -> str:
    """Returns the name of the model. Raises RequestError if it is missing, or none that a model can have."""
    if model is None:
        raise errors.invalid_field("model", "is required")
    try:
        subjects.encode_name(model)
    except ValueError as error:
        raise errors.invalid_field("model", str(error)) from error
    return model


def _check(chat: ChatRequest) -> None:
    """Checks what has no counterpart on the wire."""
    if chat.messages is None:
        raise errors.invalid_field("messages", "is required")
    if chat.n is not None and not 1 <= chat.n <= MAX_CHOICES:
        raise errors.invalid_field("n", f"must be 1 to {MAX_CHOICES}, got {chat.n}")
    if chat.top_logprobs is not None and not chat.logprobs:
        raise errors.invalid_field("top_logprobs", "needs logprobs: true")
    if chat.stream_options is not None and not chat.stream:
        raise errors.invalid_field("stream_options", "needs stream: true")


def _to_wire(chat: ChatRequest, session: str | None, request_id: str) -> wire.GenerateRequest:
    """Converts to a wire request, which is streamed in any case, so that a worker notices if this gateway dies."""
    return wire.GenerateRequest(
        id=request_id,
        messages=conversation.normalized([_to_message(one) for one in chat.messages or []]),
        max_tokens=chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens,
        temperature=chat.temperature,
        top_p=chat.top_p,
        top_k=chat.top_k,
        min_p=chat.min_p,
        repetition_penalty=chat.repetition_penalty,
        presence_penalty=chat.presence_penalty,
        frequency_penalty=chat.frequency_penalty,
        seed=chat.seed,
        stop=chat.stop,
        logit_bias=chat.logit_bias,
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        response_format=chat.response_format,
        regex=chat.regex,
        choice=chat.choice,
        grammar=chat.grammar,
        tools=chat.tools,
        tool_choice=chat.tool_choice,
        parallel_tool_calls=chat.parallel_tool_calls,
        cache_salt=chat.cache_salt,
        session_id=chat.session_id or chat.prompt_cache_key or session,
        priority=conversation.priority_of(chat.service_tier) if chat.priority is None else chat.priority,
        timeout_ms=chat.timeout_ms,
        ignore_eos=chat.ignore_eos,
        min_tokens=chat.min_tokens,
        stop_token_ids=chat.stop_token_ids,
        chat_template_kwargs=conversation.template_arguments(chat.reasoning_effort, chat.chat_template_kwargs),
    )


def _to_message(one: ChatMessage) -> wire.ChatMessage:
    return wire.ChatMessage(
        role=one.role,
        content=one.content,
        reasoning_content=one.reasoning if one.reasoning_content is None else one.reasoning_content,
        name=one.name,
        tool_calls=one.tool_calls,
        tool_call_id=one.tool_call_id,
    )
