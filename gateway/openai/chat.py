"""Chat completions: the fields of a request, its wire request, and its answers as chunks or as one completion."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec import UNSET

from tokenbus.gateway.http import http_errors
from tokenbus.gateway.http.http_errors import NameOf
from tokenbus.gateway.openai import conversation_fields, input_tokens, schemas
from tokenbus.gateway.openai.choices import PLAIN, ChoicesEncoder, StreamForm, encode_logprobs, encode_prompt_logprobs
from tokenbus.gateway.openai.conversation_fields import ConversationFields
from tokenbus.gateway.openai.fields import ReasoningWishes, WireFields
from tokenbus.gateway.openai.input_tokens import CountCall, InputTokens
from tokenbus.gateway.serving import conversation
from tokenbus.gateway.serving.answer_events import (
    AnswerEnded,
    AnswerEvent,
    AnswerEventReader,
    AnswerPart,
    PartGrew,
    PartKind,
    PartStarted,
    PromptComputed,
    PromptScored,
    TokensCounted,
    TokensSampled,
)
from tokenbus.gateway.serving.dialect import ApiEndpoint, ParsedGeneration, RequestHead, ResponseHead, UnservedField
from tokenbus.protocol.wire import errors
from tokenbus.protocol.wire import messages as wire
from tokenbus.protocol.wire.checks import validation


class OpenAIChatMessage(wire.ChatMessage, frozen=True, kw_only=True, omit_defaults=True):
    """A message of the conversation."""

    reasoning: str | None = None
    """Another name of `reasoning_content`."""
    prefix: bool | None = None
    """Mistral's: the last message, an assistant's, is continued."""
    refusal: str | None = None
    """The text of an assistant's message that has no other."""
    function_call: Any = None
    """Refused, as is `audio`."""
    audio: Any = None

    def to_wire(self) -> wire.ChatMessage:
        return wire.ChatMessage(
            role=self.role,
            content=self.refusal if self.content is None else self.content,
            reasoning_content=self.reasoning if self.reasoning_content is None else self.reasoning_content,
            name=self.name,
            tool_calls=self.tool_calls,
            tool_call_id=self.tool_call_id,
        )


class ChatRequest(ConversationFields, frozen=True, kw_only=True):
    """The body of a chat completion request. Unknown fields are ignored, as OpenAI's clients expect."""

    messages: list[OpenAIChatMessage] | None = None
    max_completion_tokens: int | None = None
    """The newer name of `max_tokens`, which takes precedence."""
    logprobs: bool | None = None
    continue_final_message: bool | None = None
    """vLLM's: the last message, an assistant's, is continued."""
    add_generation_prompt: bool | None = None
    """false only if that message is continued."""


class _Prepared(NamedTuple):
    request: wire.GenerateRequest
    name_of: NameOf


def _prepared(chat: ChatRequest, head: RequestHead) -> _Prepared:
    if chat.messages is None:
        raise errors.invalid_field("messages", "is required")
    if chat.top_logprobs is not None and not chat.logprobs:
        raise errors.invalid_field("top_logprobs", "needs logprobs: true")
    if chat.tool_choice == {}:
        raise errors.invalid_field("tool_choice", "must be auto, none, required or the name of a function, got {}")
    continued = continuation_of(
        chat.messages, asked=chat.continue_final_message, begins_answer=chat.add_generation_prompt
    )
    if chat.add_generation_prompt is False and not continued:
        raise errors.unsupported_field(
            "add_generation_prompt", "answers begin a new message, unless the last is continued"
        )
    chat.check_answers()
    wishes, common = chat.read_wishes(), chat.to_wire(head.session)
    request = _to_wire(chat, chat.messages, wishes, common, head, continues=bool(continued))
    name_of = conversation.given_names(
        _renamed(chat, common) | wishes.names | continued,
        num_joined=len(chat.messages) - len(request.messages or []),
    )
    with http_errors.renaming(name_of):
        validation.check_request(request)
    return _Prepared(request, name_of)


def read(chat: ChatRequest, head: RequestHead) -> ParsedGeneration:
    """Validates a body as a router would. Raises RequestError with OpenAI's name for the field at fault."""
    request, name_of = _prepared(chat, head)
    return ParsedGeneration(
        model=head.model,
        requests=(request,),
        encoder=functools.partial(
            ChunkEncoder,
            form=chat.stream_form,
            prompt_logprobs=chat.prompt_logprobs,
            names_by_id=bool(chat.return_tokens_as_token_ids),
        ),
        stream=bool(chat.stream),
        n=chat.num_answers,
        counts_tokens=chat.stream_form.continuous_usage,
        shows_prompts=bool(chat.return_token_ids),
        name_of=name_of,
    )


def read_count(chat: ChatRequest, head: RequestHead) -> CountCall:
    """Validates a body like that of a completion. Raises RequestError with OpenAI's name for the field at fault."""
    request, name_of = _prepared(chat, head)
    return input_tokens.counting(head.model, request, name_of)


def continuation_of(
    said: Sequence[OpenAIChatMessage], *, asked: bool | None, begins_answer: bool | None
) -> dict[str, str]:
    """Returns the name by which a body asks to continue its last message, if it does: `asked` is its
    `continue_final_message`, and `begins_answer` its `add_generation_prompt`. Raises RequestError if both are true, and
    for the prefix of another message."""
    for index, message in enumerate(said[:-1]):
        if message.prefix:
            raise errors.invalid_field(f"messages[{index}].prefix", "only the last message can be continued")
    if asked:
        if begins_answer:
            raise errors.invalid_field("add_generation_prompt", "can't be true with continue_final_message")
        return {"continue_final_message": "continue_final_message"}
    if said and said[-1].prefix:
        return {"continue_final_message": f"messages[{len(said) - 1}].prefix"}
    return {}


def _tool_choice(asked: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Returns the wire's form of Mistral's word for a call of any tool, and of Hugging Face's choice of one."""
    if isinstance(asked, dict) and asked.keys() == {"function"}:
        return {"type": "function"} | asked
    return "required" if asked == "any" else asked


def _renamed(chat: ChatRequest, common: WireFields) -> dict[str, str]:
    renamed = dict(common.names)
    if chat.max_completion_tokens is not None:
        renamed["max_tokens"] = "max_completion_tokens"
    if chat.top_logprobs is not None:
        renamed["logprobs"] = "top_logprobs"
    return renamed


def _to_wire(
    chat: ChatRequest,
    said: list[OpenAIChatMessage],
    wishes: ReasoningWishes,
    common: WireFields,
    head: RequestHead,
    *,
    continues: bool,
) -> wire.GenerateRequest:
    fields, choice = common.fields, _tool_choice(chat.tool_choice)
    if chat.max_completion_tokens is not None:
        fields = fields | {"max_tokens": chat.max_completion_tokens}
    return wire.GenerateRequest(
        id=head.id,
        messages=conversation.normalized([one.to_wire() for one in said]),
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        continue_final_message=continues or None,
        tools=chat.tools,
        tool_choice=choice,
        parallel_tool_calls=chat.parallel_calls(choice),
        reasoning=wishes.options,
        chat_template_kwargs=wishes.template_arguments,
        **fields,
    )


class ChunkEncoder(ChoicesEncoder):
    """Encodes answers as chat completion chunks, or as one chat completion."""

    id_prefix = "chatcmpl-"
    event_type = schemas.ChatCompletionChunk
    response_type = schemas.ChatCompletion

    def __init__(
        self,
        head: ResponseHead,
        *,
        form: StreamForm = PLAIN,
        prompt_logprobs: int | None = None,
        names_by_id: bool = False,
    ) -> None:
        """`prompt_logprobs` is how many of the likeliest tokens are shown for each one of the prompt, if these are.
        `names_by_id`: log probabilities name tokens by their ids."""
        super().__init__(head, form=form)
        self._num_prompt_logprobs = prompt_logprobs
        self._names_by_id = names_by_id
        self._opening: dict[str, Any] = {}
        """Fields of the next event, or of the whole response."""

    def show_prompts(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Takes the token ids of the prompt."""
        self._opening = {"prompt_token_ids": token_ids[0]}

    def encode(self, choice: int, events: Sequence[AnswerEvent]) -> list[bytes]:
        """Returns the events of one chunk of an answer."""
        deltas: list[schemas.ChunkChoice] = []
        progress: list[bytes] = []
        sampled = TokensSampled([], [])
        for event in events:
            match event:
                case PromptComputed() | TokensCounted():
                    self._note(choice, event)
                    if isinstance(event, PromptComputed):
                        progress = self._progress(_choice(choice, schemas.ChoiceDelta()), event)
                case PromptScored() if choice == 0 and self._num_prompt_logprobs is not None:
                    scored = encode_prompt_logprobs(event.logprobs, self._num_prompt_logprobs)
                    self._opening = self._opening | {"prompt_logprobs": scored}
                    deltas.append(_choice(choice, schemas.ChoiceDelta()))
                case TokensSampled():
                    sampled = event
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
        if sampled.logprobs or sampled.token_ids:
            first = deltas[0] if deltas and deltas[0].finish_reason is None else None
            with_tokens = schemas.ChunkChoice(
                index=choice,
                delta=first.delta if first else schemas.ChoiceDelta(),
                logprobs=self._logprobs_of(sampled.logprobs),
                token_ids=sampled.token_ids or UNSET,
            )
            deltas[: 1 if first else 0] = [with_tokens]
        if deltas and choice not in self._started:
            self._started.add(choice)
            # OpenAI's first chunk has the role but no text.
            deltas.insert(0, _choice(choice, schemas.ChoiceDelta(role="assistant", content="")))
        encoded = []
        for one in deltas:
            encoded.append(self._event([one], **self._opening))
            self._opening = {}
        return progress + encoded

    def whole(self, answers: Sequence[AnswerEventReader]) -> bytes:
        """Returns the JSON body of a chat completion."""
        choices = [self._whole_choice(number, answer) for number, answer in enumerate(answers)]
        if self._num_prompt_logprobs is None:
            return self._response(choices, answers, **self._opening)
        scored = encode_prompt_logprobs(answers[0].prompt_logprobs, self._num_prompt_logprobs)
        return self._response(choices, answers, prompt_logprobs=scored, **self._opening)

    def _whole_choice(self, number: int, answer: AnswerEventReader) -> schemas.Choice:
        assert answer.end is not None, answer
        text, reasoning = (
            "".join(part.text for part in answer.parts if part.kind is kind)
            for kind in (PartKind.TEXT, PartKind.REASONING)
        )
        calls = [_whole_call(part) for part in answer.parts if part.kind is PartKind.TOOL_CALL]
        said = schemas.ChatCompletionMessage(
            content=text or None if calls else text,
            reasoning_content=reasoning or None,
            reasoning=reasoning or None,
            tool_calls=calls or UNSET,
        )
        return schemas.Choice(
            index=number,
            message=said,
            logprobs=self._logprobs_of(answer.logprobs),
            finish_reason=answer.end.finish_reason,
            token_ids=answer.token_ids or UNSET,
        )

    def _logprobs_of(self, tokens: list[wire.TokenLogprob]) -> schemas.ChoiceLogprobs | None:
        return schemas.ChoiceLogprobs(content=encode_logprobs(tokens, by_id=self._names_by_id)) if tokens else None


IN_MESSAGES: dict[str, UnservedField] = {
    "messages[].function_call": UnservedField("use tool_calls"),
    "messages[].audio": UnservedField("only text is served"),
}
IGNORED_IN_MESSAGES = {
    "messages[].annotations": "about what tools of another server have found",
    "messages[].reasoning_details": "the same as reasoning, in another server's form",
}
_UNSERVED = conversation_fields.UNSERVED | IN_MESSAGES
_IGNORED = (
    conversation_fields.IGNORED
    | IGNORED_IN_MESSAGES
    | {
        "reasoning.summary": "the reasoning is there as a whole",
        "reasoning.generate_summary": "the reasoning is there as a whole",
        "store": "chat completions are not stored, and clients are not told that they were",
        "metadata": "the client's own notes",
        "safety_identifier": "a name for abuse reports",
    }
)
ENDPOINT = ApiEndpoint(
    path="/v1/chat/completions",
    summary="A chat completion",
    body=ChatRequest,
    read=read,
    response=schemas.ChatCompletion,
    event=schemas.ChatCompletionChunk,
    required=("messages",),
    unserved=_UNSERVED,
    ignored=_IGNORED,
)
INPUT_TOKENS = ApiEndpoint(
    path="/v1/chat/completions/input_tokens",
    summary="The number of tokens of a chat completion's prompt (llama-server's)",
    body=ChatRequest,
    read=read_count,
    response=InputTokens,
    required=("messages",),
    unserved=_UNSERVED,
    ignored=_IGNORED,
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
