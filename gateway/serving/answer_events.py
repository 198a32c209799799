"""Reads the chunks of a stream as typed events: parts of the answer that begin, grow and end.

An answer is a list of parts, each of them reasoning, text or one tool call. A part ends when the next one begins, or
with the answer. All dialects are produced from these events."""

import enum
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from tokenbus.protocol.wire import messages


class PartKind(enum.Enum):
    """The kinds of parts in an answer."""

    REASONING = "reasoning"
    TEXT = "text"
    TOOL_CALL = "tool_call"


class AnswerPart(msgspec.Struct, kw_only=True, eq=False):
    """A part of an answer, as received so far."""

    kind: PartKind
    index: int
    """Its index among the answer's parts, from 0."""
    pieces: list[str] = []
    call_index: int = 0
    """A tool call's index among the answer's calls, from 0."""
    call_id: str = ""
    name: str = ""
    """The called function's name."""
    logprobs: list[messages.TokenLogprob] = []
    """The log probabilities of its tokens, and of preceding ones without text of their own, if requested."""

    @property
    def text(self) -> str:
        """The text, or a tool call's arguments: the text of a JSON object, if the call is complete."""
        return "".join(self.pieces)


class PromptComputed(NamedTuple):
    """The worker has computed the prompt, or a part of it. Only if the request asked for its progress."""

    prompt_tokens: int
    cached_tokens: int
    processed_tokens: int
    """Tokens done so far, cached ones included."""


class SamplingChosen(NamedTuple):
    """The worker has filled in what the request left open about sampling. Only if the request asked for this."""

    sampling: messages.SamplingReport


class TokensCounted(NamedTuple):
    """The number of sampled tokens so far. Only if the reader counts them."""

    completion_tokens: int


class TokensSampled(NamedTuple):
    """The log probabilities of new tokens, or their ids, if requested."""

    logprobs: list[messages.TokenLogprob]
    token_ids: list[int]


class PromptScored(NamedTuple):
    """The log probabilities of the prompt's next tokens, if requested."""

    logprobs: list[messages.PromptLogprob]


class PartStarted(NamedTuple):
    part: AnswerPart


class PartGrew(NamedTuple):
    part: AnswerPart
    added: str


class PartEnded(NamedTuple):
    part: AnswerPart


class AnswerEnded(NamedTuple):
    """The end of a successful answer."""

    finish_reason: messages.FinishReason
    usage: messages.Usage | None
    stop_match: str | int | None
    """The stop string or token id that ended it."""
    timings: messages.Timings | None = None
    """Where the worker's time went."""


AnswerEvent = (
    PromptComputed
    | SamplingChosen
    | PromptScored
    | TokensCounted
    | TokensSampled
    | PartStarted
    | PartGrew
    | PartEnded
    | AnswerEnded
)


class AnswerEventReader:
    """Turns the chunks of one stream into events, and collects the parts."""

    def __init__(self, *, keeps_logprobs: bool = True, counts_tokens: bool = False) -> None:
        """Log probabilities and ids are kept only on request: a token's may take 10 KB, a thousand times its text."""
        self._keeps_logprobs = keeps_logprobs
        self._counts_tokens = counts_tokens
        self.parts: list[AnswerPart] = []
        self.logprobs: list[messages.TokenLogprob] = []
        self.token_ids: list[int] = []
        """The ids of all tokens, if requested."""
        self.prompt_logprobs: list[messages.PromptLogprob] = []
        self.sampling: messages.SamplingReport | None = None
        """The parameters of sampling, if requested."""
        self.end: AnswerEnded | None = None
        """None until the answer has ended successfully."""
        self._open: AnswerPart | None = None
        self._unplaced: list[messages.TokenLogprob] = []
        """Those of tokens that do not belong to a part yet."""

    def __repr__(self) -> str:
        return f"<AnswerEventReader, {len(self.parts)} parts{', ended' if self.end else ''}>"

    def read(self, chunk: messages.Chunk) -> list[AnswerEvent]:
        """Returns the events of the next chunk, as the client's `Stream` yields them: each once and in order."""
        events: list[AnswerEvent] = []
        if chunk.sampling:
            self.sampling = chunk.sampling
            events.append(SamplingChosen(chunk.sampling))
        if chunk.progress:
            done = chunk.progress
            events.append(PromptComputed(done.prompt_tokens, done.cached_tokens, done.processed_tokens))
        if self._counts_tokens and chunk.tokens:
            events.append(TokensCounted(chunk.offset + chunk.tokens))
        if chunk.prompt_logprobs:
            if self._keeps_logprobs:
                self.prompt_logprobs += chunk.prompt_logprobs
            events.append(PromptScored(chunk.prompt_logprobs))
        if chunk.logprobs or chunk.token_ids:
            logprobs, token_ids = chunk.logprobs or [], chunk.token_ids or []
            if self._keeps_logprobs:
                self.logprobs += logprobs
                self._unplaced += logprobs
                self.token_ids += token_ids
            events.append(TokensSampled(logprobs, token_ids))
        if chunk.reasoning:
            self._grow(events, PartKind.REASONING, chunk.reasoning)
        if chunk.text:
            self._grow(events, PartKind.TEXT, chunk.text)
        for delta in chunk.tool_calls or ():
            self._add_to_call(events, delta)
        if self._unplaced and events and isinstance(events[-1], PartGrew):
            events[-1].part.logprobs += self._unplaced
            self._unplaced = []
        if chunk.finish_reason is not None:
            self._end_part(events)
            if chunk.finish_reason not in (messages.FinishReason.ERROR, messages.FinishReason.CANCELLED):
                match = chunk.stop_match if isinstance(chunk.stop_match, str | int) else None
                self.end = AnswerEnded(chunk.finish_reason, chunk.usage or None, match, chunk.timings or None)
                events.append(self.end)
        return events

    def _grow(self, events: list[AnswerEvent], kind: PartKind, added: str) -> None:
        part = self._open
        if part is None or part.kind is not kind:
            part = self._start(events, AnswerPart(kind=kind, index=len(self.parts)))
        part.pieces.append(added)
        events.append(PartGrew(part, added))

    def _add_to_call(self, events: list[AnswerEvent], delta: messages.ToolCallDelta) -> None:
        part = self._open
        if part is None or part.kind is not PartKind.TOOL_CALL or part.call_index != delta.index:
            call = AnswerPart(
                kind=PartKind.TOOL_CALL,
                index=len(self.parts),
                call_index=delta.index,
                call_id=delta.id or "",
                name=delta.function.name or "",
            )
            part = self._start(events, call)
        if delta.function.arguments:
            part.pieces.append(delta.function.arguments)
            events.append(PartGrew(part, delta.function.arguments))

    def _start(self, events: list[AnswerEvent], part: AnswerPart) -> AnswerPart:
        self._end_part(events)
        self.parts.append(part)
        self._open = part
        events.append(PartStarted(part))
        return part

    def _end_part(self, events: list[AnswerEvent]) -> None:
        if self._open is not None:
            events.append(PartEnded(self._open))
            self._open = None


def total_usage(by_choice: Mapping[int, messages.Usage]) -> messages.Usage | None:
    """Returns the usage of all answers, which is also what is counted. Of the answers to one prompt that a worker has
    given only one says that the prompt has tokens."""
    if not by_choice:
        return None
    usages = [by_choice[choice] for choice in sorted(by_choice)]
    reasoned = [one.reasoning_tokens for one in usages if one.reasoning_tokens is not UNSET]
    return messages.Usage(
        prompt_tokens=sum(one.prompt_tokens for one in usages),
        completion_tokens=sum(one.completion_tokens for one in usages),
        total_tokens=sum(one.total_tokens for one in usages),
        cached_tokens=sum(one.cached_tokens for one in usages),
        reasoning_tokens=sum(reasoned) if reasoned else UNSET,
    )
