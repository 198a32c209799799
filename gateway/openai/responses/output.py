"""The response object, and the output items that it has for the parts of an answer: reasoning, messages and calls.

It is the body of an unstreamed response, and is in the first and last events of a stream."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.gateway.openai import error_bodies, schemas
from tokenbus.gateway.openai.choices import encode_logprobs
from tokenbus.gateway.openai.fields import ReasoningConfig, RequestedReasoning
from tokenbus.gateway.openai.responses import items
from tokenbus.gateway.openai.responses.body import ResponsesBody, TextConfig, TextFormat
from tokenbus.gateway.openai.responses.tools import OfferedTools, ResponsesTool, input_of
from tokenbus.gateway.serving.answer_events import AnswerEnded, AnswerPart, PartKind
from tokenbus.gateway.serving.dialect import ResponseHead
from tokenbus.protocol.wire import messages, params

Status = Literal["in_progress", "completed", "incomplete"]
_TIERS = {"priority": "priority", "fast": "priority", "flex": "flex"}
_OVERFLOW, _LIMITED = "context_length_exceeded", "rate_limit_exceeded"
_PREFIXES = {PartKind.REASONING: "rs", PartKind.TEXT: "msg", PartKind.TOOL_CALL: "fc"}


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    annotations: list[None] = []
    logprobs: list[schemas.ChatCompletionTokenLogprob] = []


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="summary_text"):
    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: Status
    role: str = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: Status
    summary: list[SummaryText] = []
    """The same text as in `content`, if a summary was asked for: nothing summarizes it."""
    content: list[ReasoningText]
    encrypted_content: str | UnsetType = UNSET
    """Only if requested."""


class FunctionCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str


class CustomToolCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str


OutputItem = ReasoningItem | MessageItem | FunctionCallItem | CustomToolCallItem


class OutputItems:
    """Makes the items of one response."""

    def __init__(
        self, token: str, tools: OfferedTools, *, with_encrypted_content: bool, with_summary: bool = False
    ) -> None:
        """`token` is the part that the ids of the response and its items have in common."""
        self._token = token
        self._tools = tools
        self._with_encrypted_content = with_encrypted_content
        self.with_summary = with_summary

    def id(self, part: AnswerPart) -> str:
        """Returns the id of a part's item."""
        prefix = "ctc" if self.is_custom(part) else _PREFIXES[part.kind]
        return f"{prefix}_{self._token}_{part.index}"

    def is_custom(self, part: AnswerPart) -> bool:
        """Whether a part is the call of a custom tool."""
        return part.kind is PartKind.TOOL_CALL and self._tools.called(part.name).is_custom

    def begun(self, part: AnswerPart) -> OutputItem:
        """Returns the item of a part that has just begun, without content."""
        match part.kind:
            case PartKind.REASONING:
                return ReasoningItem(id=self.id(part), status="in_progress", content=[])
            case PartKind.TEXT:
                return MessageItem(id=self.id(part), status="in_progress", content=[])
            case PartKind.TOOL_CALL:
                return self._call(part, "", "in_progress")

    def whole(self, part: AnswerPart, *, is_cut: bool = False) -> OutputItem:
        """Returns the item of a part that has ended; `is_cut`: it was cut off."""
        status: Status = "incomplete" if is_cut else "completed"
        match part.kind:
            case PartKind.REASONING:
                packed = items.pack(part.text) if self._with_encrypted_content else UNSET
                content = [ReasoningText(text=part.text)]
                summary = [SummaryText(text=part.text)] if self.with_summary else []
                return ReasoningItem(
                    id=self.id(part), status=status, summary=summary, content=content, encrypted_content=packed
                )
            case PartKind.TEXT:
                return MessageItem(id=self.id(part), status=status, content=[output_text(part)])
            case PartKind.TOOL_CALL:
                return self._call(part, part.text, status)

    def _call(self, part: AnswerPart, arguments: str, status: Status) -> FunctionCallItem | CustomToolCallItem:
        tool: ResponsesTool = self._tools.called(part.name)
        namespace = UNSET if tool.namespace is None else tool.namespace
        if tool.is_custom:
            return CustomToolCallItem(
                id=self.id(part),
                status=status,
                call_id=part.call_id,
                name=tool.name,
                namespace=namespace,
                input=input_of(arguments),
            )
        return FunctionCallItem(
            id=self.id(part),
            status=status,
            call_id=part.call_id,
            name=tool.name,
            namespace=namespace,
            arguments=arguments,
        )


def output_text(part: AnswerPart) -> OutputText:
    """Returns the text of a message, with its log probabilities."""
    return OutputText(text=part.text, logprobs=encode_logprobs(part.logprobs))


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    reason: str = "max_output_tokens"


class ResponseError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response failed after it had started."""

    code: str
    message: str
    param: str | None


class EchoedFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The format that was asked for."""

    type: str
    name: str | UnsetType = UNSET
    description: str | UnsetType | None = UNSET
    schema: dict[str, Any] | UnsetType | None = UNSET
    strict: bool | UnsetType = UNSET
    """These four only of a schema."""


class EchoedText(msgspec.Struct, frozen=True, kw_only=True):
    format: EchoedFormat
    verbosity: str | UnsetType = UNSET


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The response, with what the request asked for."""

    id: str
    object: str = "response"
    created_at: int
    """Unix seconds."""
    completed_at: int | None = None
    status: str = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    presence_penalty: float
    frequency_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningConfig
    safety_identifier: str | None
    service_tier: str
    store: bool
    """Whether it is stored; false if that failed."""
    temperature: float
    text: EchoedText
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    """A conversation is never truncated."""
    usage: ResponseUsage | None = None
    user: str | None


def begun(head: ResponseHead, body: ResponsesBody, tools: OfferedTools, token: str, *, is_stored: bool) -> Response:
    """Returns the response before any of its answer is known."""
    asked = body.reasoning or RequestedReasoning()
    return Response(
        id=f"resp_{token}",
        created_at=head.created,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=head.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ReasoningConfig(
            effort=body.reasoning_effort or asked.effort, summary=asked.summary or asked.generate_summary
        ),
        safety_identifier=body.safety_identifier,
        service_tier=_TIERS.get(body.service_tier or "", "default"),
        store=is_stored,
        temperature=_or_default(body.temperature, params.DEFAULTS.temperature),
        text=_echoed(body.text or TextConfig()),
        tool_choice=body.tool_choice or "auto",
        tools=tools.given,
        top_logprobs=body.top_logprobs or 0,
        top_p=_or_default(body.top_p, params.DEFAULTS.top_p),
        user=body.user,
    )


def sampled(response: Response, sampling: messages.SamplingReport) -> Response:
    """Returns the response with the sampling that the worker has chosen."""
    return msgspec.structs.replace(
        response,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
    )


def _or_default(asked: float | None, default: float | None) -> float:
    value = default if asked is None else asked
    assert value is not None
    return value


def _echoed(text: TextConfig) -> EchoedText:
    asked, verbosity = text.format or TextFormat(type="text"), text.verbosity or UNSET
    if asked.type != "json_schema":
        return EchoedText(format=EchoedFormat(type=asked.type), verbosity=verbosity)
    echoed = EchoedFormat(
        type=asked.type,
        name=asked.name or "",
        description=asked.description,
        schema=asked.schema,
        strict=bool(asked.strict),
    )
    return EchoedText(format=echoed, verbosity=verbosity)


def ended(response: Response, output: Sequence[OutputItem], end: AnswerEnded, age_s: float) -> Response:
    """Returns the response when its answer has ended successfully, or at its limit, `age_s` after the request."""
    is_cut = end.finish_reason is messages.FinishReason.LENGTH
    return msgspec.structs.replace(
        response,
        status="incomplete" if is_cut else "completed",
        completed_at=None if is_cut else response.created_at + int(age_s),
        incomplete_details=IncompleteDetails() if is_cut else None,
        output=list(output),
        usage=_encode_usage(end.usage),
    )


def failed(response: Response, output: Sequence[OutputItem], error: ErrorResponse) -> Response:
    """Returns the response when its answer has failed."""
    failure = ResponseError(code=_code_of(error), message=_message_of(error), param=error.param)
    return msgspec.structs.replace(response, status="failed", error=failure, output=list(output))


def _encode_usage(usage: messages.Usage | None) -> ResponseUsage | None:
    """Returns token counts in OpenAI's form, with zeros rather than gaps."""
    if usage is None:
        return None
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens or 0),
        total_tokens=usage.total_tokens,
    )


def _code_of(error: ErrorResponse) -> str:
    """Returns one of the codes known to OpenAI's clients, of which only `invalid_prompt` is not retried."""
    code = error_bodies.code_of(error)
    if code in (_OVERFLOW, _LIMITED):
        return code
    return "server_error" if error.status >= 500 else "invalid_prompt"


def _message_of(error: ErrorResponse) -> str:
    message = error_bodies.message_of(error)
    if error.retry_after_ms is None:
        return message
    return f"{message.rstrip('.')}. Please try again in {math.ceil(error.retry_after_ms / 1e3)}s."
