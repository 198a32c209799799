"""Turns the events of answers into completions, streamed or whole."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from tokenbus.gateway.admission.usage import total_usage
from tokenbus.gateway.generation.answer_events import (
    AnswerEnded,
    AnswerEvent,
    AnswerEventReader,
    PartGrew,
    TokensSampled,
)
from tokenbus.gateway.generation.dialect import ResponseHead
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.gateway.openai import error_bodies, schemas
from tokenbus.gateway.openai.chat_response import DONE, KEEP_ALIVE, encode_usage
from tokenbus.protocol.wire import messages

_encoder = msgspec.json.Encoder()


class Logprobs(msgspec.Struct, frozen=True, kw_only=True):
    """The log probabilities of an answer's tokens, or of part of them: every list has one item per token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    """Characters of the answer before each token."""


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, or the next piece of one."""

    text: str
    index: int
    logprobs: Logprobs | None = None
    finish_reason: str | None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole response, or one event of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    """Unix seconds."""
    model: str
    choices: list[CompletionChoice]
    usage: schemas.CompletionUsage | UnsetType | None = UNSET
    """In a stream only if requested: null, until the numbers follow in a separate event at the end."""


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """The form in which a request wants its answers."""

    n: int
    """Answers to each prompt."""
    echoed: list[str]
    """For each prompt, the text to put before its answers."""
    include_usage: bool


class CompletionEncoder:
    """Encodes answers as server-sent events."""

    def __init__(self, head: ResponseHead, form: Form) -> None:
        self._head = head
        self._form = form
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}
        """The number of characters in each answer's tokens so far."""
        self._usages: dict[int, messages.Usage] = {}

    def __repr__(self) -> str:
        return f"<CompletionEncoder of {self._head.request_id}>"

    def encode(self, choice: int, events: Sequence[AnswerEvent]) -> list[bytes]:
        """Returns the events of one chunk of an answer."""
        text, logprobs, reason = "", None, None
        for event in events:
            match event:
                case TokensSampled():
                    offset = self._offsets.get(choice, 0)
                    logprobs = _logprobs_of(event.logprobs, offset)
                    self._offsets[choice] = offset + sum(map(len, logprobs.tokens))
                case PartGrew():
                    text += event.added
                case AnswerEnded():
                    reason = event.finish_reason
                    if event.usage is not None:
                        self._usages[choice] = event.usage
                case _:
                    pass
        if not text and logprobs is None and reason is None:
            return []
        if choice not in self._begun:
            self._begun.add(choice)
            text = self._form.echoed[choice // self._form.n] + text
        more = CompletionChoice(text=text, index=choice, logprobs=logprobs, finish_reason=reason)
        return [self._event([more])]

    def end(self) -> list[bytes]:
        """Returns the usage, if requested, and `[DONE]`."""
        usage = total_usage(self._usages, self._form.n)
        return [self._event([], encode_usage(usage)), DONE] if self._form.include_usage and usage else [DONE]

    def fail(self, error: ErrorResponse) -> list[bytes]:
        """Returns the error as an event, and `[DONE]`."""
        return [b"data: %b\n\n" % error_bodies.encode(error), DONE]

    def keep_alive(self) -> bytes:
        """Returns a comment."""
        return KEEP_ALIVE

    def _event(self, choices: list[CompletionChoice], usage: schemas.CompletionUsage | None = None) -> bytes:
        shown = usage if self._form.include_usage else UNSET
        return b"data: %b\n\n" % _encoder.encode(_completion(self._head, choices, shown))


def encode_whole(head: ResponseHead, form: Form, answers: Sequence[AnswerEventReader]) -> bytes:
    """Returns the JSON body of a whole response."""
    usages = {number: one.end.usage for number, one in enumerate(answers) if one.end is not None and one.end.usage}
    choices = [_whole_choice(number, form.echoed[number // form.n], one) for number, one in enumerate(answers)]
    return _encoder.encode(_completion(head, choices, encode_usage(total_usage(usages, form.n))))


def _completion(
    head: ResponseHead, choices: list[CompletionChoice], usage: schemas.CompletionUsage | UnsetType | None
) -> Completion:
    return Completion(
        id=f"cmpl-{head.request_id}", created=head.created, model=head.model, choices=choices, usage=usage
    )


def _whole_choice(number: int, echoed: str, answer: AnswerEventReader) -> CompletionChoice:
    assert answer.end is not None, answer
    return CompletionChoice(
        text=echoed + "".join(part.text for part in answer.parts),
        index=number,
        logprobs=_logprobs_of(answer.logprobs, 0) if answer.logprobs else None,
        finish_reason=answer.end.finish_reason,
    )


def _logprobs_of(tokens: Sequence[messages.TokenLogprob], offset: int) -> Logprobs:
    """Returns the log probabilities of tokens, the first of which begins at `offset`."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return Logprobs(
        tokens=[token.text for token in tokens],
        token_logprobs=[token.logprob for token in tokens],
        # Several tokens may have the same text, such as one byte of a character each: the likeliest comes first and
        # counts.
        top_logprobs=[{one.text: one.logprob for one in reversed(token.top)} for token in tokens],
        text_offset=offsets,
    )
