"""The endpoints of the Responses API: a response, and the number of tokens of its input."""

import msgspec

from tokenbus.client.wire.wire_client import WireClient
from tokenbus.gateway.http import http_errors
from tokenbus.gateway.openai.fields import ReasoningWishes, read_wishes
from tokenbus.gateway.openai.responses import output
from tokenbus.gateway.openai.responses.body import ResponsesBody
from tokenbus.gateway.openai.responses.events import ResponseEncoder
from tokenbus.gateway.openai.responses.items import ResponsesFieldNames, conversation_of
from tokenbus.gateway.openai.responses.output import OutputItems, Response
from tokenbus.gateway.openai.responses.tools import OfferedTools
from tokenbus.gateway.serving import conversation
from tokenbus.gateway.serving.dialect import (
    ApiEndpoint,
    ParsedCall,
    ParsedGeneration,
    RequestHead,
    ResponseHead,
    UnservedField,
)
from tokenbus.protocol.wire import errors
from tokenbus.protocol.wire import messages as wire
from tokenbus.protocol.wire.checks import validation

_NOT_STORED = UnservedField("nothing is stored here: send the whole conversation as input, with store: false")
_UNSERVED = {
    "previous_response_id": _NOT_STORED,
    "conversation": _NOT_STORED,
    "prompt": _NOT_STORED,
    "background": UnservedField("responses can't be fetched later: leave it out, or use stream", (None, False)),
}
_WITH_LOGPROBS = "message.output_text.logprobs"
_WITH_ENCRYPTED_CONTENT = "reasoning.encrypted_content"
_STREAMED_ERRORS = frozenset({str(errors.Code.PROMPT_TOO_LONG), str(errors.Code.OVERLOADED)})
"""Codes that agents understand only in `response.failed`: they compact their conversation, or wait and retry."""


class CountBody(ResponsesBody, frozen=True, kw_only=True):
    """The body: that of a response request."""


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The response: how many tokens a model would read."""

    input_tokens: int
    object: str = "response.input_tokens"


def read(body: ResponsesBody, head: RequestHead) -> ParsedGeneration:
    """Validates a body as a router would. Raises RequestError with OpenAI's name for the field at fault."""
    conversation.check_count("input", body.items)
    tools, items = OfferedTools(body.offered, body.tool_choice), conversation_of(body)
    messages = conversation.normalized(items.messages)
    paths = items.paths[len(items.messages) - len(messages) :]  # without those of joined system messages
    wishes = read_wishes(body, body.reasoning, body.chat_template_kwargs)
    names = ResponsesFieldNames(paths, tools.paths, body.renamed | wishes.names)
    request = _to_wire(body, messages, tools, wishes, head)
    with http_errors.renaming(names.of):
        validation.check_request(request)

    def encoder(head: ResponseHead) -> ResponseEncoder:
        is_packed = _WITH_ENCRYPTED_CONTENT in (body.include or [])
        made = OutputItems(head.request_id, tools, with_encrypted_content=is_packed)
        return ResponseEncoder(output.begun(head, body, tools), made, names.of)

    return ParsedGeneration(
        model=head.model, requests=(request,), encoder=encoder, stream=bool(body.stream), name_of=names.of
    )


def _to_wire(
    body: ResponsesBody,
    messages: list[wire.ChatMessage],
    tools: OfferedTools,
    wishes: ReasoningWishes,
    head: RequestHead,
) -> wire.GenerateRequest:
    wants_logprobs = bool(body.top_logprobs) or _WITH_LOGPROBS in (body.include or [])
    return wire.GenerateRequest(
        id=head.id,
        messages=messages,
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        response_format=body.format,
        tools=tools.functions or None,
        tool_choice=tools.choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning=wishes.options,
        chat_template_kwargs=wishes.template_arguments,
        **body.to_wire(head.session),
    )


def read_count(body: CountBody, head: RequestHead) -> ParsedCall[wire.TokenizeRequest, wire.TokenizeReply]:
    """Validates a body like a response request's. Raises RequestError with OpenAI's name for the field at fault."""
    parsed = read(body, head)
    return ParsedCall(
        model=parsed.model,
        request=conversation.counting(parsed.requests[0]),
        send=WireClient.tokenize,
        encode=lambda reply: msgspec.json.encode(InputTokens(input_tokens=reply.count or 0)),
        name_of=parsed.name_of,
    )


ENDPOINT = ApiEndpoint(
    path="/v1/responses",
    summary="A response, without storage",
    body=ResponsesBody,
    read=read,
    response=Response,
    unserved=_UNSERVED,
    streamed_errors=_STREAMED_ERRORS,
    repeats_logprobs=True,
)
INPUT_TOKENS = ApiEndpoint(
    path="/v1/responses/input_tokens",
    summary="The number of tokens of a response's input",
    body=CountBody,
    read=read_count,
    response=InputTokens,
    unserved=_UNSERVED,
)
