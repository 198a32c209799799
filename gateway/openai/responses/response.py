"""The response object: the body of an unstreamed response, also in the first and last events of a stream."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from tokenbus.gateway.generation.answer_events import AnswerEnded, AnswerEventReader
from tokenbus.gateway.generation.dialect import ResponseHead
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.gateway.openai import error_bodies
from tokenbus.gateway.openai.reasoning_fields import ReasoningConfig
from tokenbus.gateway.openai.responses.body import ResponsesBody, TextConfig, TextFormat
from tokenbus.gateway.openai.responses.output_items import OutputItem, OutputItems
from tokenbus.gateway.openai.responses.tools import OfferedTools
from tokenbus.protocol.wire import errors, messages

_TIERS = {"priority": "priority", "fast": "priority", "flex": "flex"}
_OVERFLOW, _LIMITED = "context_length_exceeded", "rate_limit_exceeded"
STREAMED_ERRORS = frozenset({str(errors.Code.PROMPT_TOO_LONG), str(errors.Code.OVERLOADED)})
"""Codes that agents understand only in `response.failed`: they compact their conversation, or wait and retry."""


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


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The response, with what the request asked for."""

    id: str
    object: str = "response"
    created_at: int
    """Unix seconds."""
    status: str = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: str | UnsetType = UNSET
    reasoning: ReasoningConfig
    service_tier: str
    store: bool = False
    temperature: float | None
    text: TextConfig
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: str = "disabled"
    """A conversation is never truncated."""
    usage: ResponseUsage | None = None


def begun(head: ResponseHead, body: ResponsesBody, tools: OfferedTools) -> Response:
    """Returns the response before any of its answer is known."""
    text, asked = body.text or TextConfig(), body.reasoning or ReasoningConfig()
    return Response(
        id=f"resp_{head.request_id}",
        created_at=head.created,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=head.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        prompt_cache_key=body.prompt_cache_key or UNSET,
        reasoning=ReasoningConfig(effort=asked.effort, summary=asked.summary),
        service_tier=_TIERS.get(body.service_tier or "", "default"),
        temperature=body.temperature,
        text=msgspec.structs.replace(text, format=text.format or TextFormat(type="text")),
        tool_choice=body.tool_choice or "auto",
        tools=tools.given,
        top_logprobs=body.top_logprobs or 0,
        top_p=body.top_p,
    )


def ended(response: Response, output: Sequence[OutputItem], end: AnswerEnded) -> Response:
    """Returns the response when its answer has ended successfully, or at its limit."""
    is_cut = end.finish_reason is messages.FinishReason.LENGTH
    return msgspec.structs.replace(
        response,
        status="incomplete" if is_cut else "completed",
        incomplete_details=IncompleteDetails() if is_cut else None,
        output=list(output),
        usage=_encode_usage(end.usage),
    )


def failed(response: Response, output: Sequence[OutputItem], error: ErrorResponse) -> Response:
    """Returns the response when its answer has failed."""
    failure = ResponseError(code=_code_of(error), message=_message_of(error), param=error.param)
    return msgspec.structs.replace(response, status="failed", error=failure, output=list(output))


def whole(response: Response, items: OutputItems, answer: AnswerEventReader) -> Response:
    """Returns the response for a complete answer."""
    assert answer.end is not None, answer
    is_cut = answer.end.finish_reason is messages.FinishReason.LENGTH
    output = [items.whole(part, is_cut=is_cut and part is answer.parts[-1]) for part in answer.parts]
    return ended(response, output, answer.end)


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
