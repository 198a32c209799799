"""Ollama's chat and completions: the fields of a request, its wire request, and its answer as lines of JSON."""

import datetime
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from tokenbus.gateway.http import http_errors
from tokenbus.gateway.http.http_errors import ErrorResponse, NameOf
from tokenbus.gateway.ollama import options
from tokenbus.gateway.ollama.models import encode_error
from tokenbus.gateway.ollama.options import OllamaRequest
from tokenbus.gateway.serving import conversation
from tokenbus.gateway.serving.answer_events import (
    AnswerEnded,
    AnswerEvent,
    AnswerEventReader,
    AnswerPart,
    PartEnded,
    PartGrew,
    PartKind,
    TokensSampled,
)
from tokenbus.gateway.serving.dialect import (
    ApiEndpoint,
    ParsedGeneration,
    RequestHead,
    ResponseHead,
    UnservedField,
)
from tokenbus.protocol.wire import errors
from tokenbus.protocol.wire import messages as wire
from tokenbus.protocol.wire.checks import validation

NDJSON = "application/x-ndjson"
_NS_PER_MS = 1e6
_encoder = msgspec.json.Encoder()


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a conversation."""

    role: str
    content: str | None = None
    thinking: str | None = None
    """The reasoning before an answer."""
    images: list[str] | None = None
    """Refused unless empty."""
    tool_calls: list[dict[str, Any]] | None = None
    """`{function: {name, arguments}}`, with the arguments as an object."""
    tool_name: str | None = None
    """In a result, the called function's name."""
    tool_call_id: str | None = None

    def to_wire(self) -> wire.ChatMessage:
        return wire.ChatMessage(
            role=self.role,
            content=self.content,
            reasoning_content=self.thinking or None,
            name=self.tool_name,
            tool_calls=[{"type": "function"} | one for one in self.tool_calls] if self.tool_calls else None,
            tool_call_id=self.tool_call_id,
        )


class OllamaChatRequest(OllamaRequest, frozen=True, kw_only=True):
    """The body of `/api/chat`. Unknown fields are ignored."""

    messages: list[OllamaMessage] | None = None
    """If there are none, the model is loaded."""
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaRequest, frozen=True, kw_only=True):
    """The body of `/api/generate`. Unknown fields are ignored."""

    prompt: str | None = None
    """The user's message, or with `raw` or a `suffix` a plain prompt. If it is empty, the model is loaded."""
    suffix: str | None = None
    """The text after the gap to fill."""
    system: str | None = None
    raw: bool | None = None
    """Whether the prompt is plain text, without the model's chat template."""
    images: list[str] | None = None
    """This field and those below are refused if they ask for anything."""
    template: str | None = None
    context: list[int] | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    function: CalledFunction


class OllamaAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The assistant's message, or more of it."""

    role: str
    content: str
    thinking: str = ""
    tool_calls: list[OllamaToolCall] = []


class OllamaTopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None = None


class OllamaTokenLogprob(OllamaTopLogprob, frozen=True, kw_only=True):
    """A token of the answer, with the likeliest ones in its place."""

    top_logprobs: list[OllamaTopLogprob]


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    model: str
    created_at: str
    done: bool
    done_reason: str | UnsetType = UNSET
    """`stop`, `length` or `load`, in the last line, which also has the fields below."""
    logprobs: list[OllamaTokenLogprob] | UnsetType = UNSET
    """Those of the tokens since the last line, or of a whole answer, if asked for."""
    total_duration: int | UnsetType = UNSET
    """Nanoseconds since the request was received, like all durations."""
    load_duration: int | UnsetType = UNSET
    """Until a worker accepted the request: the time for which it waited, or its model was being loaded."""
    prompt_eval_count: int | UnsetType = UNSET
    """Tokens of the prompt, cached ones included."""
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    """Tokens of the answer."""
    eval_duration: int | UnsetType = UNSET


class OllamaChatResponse(_Line, frozen=True, kw_only=True, omit_defaults=True):
    """A whole answer, or one line of a stream."""

    message: OllamaAnswer


class OllamaGenerateResponse(_Line, frozen=True, kw_only=True, omit_defaults=True):
    """A whole answer, or one line of a stream."""

    response: str
    thinking: str = ""


def read_chat(asked: OllamaChatRequest, head: RequestHead) -> ParsedGeneration:
    """Validates a body as a router would. Raises RequestError with Ollama's name for the field at fault."""
    if not asked.messages:
        return _loading(asked, head, OllamaChatEncoder)
    for number, message in enumerate(asked.messages):
        if message.images:
            raise errors.unsupported_field(f"messages[{number}].images", "only text is served")
    said = conversation.normalized([one.to_wire() for one in asked.messages])
    request = wire.GenerateRequest(
        id=head.id,
        messages=said,
        continue_final_message=_continues(said[-1]) or None,
        tools=asked.tools or None,
        **asked.common_fields(head.session),
        **asked.thinking_fields(),
    )
    joined = len(asked.messages) - len(said)
    return _parsed(asked, head, OllamaChatEncoder, request, lambda param: _NAME_OF(_in_conversation(param, joined)))


def read_generate(asked: OllamaGenerateRequest, head: RequestHead) -> ParsedGeneration:
    """Validates a body as a router would. Raises RequestError with Ollama's name for the field at fault."""
    if not asked.prompt and not asked.suffix:
        return _loading(asked, head, OllamaCompletionEncoder)
    common = asked.common_fields(head.session)
    if asked.raw or asked.suffix:
        if asked.system:
            problem = "can't be combined with a plain prompt, which raw and suffix ask for: write it into the prompt"
            raise errors.invalid_field("system", problem)
        request = wire.GenerateRequest(id=head.id, prompt=asked.prompt, suffix=asked.suffix or None, **common)
        return _parsed(asked, head, OllamaCompletionEncoder, request, _NAME_OF)
    said = [wire.ChatMessage(role="user", content=asked.prompt)]
    if asked.system:
        said.insert(0, wire.ChatMessage(role="system", content=asked.system))
    request = wire.GenerateRequest(id=head.id, messages=said, **common, **asked.thinking_fields())
    return _parsed(asked, head, OllamaCompletionEncoder, request, _NAME_OF)


def _continues(last: wire.ChatMessage) -> bool:
    """Returns whether the answer continues the last message, as Ollama does with an assistant's text."""
    return last.role == "assistant" and bool(last.content) and not last.tool_calls


_NAME_OF = http_errors.by_field(options.NAMES)
_FIELDS = {"reasoning.effort": "think", "continue_final_message": "messages"}


def _in_conversation(param: str, num_joined: int) -> str:
    return conversation.given_names(_FIELDS, num_joined)(param)


def _parsed(
    asked: OllamaRequest,
    head: RequestHead,
    encoder: type["LinesEncoder"],
    request: wire.GenerateRequest,
    name_of: NameOf,
) -> ParsedGeneration:
    with http_errors.renaming(name_of):
        validation.check_request(request)
    return ParsedGeneration(
        model=options.untagged(head.model),
        requests=(request,),
        encoder=functools.partial(encoder, model=head.model),
        stream=asked.is_streamed,
        name_of=name_of,
    )


def _loading(asked: OllamaRequest, head: RequestHead, encoder: type["LinesEncoder"]) -> ParsedGeneration:
    """Returns the request that makes a worker load the model, if none has: a token that the client doesn't see."""
    asked.common_fields(head.session)
    if options.asks_to_unload(asked.keep_alive):
        raise errors.unsupported_field("keep_alive", "a model is unloaded by its operator, or to make room for others")
    request = wire.GenerateRequest(
        id=head.id, prompt=" ", max_tokens=1, cache_prompt=False, timeout_ms=asked.timeout_ms
    )
    validation.check_request(request)
    return ParsedGeneration(
        model=options.untagged(head.model),
        requests=(request,),
        encoder=functools.partial(encoder, model=head.model, only_loads=True),
        stream=asked.is_streamed,
    )


class LinesEncoder:
    """Encodes an answer as lines of JSON, or as one object; a subclass gives them their form."""

    line: ClassVar[Callable[..., _Line]]

    def __init__(self, head: ResponseHead, *, model: str, only_loads: bool = False) -> None:
        """`only_loads`: the answer is not shown, since only the model was to be loaded."""
        self._model = model
        self._only_loads = only_loads
        self._head = head
        self._unshown: list[OllamaTokenLogprob] = []
        """The log probabilities of tokens since the last line."""

    def content(self, text: str = "", thinking: str = "", calls: Sequence[OllamaToolCall] = ()) -> dict[str, Any]:
        """Returns the fields of a line that hold more of the answer."""
        raise NotImplementedError

    def encode(self, choice: int, events: Sequence[AnswerEvent]) -> list[bytes]:
        """Returns a line for each piece of the answer in one chunk. Calls are sent when they are complete."""
        if self._only_loads:
            return [self._last(event, self.content()) for event in events if isinstance(event, AnswerEnded)]
        return list(self._lines(events))

    def _lines(self, events: Sequence[AnswerEvent]) -> Iterator[bytes]:
        for event in events:
            match event:
                case TokensSampled():
                    self._unshown += _logprobs(event.logprobs)
                case PartGrew(part, added) if part.kind is not PartKind.TOOL_CALL:
                    is_text = part.kind is PartKind.TEXT
                    yield self._line(self.content(added) if is_text else self.content(thinking=added), self._taken())
                case PartEnded(part) if part.kind is PartKind.TOOL_CALL and (call := _call(part)) is not None:
                    yield self._line(self.content(calls=[call]), self._taken())
                case AnswerEnded():
                    yield self._last(event, self.content(), self._taken())
                case _:
                    pass

    def _taken(self) -> list[OllamaTokenLogprob]:
        taken, self._unshown = self._unshown, []
        return taken

    def end(self) -> list[bytes]:
        """Returns nothing: the last line has said that the answer is complete."""
        return []

    def fail(self, error: ErrorResponse) -> list[bytes]:
        """Returns the error as a line."""
        return [encode_error(error) + b"\n"]

    def keep_alive(self, load_progress: float | None) -> bytes:
        """Returns a line without any text: Ollama's lines have no comments."""
        return self._line(self.content())

    def whole(self, answers: Sequence[AnswerEventReader]) -> bytes:
        """Returns the JSON body of an answer. A call that was cut off is left out."""
        (answer,) = answers
        assert answer.end is not None, answer
        if self._only_loads:
            return self._last(answer.end, self.content())
        text, thinking = (
            "".join(part.text for part in answer.parts if part.kind is kind)
            for kind in (PartKind.TEXT, PartKind.REASONING)
        )
        calls = [_call(part) for part in answer.parts if part.kind is PartKind.TOOL_CALL]
        content = self.content(text, thinking, [one for one in calls if one is not None])
        return self._last(answer.end, content, _logprobs(answer.logprobs))

    def _line(self, content: dict[str, Any], logprobs: Sequence[OllamaTokenLogprob] = (), **last: Any) -> bytes:
        shown = list(logprobs) or UNSET
        line = self.line(model=self._model, created_at=self._now(), done=bool(last), logprobs=shown, **content, **last)
        return _encoder.encode(line) + b"\n"

    def _now(self) -> str:
        now = datetime.datetime.fromtimestamp(self._head.created + self._head.age_s(), datetime.UTC)
        return now.isoformat().replace("+00:00", "Z")

    def _last(self, end: AnswerEnded, content: dict[str, Any], logprobs: Sequence[OllamaTokenLogprob] = ()) -> bytes:
        total_ms = 1e3 * self._head.age_s()
        timings, usage = end.timings, end.usage
        counted: dict[str, int] = {"total_duration": round(_NS_PER_MS * total_ms)}
        if timings is not None:
            counted["load_duration"] = round(_NS_PER_MS * max(0.0, total_ms - timings.total_ms))
        if self._only_loads:
            return self._line(content, (), done_reason="load", **counted)
        if timings is not None:
            counted["prompt_eval_duration"] = round(_NS_PER_MS * timings.prefill_ms)
            counted["eval_duration"] = round(_NS_PER_MS * timings.decode_ms)
        if usage is not None:
            counted |= {"prompt_eval_count": usage.prompt_tokens, "eval_count": usage.completion_tokens}
        reason = "length" if end.finish_reason is wire.FinishReason.LENGTH else "stop"
        return self._line(content, logprobs, done_reason=reason, **counted)


class OllamaChatEncoder(LinesEncoder):
    """Encodes an answer as an assistant's message."""

    line = OllamaChatResponse

    def content(self, text: str = "", thinking: str = "", calls: Sequence[OllamaToolCall] = ()) -> dict[str, Any]:
        return {"message": OllamaAnswer(role="assistant", content=text, thinking=thinking, tool_calls=list(calls))}


class OllamaCompletionEncoder(LinesEncoder):
    """Encodes an answer as a text."""

    line = OllamaGenerateResponse

    def content(self, text: str = "", thinking: str = "", calls: Sequence[OllamaToolCall] = ()) -> dict[str, Any]:
        return {"response": text, "thinking": thinking}


CHAT = ApiEndpoint(
    path="/api/chat",
    summary="A chat completion in Ollama's form",
    body=OllamaChatRequest,
    read=read_chat,
    response=OllamaChatResponse,
    event=OllamaChatResponse,
    event_type=NDJSON,
    ignored=options.IGNORED,
)
GENERATE = ApiEndpoint(
    path="/api/generate",
    summary="A completion in Ollama's form",
    body=OllamaGenerateRequest,
    read=read_generate,
    response=OllamaGenerateResponse,
    event=OllamaGenerateResponse,
    event_type=NDJSON,
    ignored=options.IGNORED,
    unserved={
        "images": UnservedField("only text is served", (None, [])),
        "template": UnservedField("only the model's own is served", (None, "")),
        "context": UnservedField("conversations are served by /api/chat", (None, [])),
        "width": UnservedField("no images are made", (None, 0)),
        "height": UnservedField("no images are made", (None, 0)),
        "steps": UnservedField("no images are made", (None, 0)),
    },
)


def _call(part: AnswerPart) -> OllamaToolCall | None:
    """Returns a complete call; None for one that was cut off."""
    try:
        arguments = msgspec.json.decode(part.text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
    function = CalledFunction(index=part.call_index, name=part.name, arguments=arguments)
    return OllamaToolCall(id=part.call_id, function=function)


def _logprobs(tokens: Sequence[wire.TokenLogprob]) -> list[OllamaTokenLogprob]:
    return [
        OllamaTokenLogprob(
            token=one.text,
            logprob=one.logprob,
            bytes=one.bytes,
            top_logprobs=[OllamaTopLogprob(token=top.text, logprob=top.logprob, bytes=top.bytes) for top in one.top],
        )
        for one in tokens
    ]
