"""Parses the body of a response request, and turns it into a wire request."""

from collections.abc import Mapping, Sequence

import msgspec

from tokenbus.gateway.generation import conversation
from tokenbus.gateway.generation.answer_events import AnswerEventReader
from tokenbus.gateway.generation.dialect import ResponseHead
from tokenbus.gateway.generation.model_names import checked_model
from tokenbus.gateway.http import http_errors
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.gateway.openai.reasoning_fields import ReasoningWishes, read_wishes
from tokenbus.gateway.openai.responses import response
from tokenbus.gateway.openai.responses.body import ResponsesBody
from tokenbus.gateway.openai.responses.events import ResponseEncoder
from tokenbus.gateway.openai.responses.field_names import ResponsesFieldNames
from tokenbus.gateway.openai.responses.input_items import conversation_of
from tokenbus.gateway.openai.responses.output_items import OutputItems
from tokenbus.gateway.openai.responses.tools import OfferedTools
from tokenbus.protocol.wire import codec, errors
from tokenbus.protocol.wire import messages as wire
from tokenbus.protocol.wire.checks import validation

_STORED = ("previous_response_id", "conversation", "prompt")
"""Fields that refer to data that a server would have stored."""
_WITH_LOGPROBS = "message.output_text.logprobs"
_WITH_ENCRYPTED_CONTENT = "reasoning.encrypted_content"
_decoder = codec.Decoder(ResponsesBody)
_encoder = msgspec.json.Encoder()


class ParsedResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request for a response."""

    model: str
    request: wire.GenerateRequest
    body: ResponsesBody
    tools: OfferedTools
    names: ResponsesFieldNames
    n: int = 1

    @property
    def requests(self) -> tuple[wire.GenerateRequest, ...]:
        """The single request that it becomes."""
        return (self.request,)

    @property
    def stream(self) -> bool:
        """Whether the response is a stream of events."""
        return bool(self.body.stream)

    def encoder(self, head: ResponseHead) -> ResponseEncoder:
        """Returns the encoder of a streamed response."""
        return ResponseEncoder(self._begun(head), self._items(head), self.names)

    def encode_whole(self, head: ResponseHead, answers: Sequence[AnswerEventReader]) -> bytes:
        """Returns the body of an unstreamed response."""
        (answer,) = answers
        return _encoder.encode(response.whole(self._begun(head), self._items(head), answer))

    def named(self, error: ErrorResponse) -> ErrorResponse:
        """Returns a router's or worker's error with OpenAI's name for the field at fault."""
        return http_errors.renamed(error, self.names.of)

    def _begun(self, head: ResponseHead) -> response.Response:
        return response.begun(head, self.body, self.tools)

    def _items(self, head: ResponseHead) -> OutputItems:
        is_wanted = _WITH_ENCRYPTED_CONTENT in (self.body.include or [])
        return OutputItems(head.request_id, self.tools, with_encrypted_content=is_wanted)


def parse(
    payload: bytes, headers: Mapping[str, str], request_id: str, default_model: str = ""
) -> ParsedResponsesRequest:
    """Parses a body, and validates it as a router would. Raises RequestError with OpenAI's name for the field at
    fault."""
    body = _decoder.decode(payload, codec.Encoding.JSON)
    model = checked_model(body.model, default_model)
    _check(body)
    tools, items = OfferedTools(body.offered, body.tool_choice), conversation_of(body)
    messages = conversation.normalized(items.messages)
    paths = items.paths[len(items.messages) - len(messages) :]  # without those of joined system messages
    wishes = read_wishes(body)
    names = ResponsesFieldNames(paths, tools.paths, body.renamed | wishes.names)
    request = _to_wire(body, messages, tools, wishes, conversation.session_of(headers), request_id)
    with http_errors.renaming(names.of):
        validation.check_request(request)
    return ParsedResponsesRequest(model=model, request=request, body=body, tools=tools, names=names)


def _check(body: ResponsesBody) -> None:
    """Checks fields without a counterpart on the wire."""
    for name in _STORED:
        if getattr(body, name) is not None:
            problem = f"{name}: nothing is stored here: send the whole conversation as input, with store: false"
            raise errors.request_error(errors.Code.UNSUPPORTED, problem, param=name)
    if body.background:
        problem = "background: responses can't be fetched later: leave it out, or use stream"
        raise errors.request_error(errors.Code.UNSUPPORTED, problem, param="background")
    conversation.check_count("input", body.items)


def _to_wire(
    body: ResponsesBody,
    messages: list[wire.ChatMessage],
    tools: OfferedTools,
    wishes: ReasoningWishes,
    session: str | None,
    request_id: str,
) -> wire.GenerateRequest:
    wants_logprobs = bool(body.top_logprobs) or _WITH_LOGPROBS in (body.include or [])
    return wire.GenerateRequest(
        id=request_id,
        messages=messages,
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        response_format=body.format,
        tools=tools.functions or None,
        tool_choice=tools.choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning=wishes.options,
        chat_template_kwargs=wishes.template_arguments,
        **body.to_wire(session),
    )
