"""Turns the events of an answer into Anthropic's events, or a whole answer into one message."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from tokenbus.gateway.anthropic import error_bodies, schemas
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.gateway.serving.answer_events import (
    AnswerEnded,
    AnswerEvent,
    AnswerEventReader,
    AnswerPart,
    PartEnded,
    PartGrew,
    PartKind,
    PartStarted,
    PromptComputed,
)
from tokenbus.gateway.serving.dialect import ResponseHead, loading_comment
from tokenbus.protocol.wire import messages

SIGNATURE = "dG9rZW5idXM="
"""The signature of all reasoning. Clients send it back with the reasoning, and it is ignored."""
_STOP_REASONS = {
    messages.FinishReason.STOP: "end_turn",
    messages.FinishReason.LENGTH: "max_tokens",
    messages.FinishReason.TOOL_CALLS: "tool_use",
}
_encoder = msgspec.json.Encoder()


class MessageEncoder:
    """Encodes an answer as server-sent events, or as one body."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._prompt = PromptComputed(0, 0, 0)
        self._has_started = False

    def encode(self, choice: int, events: Sequence[AnswerEvent]) -> list[bytes]:
        """Returns the events of one chunk of the answer; none while only the prompt is known."""
        encoded: list[schemas.StreamEvent] = []
        for event in events:
            match event:
                case PromptComputed():
                    self._prompt = event
                case PartStarted(part):
                    encoded.append(schemas.ContentBlockStart(index=part.index, content_block=_empty_block(part)))
                case PartGrew(part, added):
                    encoded.append(schemas.ContentBlockDelta(index=part.index, delta=_delta(part, added)))
                case PartEnded(part):
                    encoded += _end_block(part)
                case AnswerEnded():
                    encoded.append(schemas.MessageDelta(delta=_stop(event), usage=encode_usage(event.usage)))
                case _:
                    pass
        return [*(self._start() if encoded else ()), *map(_event, encoded)]

    def end(self) -> list[bytes]:
        """Returns the last event."""
        return [_event(schemas.MessageStop())]

    def fail(self, error: ErrorResponse) -> list[bytes]:
        """Returns the error as an event."""
        return [_event(error_bodies.to_body(error))]

    def keep_alive(self, load_progress: float | None) -> bytes:
        """Returns a ping; the message begins before the first one, as clients expect."""
        return b"".join([loading_comment(load_progress), *self._start(), _event(schemas.Ping())])

    def whole(self, answers: Sequence[AnswerEventReader]) -> bytes:
        """Returns the JSON body of a message. A tool call whose input was cut off is left out."""
        (answer,) = answers
        assert answer.end is not None, answer
        content = [block for part in answer.parts if (block := _whole_block(part)) is not None]
        return _encoder.encode(_message(self._head, content, _stop(answer.end), encode_usage(answer.end.usage)))

    def _start(self) -> list[bytes]:
        if self._has_started:
            return []
        self._has_started = True
        cached = self._prompt.cached_tokens
        usage = schemas.AnthropicUsage(
            input_tokens=self._prompt.prompt_tokens - cached, cache_read_input_tokens=cached, output_tokens=0
        )
        return [_event(schemas.MessageStart(message=_message(self._head, [], None, usage)))]


def encode_usage(usage: messages.Usage | None) -> schemas.AnthropicUsage:
    """Returns token counts in Anthropic's form, in which input tokens exclude cached ones."""
    if usage is None:
        return schemas.AnthropicUsage(input_tokens=0, cache_read_input_tokens=0, output_tokens=0)
    thought = usage.reasoning_tokens
    return schemas.AnthropicUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        output_tokens_details=UNSET
        if thought is UNSET
        else schemas.AnthropicOutputTokensDetails(thinking_tokens=thought),
    )


def _message(
    head: ResponseHead,
    content: list[schemas.ContentBlock],
    stop: schemas.StopDelta | None,
    usage: schemas.AnthropicUsage,
) -> schemas.AnthropicMessage:
    return schemas.AnthropicMessage(
        id=f"msg_{head.request_id}",
        model=head.model,
        content=content,
        stop_reason=stop.stop_reason if stop else None,
        stop_sequence=stop.stop_sequence if stop else None,
        usage=usage,
    )


def _stop(end: AnswerEnded) -> schemas.StopDelta:
    if isinstance(end.stop_match, str):
        return schemas.StopDelta(stop_reason="stop_sequence", stop_sequence=end.stop_match)
    return schemas.StopDelta(stop_reason=_STOP_REASONS[end.finish_reason], stop_sequence=None)


def _empty_block(part: AnswerPart) -> schemas.ContentBlock:
    match part.kind:
        case PartKind.TEXT:
            return schemas.TextBlock(text="")
        case PartKind.REASONING:
            return schemas.ThinkingBlock(thinking="", signature="")
        case PartKind.TOOL_CALL:
            return schemas.ToolUseBlock(id=part.call_id, name=part.name, input={})


def _delta(part: AnswerPart, added: str) -> schemas.BlockDelta:
    match part.kind:
        case PartKind.TEXT:
            return schemas.TextDelta(text=added)
        case PartKind.REASONING:
            return schemas.ThinkingDelta(thinking=added)
        case PartKind.TOOL_CALL:
            return schemas.InputJsonDelta(partial_json=added)


def _end_block(part: AnswerPart) -> list[schemas.StreamEvent]:
    stop = schemas.ContentBlockStop(index=part.index)
    if part.kind is not PartKind.REASONING:
        return [stop]
    return [schemas.ContentBlockDelta(index=part.index, delta=schemas.SignatureDelta(signature=SIGNATURE)), stop]


def _whole_block(part: AnswerPart) -> schemas.ContentBlock | None:
    match part.kind:
        case PartKind.TEXT:
            return schemas.TextBlock(text=part.text)
        case PartKind.REASONING:
            return schemas.ThinkingBlock(thinking=part.text, signature=SIGNATURE)
        case PartKind.TOOL_CALL:
            given = _input(part.text)
            return None if given is None else schemas.ToolUseBlock(id=part.call_id, name=part.name, input=given)


def _input(arguments: str) -> dict[str, Any] | None:
    """Returns the input of a tool call, or None if its text is incomplete or nested too deep."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None


def _event(event: schemas.StreamEvent) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(event.__struct_config__.tag).encode(), _encoder.encode(event))
