"""The endpoints of the Responses API: a response, and the number of tokens of its input."""

import secrets
from typing import NamedTuple

from tokenbus.gateway.http import http_errors
from tokenbus.gateway.http.http_errors import NameOf
from tokenbus.gateway.openai import conversation_fields, input_tokens
from tokenbus.gateway.openai.fields import ReasoningWishes, WireFields
from tokenbus.gateway.openai.input_tokens import CountCall, InputTokens
from tokenbus.gateway.openai.responses import output, stored
from tokenbus.gateway.openai.responses.body import PlacedItem, ResponsesBody
from tokenbus.gateway.openai.responses.events import ResponseEncoder
from tokenbus.gateway.openai.responses.items import ResponsesFieldNames, conversation_of, is_continued
from tokenbus.gateway.openai.responses.output import OutputItems, Response
from tokenbus.gateway.openai.responses.tools import OfferedTools
from tokenbus.gateway.serving import conversation
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

_NOT_HERE = "only chat completions and completions have them"
_LIMIT = "use max_output_tokens"
_UNSERVED = conversation_fields.UNSERVED | {
    "conversation": UnservedField("there are no conversations: use previous_response_id, or send all of it as input"),
    "prompt": UnservedField("no prompts are stored: send instructions and input"),
    "background": UnservedField("a response ends with its request: leave it out, or use stream", (None, False)),
    "context_management": UnservedField("a conversation is never compacted or truncated", (None, [])),
    "previous_input_messages": UnservedField("use previous_response_id, or send all of it as input", (None, [])),
    "enable_response_messages": UnservedField("responses have items, no messages", (None, False)),
    "messages": UnservedField("use input"),
    "max_tokens": UnservedField(_LIMIT),
    "max_completion_tokens": UnservedField(_LIMIT),
    "n": UnservedField("there is one answer", (None, 1)),
    "logprobs": UnservedField("use top_logprobs", (None, False)),
    "prompt_logprobs": UnservedField(_NOT_HERE),
    "return_token_ids": UnservedField(_NOT_HERE, (None, False)),
    "return_tokens_as_token_ids": UnservedField(_NOT_HERE, (None, False)),
    "response_format": UnservedField("use text.format"),
    "continue_final_message": UnservedField("end the input with a message to be continued", (None, False)),
    "add_generation_prompt": UnservedField("end the input with a message to be continued", (None, True)),
}
_IGNORED = {name: reason for name, reason in conversation_fields.IGNORED.items() if name != "user"} | {
    "stream_options": "events have all there is",
    "return_progress": "asks for more about the request than its answer",
    "truncation": "a conversation that does not fit is refused, never cut",
    "text.verbosity": "a hint that open models don't know",
    "text.format.name": "a name for the client's own use",
    "text.format.description": "schemas are not shown to the model",
    "input[].phase": "a hint that open models don't know",
}
_SUMMARIES = ("auto", "concise", "detailed")
"""All mean the same: the reasoning itself."""
_WITH_LOGPROBS = "message.output_text.logprobs"
_WITH_ENCRYPTED_CONTENT = "reasoning.encrypted_content"
_STREAMED_ERRORS = frozenset({str(errors.Code.PROMPT_TOO_LONG), str(errors.Code.OVERLOADED)})
"""Codes that agents understand only in `response.failed`: they compact their conversation, or wait and retry."""


class CountBody(ResponsesBody, frozen=True, kw_only=True):
    """The body: that of a response request."""


class _Prepared(NamedTuple):
    """A valid body, and the request that it becomes."""

    conversation: list[PlacedItem]
    tools: OfferedTools
    request: wire.GenerateRequest
    name_of: NameOf


def read(body: ResponsesBody, head: RequestHead) -> ParsedGeneration:
    """Validates a body as a router would. Raises RequestError with OpenAI's name for the field at fault, and what
    `stored.whole_conversation` raises."""
    prepared, token = _prepared(body, head), secrets.token_hex(24)
    given = stored.input_record(body, head, prepared.conversation, token)

    def encoder(head: ResponseHead) -> ResponseEncoder:
        made = OutputItems(
            token,
            prepared.tools,
            with_encrypted_content=_WITH_ENCRYPTED_CONTENT in (body.include or []),
            with_summary=_summary_of(body) is not None,
        )
        begun = output.begun(head, body, prepared.tools, token, is_stored=given is not None)
        return ResponseEncoder(begun, made, prepared.name_of, head.age_s, given)

    return ParsedGeneration(
        model=head.model,
        requests=(prepared.request,),
        encoder=encoder,
        stream=bool(body.stream),
        is_stored=given is not None,
        name_of=prepared.name_of,
    )


def _prepared(body: ResponsesBody, head: RequestHead) -> _Prepared:
    conversation.check_count("input", body.items)
    _summary_of(body)
    whole = stored.whole_conversation(body, head)
    conversation.check_count("previous_response_id", whole)
    tools, items = OfferedTools(body.offered(whole), body.tool_choice), conversation_of(body.instructions, whole)
    messages = conversation.normalized(items.messages)
    paths = items.paths[len(items.messages) - len(messages) :]  # without those of joined system messages
    wishes, common = body.read_wishes(), body.to_wire(head.session)
    continues = is_continued(whole, messages)
    own_names = {"continue_final_message": whole[-1].path} if continues else {}
    names = ResponsesFieldNames(paths, tools.paths, common.names | wishes.names | own_names)
    request = _to_wire(body, messages, tools, wishes, common, head, continues=continues)
    with http_errors.renaming(names.of):
        validation.check_request(request)
    return _Prepared(whole, tools, request, names.of)


def _summary_of(body: ResponsesBody) -> str | None:
    """Returns the kind of summary that is asked for, by its name or the former one. Raises RequestError."""
    asked = body.reasoning
    for name in ("summary", "generate_summary"):
        kind = getattr(asked, name, None)
        if kind is not None and kind not in _SUMMARIES:
            raise errors.invalid_field(f"reasoning.{name}", f"must be {' or '.join(_SUMMARIES)}, got {kind[:40]!r}")
    return None if asked is None else asked.summary or asked.generate_summary


def _to_wire(
    body: ResponsesBody,
    messages: list[wire.ChatMessage],
    tools: OfferedTools,
    wishes: ReasoningWishes,
    common: WireFields,
    head: RequestHead,
    *,
    continues: bool,
) -> wire.GenerateRequest:
    wants_logprobs = bool(body.top_logprobs) or _WITH_LOGPROBS in (body.include or [])
    return wire.GenerateRequest(
        id=head.id,
        messages=messages,
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        continue_final_message=continues or None,
        tools=tools.functions or None,
        tool_choice=tools.choice,
        parallel_tool_calls=body.parallel_calls(tools.choice),
        return_sampling=True if None in (body.temperature, body.top_p) else None,
        reasoning=wishes.options,
        chat_template_kwargs=wishes.template_arguments,
        **common.fields,
    )


def read_count(body: CountBody, head: RequestHead) -> CountCall:
    """Validates a body like a response request's. Raises RequestError with OpenAI's name for the field at fault."""
    prepared = _prepared(body, head)
    return input_tokens.counting(head.model, prepared.request, prepared.name_of)


ENDPOINT = ApiEndpoint(
    path="/v1/responses",
    summary="A response",
    body=ResponsesBody,
    read=read,
    response=Response,
    unserved=_UNSERVED,
    ignored=_IGNORED,
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
    ignored=_IGNORED,
)
