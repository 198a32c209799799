"""Chat completions: the fields of a request, its wire request, and its answers as chunks or as one completion."""

import functools
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from tokenbus.gateway.http import http_errors
from tokenbus.gateway.openai import schemas
from tokenbus.gateway.openai.choices import ChoicesEncoder, encode_logprobs
from tokenbus.gateway.openai.fields import ReasoningWishes, RequestedReasoning, SamplingFields, read_wishes
from tokenbus.gateway.serving import conversation
from tokenbus.gateway.serving.answer_events import (
    AnswerEnded,
    AnswerEvent,
    AnswerEventReader,
    AnswerPart,
    PartGrew,
    PartKind,
    PartStarted,
    TokensSampled,
)
from tokenbus.gateway.serving.dialect import ApiEndpoint, ParsedGeneration, RequestHead
from tokenbus.protocol.wire import errors
from tokenbus.protocol.wire import messages as wire
from tokenbus.protocol.wire.checks import validation


class OpenAIChatMessage(wire.ChatMessage, frozen=True, kw_only=True, omit_defaults=True):
    """A message of the conversation."""

    reasoning: str | None = None
    """Another name of `reasoning_content`."""

    def to_wire(self) -> wire.ChatMessage:
        return wire.ChatMessage(
            role=self.role,
            content=self.content,
            reasoning_content=self.reasoning if self.reasoning_content is None else self.reasoning_content,
            name=self.name,
            tool_calls=self.tool_calls,
            tool_call_id=self.tool_call_id,
        )


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


def read(chat: ChatRequest, head: RequestHead) -> ParsedGeneration:
    """Validates a body as a router would. Raises RequestError with OpenAI's name for the field at fault."""
    if chat.messages is None:
        raise errors.invalid_field("messages", "is required")
    if chat.top_logprobs is not None and not chat.logprobs:
        raise errors.invalid_field("top_logprobs", "needs logprobs: true")
    chat.check_answers()
    wishes = read_wishes(chat, chat.reasoning, chat.chat_template_kwargs, chat.reasoning_effort)
    request = _to_wire(chat, chat.messages, wishes, head)
    name_of = conversation.given_names(
        _renamed(chat, wishes), num_joined=len(chat.messages) - len(request.messages or [])
    )
    with http_errors.renaming(name_of):
        validation.check_request(request)
    return ParsedGeneration(
        model=head.model,
        requests=(request,),
        encoder=functools.partial(ChunkEncoder, n=chat.num_answers, include_usage=chat.includes_usage),
        stream=bool(chat.stream),
        n=chat.num_answers,
        name_of=name_of,
    )


def _renamed(chat: ChatRequest, wishes: ReasoningWishes) -> dict[str, str]:
    renamed = chat.renamed | wishes.names
    if chat.max_completion_tokens is not None:
        renamed["max_tokens"] = "max_completion_tokens"
    if chat.top_logprobs is not None:
        renamed["logprobs"] = "top_logprobs"
    return renamed


def _to_wire(
    chat: ChatRequest, said: list[OpenAIChatMessage], wishes: ReasoningWishes, head: RequestHead
) -> wire.GenerateRequest:
    common = chat.to_wire(head.session)
    if chat.max_completion_tokens is not None:
        common["max_tokens"] = chat.max_completion_tokens
    return wire.GenerateRequest(
        id=head.id,
        messages=conversation.normalized([one.to_wire() for one in said]),
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        tools=chat.tools,
        tool_choice=chat.tool_choice,
        parallel_tool_calls=chat.parallel_tool_calls,
        reasoning=wishes.options,
        chat_template_kwargs=wishes.template_arguments,
        **common,
    )


class ChunkEncoder(ChoicesEncoder):
    """Encodes answers as chat completion chunks, or as one chat completion."""

    id_prefix = "chatcmpl-"
    event_type = schemas.ChatCompletionChunk
    response_type = schemas.ChatCompletion

    def encode(self, choice: int, events: Sequence[AnswerEvent]) -> list[bytes]:
        """Returns the events of one chunk of an answer."""
        deltas: list[schemas.ChunkChoice] = []
        logprobs: schemas.ChoiceLogprobs | None = None
        for event in events:
            match event:
                case TokensSampled():
                    logprobs = _logprobs_of(event.logprobs)
                case PartStarted(part) if part.kind is PartKind.TOOL_CALL:
                    deltas.append(_choice(choice, schemas.ChoiceDelta(tool_calls=[_call_start(part)])))
                case PartGrew(part, added):
                    deltas.append(_choice(choice, _delta(part, added)))
                case AnswerEnded():
                    deltas.append(
                        schemas.ChunkChoice(
                            index=choice, delta=schemas.ChoiceDelta(), finish_reason=event.finish_reason
                        )
                    )
                    if event.usage is not None:
                        self._usages[choice] = event.usage
                case _:
                    pass
        if logprobs is not None:
            first = deltas[0] if deltas and deltas[0].finish_reason is None else None
            with_logprobs = schemas.ChunkChoice(
                index=choice, delta=first.delta if first else schemas.ChoiceDelta(), logprobs=logprobs
            )
            deltas[: 1 if first else 0] = [with_logprobs]
        if deltas and choice not in self._started:
            self._started.add(choice)
            # OpenAI's first chunk has the role but no text.
            deltas.insert(0, _choice(choice, schemas.ChoiceDelta(role="assistant", content="")))
        return [self._event([one]) for one in deltas]

    def whole(self, answers: Sequence[AnswerEventReader]) -> bytes:
        """Returns the JSON body of a chat completion."""
        return self._response([_whole_choice(number, answer) for number, answer in enumerate(answers)], answers)


ENDPOINT = ApiEndpoint(
    path="/v1/chat/completions",
    summary="A chat completion",
    body=ChatRequest,
    read=read,
    response=schemas.ChatCompletion,
    event=schemas.ChatCompletionChunk,
    required=("messages",),
)


def _logprobs_of(tokens: list[wire.TokenLogprob]) -> schemas.ChoiceLogprobs | None:
    return schemas.ChoiceLogprobs(content=encode_logprobs(tokens)) if tokens else None


def _whole_choice(number: int, answer: AnswerEventReader) -> schemas.Choice:
    assert answer.end is not None, answer
    text, reasoning = (
        "".join(part.text for part in answer.parts if part.kind is kind) for kind in (PartKind.TEXT, PartKind.REASONING)
    )
    calls = [_whole_call(part) for part in answer.parts if part.kind is PartKind.TOOL_CALL]
    said = schemas.ChatCompletionMessage(
        content=text or None if calls else text,
        reasoning_content=reasoning or UNSET,
        reasoning=reasoning or UNSET,
        tool_calls=calls or UNSET,
    )
    return schemas.Choice(
        index=number, message=said, logprobs=_logprobs_of(answer.logprobs), finish_reason=answer.end.finish_reason
    )


def _choice(choice: int, delta: schemas.ChoiceDelta) -> schemas.ChunkChoice:
    return schemas.ChunkChoice(index=choice, delta=delta)


def _delta(part: AnswerPart, added: str) -> schemas.ChoiceDelta:
    if part.kind is PartKind.TEXT:
        return schemas.ChoiceDelta(content=added)
    if part.kind is PartKind.REASONING:
        return schemas.ChoiceDelta(reasoning_content=added, reasoning=added)
    more = schemas.ChatToolCall(index=part.call_index, function=schemas.Function(arguments=added))
    return schemas.ChoiceDelta(tool_calls=[more])


def _call_start(part: AnswerPart) -> schemas.ChatToolCall:
    function = schemas.Function(name=part.name, arguments="")
    return schemas.ChatToolCall(index=part.call_index, id=part.call_id, type="function", function=function)


def _whole_call(part: AnswerPart) -> schemas.ChatToolCall:
    function = schemas.Function(name=part.name, arguments=part.text)
    return schemas.ChatToolCall(id=part.call_id, type="function", function=function)
