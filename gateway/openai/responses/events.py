"""Turns the events of an answer into those of a streamed response.

Each item is added, grows and is done. A call that is cut off is never done, since agents execute a call when it is."""

from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from tokenbus.gateway.http import http_errors
from tokenbus.gateway.http.http_errors import ErrorResponse, NameOf
from tokenbus.gateway.openai import schemas
from tokenbus.gateway.openai.choices import encode_logprobs
from tokenbus.gateway.openai.responses import output, stored
from tokenbus.gateway.openai.responses.output import (
    FunctionCallItem,
    OutputItem,
    OutputItems,
    OutputText,
    ReasoningText,
    Response,
    SummaryText,
    output_text,
)
from tokenbus.gateway.openai.responses.tools import CustomInput
from tokenbus.gateway.serving.answer_events import (
    AnswerEnded,
    AnswerEvent,
    AnswerEventReader,
    AnswerPart,
    PartGrew,
    PartKind,
    PartStarted,
    SamplingChosen,
)
from tokenbus.gateway.serving.dialect import loading_comment
from tokenbus.protocol.wire import messages

_encoder = msgspec.json.Encoder()


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event; its fields depend on its type."""

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | ReasoningText | SummaryText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[schemas.ChatCompletionTokenLogprob] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET


class _OpenItem:
    """The growing item."""

    def __init__(self, part: AnswerPart, *, is_custom: bool) -> None:
        self.part = part
        self.custom = CustomInput() if is_custom else None
        self.num_logprobs = 0
        """The number of log probabilities sent."""


class ResponseEncoder:
    """Encodes an answer as server-sent events, or as one body."""

    def __init__(
        self,
        begun: Response,
        items: OutputItems,
        name_of: NameOf,
        age_s: Callable[[], float] = float,
        given: bytes | None = None,
    ) -> None:
        """`given` is the record of the response's input, if it is to be stored."""
        self._response = begun
        self._items = items
        self._name_of = name_of
        self._age_s = age_s
        self._given = given
        self._end: AnswerEnded | None = None
        self._sequence_number = 0
        self._output: list[OutputItem] = []
        self._open: _OpenItem | None = None
        self._events: list[bytes] = []

    def encode(self, choice: int, events: Sequence[AnswerEvent]) -> list[bytes]:
        """Returns the events of one chunk of the answer."""
        for event in events:
            match event:
                case SamplingChosen(sampling):
                    self._response = output.sampled(self._response, sampling)
                case PartStarted(part):
                    self._begin()
                    self._end_item(is_cut=False)
                    self._start_item(part)
                case PartGrew(part, added):
                    self._grow(added)
                case AnswerEnded():
                    self._begin()
                    self._end_item(is_cut=event.finish_reason is messages.FinishReason.LENGTH)
                    self._end = event
                case _:
                    pass  # whether a part has ended well is known only from what follows
        return self._taken()

    def end(self) -> list[bytes]:
        """Returns the last event, with the whole response."""
        assert self._end is not None, self
        ended = output.ended(self._response, self._output, self._end, self._age_s())
        self._add(f"response.{ended.status}", response=ended)
        return self._taken()

    def fail(self, error: ErrorResponse) -> list[bytes]:
        """Returns the failed response, which is not stored."""
        self._begin()
        self.stored(False)
        cut = [] if self._open is None else [self._items.whole(self._open.part, is_cut=True)]
        failed = output.failed(self._response, self._output + cut, http_errors.renamed(error, self._name_of))
        self._add("response.failed", response=failed)
        return self._taken()

    def keep_alive(self, load_progress: float | None) -> bytes:
        """Returns an event saying that the response is in progress. Clients waiting for events ignore comments."""
        if not self._begin():
            self._add("response.in_progress", response=self._response)
        return b"".join([loading_comment(load_progress), *self._taken()])

    def whole(self, answers: Sequence[AnswerEventReader]) -> bytes:
        """Returns the body of an unstreamed response."""
        return _encoder.encode(self._whole(answers))

    def records(self, answers: Sequence[AnswerEventReader]) -> Mapping[str, bytes]:
        """Returns the records of the response and its input."""
        assert self._given is not None, self
        return stored.records_of(self._response.id, _encoder.encode(self._whole(answers)), self._given)

    def stored(self, is_stored: bool) -> None:
        """Says in the end whether the response is stored."""
        self._response = msgspec.structs.replace(self._response, store=is_stored)

    def _whole(self, answers: Sequence[AnswerEventReader]) -> Response:
        (answer,) = answers
        assert answer.end is not None, answer
        is_cut = answer.end.finish_reason is messages.FinishReason.LENGTH
        items = [self._items.whole(part, is_cut=is_cut and part is answer.parts[-1]) for part in answer.parts]
        response = self._response if answer.sampling is None else output.sampled(self._response, answer.sampling)
        return output.ended(response, items, answer.end, self._age_s())

    def _begin(self) -> bool:
        """Adds the first events, unless already sent."""
        if self._sequence_number:
            return False
        self._add("response.created", response=self._response)
        self._add("response.in_progress", response=self._response)
        return True

    def _start_item(self, part: AnswerPart) -> None:
        self._open = _OpenItem(part, is_custom=self._items.is_custom(part))
        self._add("response.output_item.added", output_index=len(self._output), item=self._items.begun(part))
        if part.kind is PartKind.TEXT:
            self._add_inside("response.content_part.added", content_index=0, part=OutputText(text=""))
        elif part.kind is PartKind.REASONING:
            self._add_inside("response.content_part.added", content_index=0, part=ReasoningText(text=""))
            self._add_summary("response.reasoning_summary_part.added", part=SummaryText(text=""))

    def _grow(self, added: str) -> None:
        assert self._open is not None, self
        part = self._open.part
        if part.kind is PartKind.TEXT:
            new = encode_logprobs(part.logprobs[self._open.num_logprobs :])
            self._open.num_logprobs += len(new)
            self._add_inside("response.output_text.delta", content_index=0, delta=added, logprobs=new)
        elif part.kind is PartKind.REASONING:
            self._add_inside("response.reasoning_text.delta", content_index=0, delta=added)
            self._add_summary("response.reasoning_summary_text.delta", delta=added)
        elif self._open.custom is None:
            self._add_inside("response.function_call_arguments.delta", delta=added)
        else:
            self._grow_input(self._open.custom.feed(added))

    def _grow_input(self, added: str) -> None:
        if added:
            self._add_inside("response.custom_tool_call_input.delta", delta=added)

    def _end_item(self, *, is_cut: bool) -> None:
        if self._open is None:
            return
        part = self._open.part
        item = self._items.whole(part, is_cut=is_cut)
        if part.kind is PartKind.TEXT:
            text = output_text(part)
            self._add_inside("response.output_text.done", content_index=0, text=part.text, logprobs=text.logprobs)
            self._add_inside("response.content_part.done", content_index=0, part=text)
        elif part.kind is PartKind.REASONING:
            self._add_inside("response.reasoning_text.done", content_index=0, text=part.text)
            self._add_inside("response.content_part.done", content_index=0, part=ReasoningText(text=part.text))
            self._add_summary("response.reasoning_summary_text.done", text=part.text)
            self._add_summary("response.reasoning_summary_part.done", part=SummaryText(text=part.text))
        elif not is_cut:
            self._end_call(item, self._open.custom)
        if not is_cut or part.kind is not PartKind.TOOL_CALL:
            self._add("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = None

    def _end_call(self, item: OutputItem, custom: CustomInput | None) -> None:
        if isinstance(item, FunctionCallItem):
            self._add_inside("response.function_call_arguments.done", name=item.name, arguments=item.arguments)
        elif custom is not None:
            self._grow_input(custom.end())
            self._add_inside("response.custom_tool_call_input.done", input=custom.text)

    def _add_summary(self, type: str, **fields: object) -> None:
        """Adds an event about the summary of the open item, if one was asked for."""
        if self._items.with_summary:
            self._add_inside(type, summary_index=0, **fields)

    def _add_inside(self, type: str, **fields: object) -> None:
        """Adds an event about the open item."""
        assert self._open is not None, self
        self._add(type, output_index=len(self._output), item_id=self._items.id(self._open.part), **fields)

    def _add(self, type: str, **fields: object) -> None:
        event = msgspec.structs.replace(Event(type=type, sequence_number=self._sequence_number), **fields)
        self._sequence_number += 1
        self._events.append(b"event: %b\ndata: %b\n\n" % (type.encode(), _encoder.encode(event)))

    def _taken(self) -> list[bytes]:
        taken, self._events = self._events, []
        return taken
