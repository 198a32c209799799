"""Parses the body of a chat completion request and turns it into a wire request."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from tokenbus.gateway.generation import conversation
from tokenbus.gateway.generation.answer_events import AnswerEventReader
from tokenbus.gateway.generation.dialect import ResponseHead
from tokenbus.gateway.generation.model_names import checked_model
from tokenbus.gateway.http import http_errors
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.gateway.openai import chat_response
from tokenbus.gateway.openai.reasoning_fields import ReasoningWishes, RequestedReasoning, read_wishes
from tokenbus.gateway.openai.sampling_fields import SamplingFields
from tokenbus.protocol.wire import codec, errors
from tokenbus.protocol.wire import messages as wire
from tokenbus.protocol.wire.checks import validation


class OpenAIChatMessage(wire.ChatMessage, frozen=True, kw_only=True, omit_defaults=True):
    """A message of the conversation."""

    reasoning: str | None = None
    """Another name of `reasoning_content`."""


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """The body of a chat completion request. Unknown fields are ignored, as OpenAI's clients expect."""

    messages: list[OpenAIChatMessage] | None = None
    max_completion_tokens: int | None = None
    """The newer name of `max_tokens`, which takes precedence."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning: RequestedReasoning | None = None
    """OpenRouter's."""
    thinking_token_budget: int | None = None
    reasoning_budget_tokens: int | None = None
    thinking_budget_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Not OpenAI's; has the same meaning as on the wire."""


_decoder = codec.Decoder(ChatRequest)


class ChatFieldNames(NamedTuple):
    """OpenAI's names for the fields of one request."""

    renamed: Mapping[str, str]
    """The names that differ from the wire's."""
    num_joined: int
    """The number of messages that the request has beyond the wire's."""

    def of(self, param: str) -> str:
        """Returns the name of a field."""
        return conversation.name_in_given(self.renamed.get(param, param), self.num_joined)


class ParsedChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request for a chat completion."""

    model: str
    request: wire.GenerateRequest
    stream: bool
    n: int
    include_usage: bool
    names: ChatFieldNames

    @property
    def requests(self) -> tuple[wire.GenerateRequest, ...]:
        return (self.request,)

    def encoder(self, head: ResponseHead) -> chat_response.ChunkEncoder:
        """Returns the encoder of a streamed response."""
        return chat_response.ChunkEncoder(head, include_usage=self.include_usage)

    def encode_whole(self, head: ResponseHead, answers: Sequence[AnswerEventReader]) -> bytes:
        """Returns the body of an unstreamed response."""
        return chat_response.encode_whole(head, answers)

    def named(self, error: ErrorResponse) -> ErrorResponse:
        """Returns a router's or worker's error with OpenAI's name for the field at fault."""
        return http_errors.renamed(error, self.names.of)


def parse(body: bytes, headers: Mapping[str, str], request_id: str, default_model: str = "") -> ParsedChatRequest:
    """Parses a body, and validates it as a router would. Raises RequestError with OpenAI's name for the field at
    fault."""
    chat = _decoder.decode(body, codec.Encoding.JSON)
    model = checked_model(chat.model, default_model)
    _check(chat)
    wishes = read_wishes(chat, chat.reasoning_effort)
    request = _to_wire(chat, wishes, conversation.session_of(headers), request_id)
    names = _names_of(chat, wishes, request)
    with http_errors.renaming(names.of):
        validation.check_request(request)
    return ParsedChatRequest(
        model=model,
        request=request,
        stream=bool(chat.stream),
        n=1 if chat.n is None else chat.n,
        include_usage=chat.includes_usage,
        names=names,
    )


def _names_of(chat: ChatRequest, wishes: ReasoningWishes, request: wire.GenerateRequest) -> ChatFieldNames:
    renamed = chat.renamed | wishes.names
    if chat.max_completion_tokens is not None:
        renamed["max_tokens"] = "max_completion_tokens"
    if chat.top_logprobs is not None:
        renamed["logprobs"] = "top_logprobs"
    return ChatFieldNames(renamed, len(chat.messages or []) - len(request.messages or []))


def _check(chat: ChatRequest) -> None:
    """Checks fields without a counterpart on the wire."""
    if chat.messages is None:
        raise errors.invalid_field("messages", "is required")
    if chat.top_logprobs is not None and not chat.logprobs:
        raise errors.invalid_field("top_logprobs", "needs logprobs: true")
    chat.check_answers()


def _to_wire(chat: ChatRequest, wishes: ReasoningWishes, session: str | None, request_id: str) -> wire.GenerateRequest:
    common = chat.to_wire(session)
    if chat.max_completion_tokens is not None:
        common["max_tokens"] = chat.max_completion_tokens
    return wire.GenerateRequest(
        id=request_id,
        messages=conversation.normalized([to_wire_message(one) for one in chat.messages or []]),
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        tools=chat.tools,
        tool_choice=chat.tool_choice,
        parallel_tool_calls=chat.parallel_tool_calls,
        reasoning=wishes.options,
        chat_template_kwargs=wishes.template_arguments,
        **common,
    )


def to_wire_message(one: OpenAIChatMessage) -> wire.ChatMessage:
    """Returns a message in the wire's form."""
    return wire.ChatMessage(
        role=one.role,
        content=one.content,
        reasoning_content=one.reasoning if one.reasoning_content is None else one.reasoning_content,
        name=one.name,
        tool_calls=one.tool_calls,
        tool_call_id=one.tool_call_id,
    )
