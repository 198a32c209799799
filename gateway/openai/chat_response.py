"""Turns the events of answers into chat completion chunks, or whole answers into one chat completion."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from tokenbus.gateway.admission.usage import usage_of
from tokenbus.gateway.generation.answer_events import (
    AnswerEnded,
    AnswerEvent,
    AnswerEventReader,
    AnswerPart,
    PartGrew,
    PartKind,
    PartStarted,
    TokensSampled,
)
from tokenbus.gateway.generation.dialect import ResponseHead
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.gateway.openai import error_bodies, schemas
from tokenbus.protocol.wire import messages

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": still here\n\n"
"""A comment, which event stream clients skip."""
_encoder = msgspec.json.Encoder()


class ChunkEncoder:
    """Encodes answers as server-sent events."""

    def __init__(self, head: ResponseHead, *, include_usage: bool) -> None:
        self._head = head
        self._include_usage = include_usage
        self._started: set[int] = set()
        self._usages: list[messages.Usage] = []

    def __repr__(self) -> str:
        return f"<ChunkEncoder of {self._head.request_id}>"

    def encode(self, choice: int, events: Sequence[AnswerEvent]) -> list[bytes]:
        """Returns the events of one chunk of an answer."""
        deltas: list[schemas.ChunkChoice] = []
        logprobs: schemas.ChoiceLogprobs | None = None
        for event in events:
            match event:
                case TokensSampled():
                    logprobs = logprobs_of(event.logprobs)
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
                    self._usages += [event.usage] if event.usage else []
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

    def end(self) -> list[bytes]:
        """Returns the usage, if requested, and `[DONE]`."""
        usage = usage_of(self._usages)
        return [self._event([], encode_usage(usage)), DONE] if self._include_usage and usage else [DONE]

    def fail(self, error: ErrorResponse) -> list[bytes]:
        """Returns the error as an event, and `[DONE]`."""
        return [b"data: %b\n\n" % error_bodies.encode(error), DONE]

    def keep_alive(self) -> bytes:
        """Returns a comment."""
        return KEEP_ALIVE

    def _event(self, choices: list[schemas.ChunkChoice], usage: schemas.CompletionUsage | None = None) -> bytes:
        head = self._head
        chunk = schemas.ChatCompletionChunk(
            id=f"chatcmpl-{head.request_id}",
            created=head.created,
            model=head.model,
            choices=choices,
            usage=usage if self._include_usage else UNSET,
        )
        return b"data: %b\n\n" % _encoder.encode(chunk)


def encode_whole(head: ResponseHead, answers: Sequence[AnswerEventReader]) -> bytes:
    """Returns the JSON body of a chat completion."""
    ends = [answer.end for answer in answers if answer.end is not None]
    completion = schemas.ChatCompletion(
        id=f"chatcmpl-{head.request_id}",
        created=head.created,
        model=head.model,
        choices=[_whole_choice(number, answer) for number, answer in enumerate(answers)],
        usage=encode_usage(usage_of([end.usage for end in ends if end.usage])),
    )
    return _encoder.encode(completion)


def encode_usage(usage: messages.Usage | None) -> schemas.CompletionUsage | None:
    """Returns token counts in OpenAI's form, with zeros rather than gaps."""
    if usage is None:
        return None
    return schemas.CompletionUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=schemas.PromptTokensDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=schemas.CompletionTokensDetails(reasoning_tokens=usage.reasoning_tokens or 0),
    )


def logprobs_of(tokens: list[messages.TokenLogprob]) -> schemas.ChoiceLogprobs | None:
    """Returns the log probabilities of tokens, or None if there are none."""
    return schemas.ChoiceLogprobs(content=[_logprob(token) for token in tokens]) if tokens else None


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
        index=number, message=said, logprobs=logprobs_of(answer.logprobs), finish_reason=answer.end.finish_reason
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


def _logprob(token: messages.TokenLogprob) -> schemas.ChatCompletionTokenLogprob:
    top = [schemas.TopLogprob(token=one.text, logprob=one.logprob, bytes=one.bytes) for one in token.top]
    return schemas.ChatCompletionTokenLogprob(
        token=token.text, logprob=token.logprob, bytes=token.bytes, top_logprobs=top
    )
