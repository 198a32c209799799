"""Turns the chunks of a stream into chat completion chunks, or into one chat completion; pure."""

from typing import NamedTuple

import msgspec
from msgspec import UNSET

from tokenbus.client.answer import Answer, ToolCall
from tokenbus.gateway.openai import error_responses, schemas
from tokenbus.protocol.wire import messages

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": still here\n\n"
"""A comment, which clients of event streams skip. It keeps proxies from closing the connection."""
_encoder = msgspec.json.Encoder()


class CompletionHeader(NamedTuple):
    """The fields that all chunks of one chat completion share."""

    id: str
    created: int
    """Unix seconds."""
    model: str


class ChunkEncoder:
    """Encodes a stream as server-sent events."""

    def __init__(self, header: CompletionHeader, *, include_usage: bool) -> None:
        self._header = header
        self._include_usage = include_usage
        self._has_started = False

    def __repr__(self) -> str:
        return f"<ChunkEncoder of {self._header.id}>"

    def encode(self, chunk: messages.Chunk) -> list[bytes]:
        """Returns the events of a chunk: none if it has no content, and all up to `[DONE]` if it is the terminal."""
        events = self._chunk_events(chunk)
        if chunk.finish_reason is None:
            return events
        response = error_responses.from_terminal(chunk)
        if response is not None:
            events.append(b"data: %b\n\n" % response.body)
        elif self._include_usage:
            events.append(_event(self._chunk([], usage=_usage(chunk))))
        return [*events, DONE]

    def _chunk_events(self, chunk: messages.Chunk) -> list[bytes]:
        reason = _finish_reason(chunk)
        if not (chunk.text or chunk.reasoning or chunk.logprobs or chunk.tool_calls or reason):
            return []
        delta = schemas.ChoiceDelta(
            content=chunk.text or UNSET,
            reasoning_content=chunk.reasoning,
            tool_calls=[_call_delta(one) for one in chunk.tool_calls or ()] or UNSET,
        )
        choice = schemas.ChunkChoice(delta=delta, logprobs=_logprobs(chunk.logprobs or []), finish_reason=reason)
        events = [_event(self._chunk([choice]))]
        # OpenAI's first chunk has only the role.
        if not self._has_started:
            self._has_started = True
            opening = schemas.ChunkChoice(delta=schemas.ChoiceDelta(role="assistant", content=""))
            events.insert(0, _event(self._chunk([opening])))
        return events

    def _chunk(
        self, choices: list[schemas.ChunkChoice], usage: schemas.CompletionUsage | None = None
    ) -> schemas.ChatCompletionChunk:
        return schemas.ChatCompletionChunk(
            **self._header._asdict(), choices=choices, usage=usage if self._include_usage else UNSET
        )


class CompletionBuilder:
    """Collects a stream into one chat completion."""

    def __init__(self, header: CompletionHeader) -> None:
        self._header = header
        self._answer = Answer()
        self._logprobs: list[messages.TokenLogprob] = []

    def __repr__(self) -> str:
        return f"<CompletionBuilder {self._header.id}>"

    def add(self, chunk: messages.Chunk) -> None:
        self._answer.add(chunk)
        self._logprobs += chunk.logprobs or []

    def build(self, terminal: messages.Chunk) -> bytes:
        """Returns the JSON body, once all chunks were added; `terminal` must not be an error."""
        answer = self._answer
        said = schemas.ChatCompletionMessage(
            content=answer.text or None if answer.tool_calls else answer.text,
            reasoning_content=answer.reasoning or UNSET,
            tool_calls=[_call(one) for one in answer.tool_calls] or UNSET,
        )
        reason = _finish_reason(terminal)
        assert reason is not None, terminal
        choice = schemas.Choice(message=said, logprobs=_logprobs(self._logprobs), finish_reason=reason)
        return _encoder.encode(
            schemas.ChatCompletion(**self._header._asdict(), choices=[choice], usage=_usage(terminal))
        )


def _event(piece: schemas.ChatCompletionChunk) -> bytes:
    return b"data: %b\n\n" % _encoder.encode(piece)


def _finish_reason(chunk: messages.Chunk) -> str | None:
    """Returns the finish reason of a successful terminal. The wire has OpenAI's names."""
    return None if chunk.finish_reason is None or error_responses.from_terminal(chunk) else str(chunk.finish_reason)


def _usage(terminal: messages.Chunk) -> schemas.CompletionUsage | None:
    if not terminal.usage:
        return None
    usage = terminal.usage
    return schemas.CompletionUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=schemas.PromptTokensDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=UNSET
        if usage.reasoning_tokens is UNSET
        else schemas.CompletionTokensDetails(reasoning_tokens=usage.reasoning_tokens),
    )


def _call_delta(delta: messages.ToolCallDelta) -> schemas.ToolCall:
    function = schemas.Function(name=delta.function.name or None, arguments=delta.function.arguments)
    return schemas.ToolCall(index=delta.index, id=delta.id, type=delta.type, function=function)


def _call(call: ToolCall) -> schemas.ToolCall:
    return schemas.ToolCall(
        id=call.id, type="function", function=schemas.Function(name=call.name, arguments=call.arguments)
    )


def _logprobs(tokens: list[messages.TokenLogprob]) -> schemas.ChoiceLogprobs | None:
    return schemas.ChoiceLogprobs(content=[_logprob(token) for token in tokens]) if tokens else None


def _logprob(token: messages.TokenLogprob) -> schemas.ChatCompletionTokenLogprob:
    top = [schemas.TopLogprob(token=one.text, logprob=one.logprob, bytes=one.bytes) for one in token.top]
    return schemas.ChatCompletionTokenLogprob(
        token=token.text, logprob=token.logprob, bytes=token.bytes, top_logprobs=top
    )
