"""Messages, and the number of tokens that one would have: the fields of a request, and its wire request."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from tokenbus.client.wire.wire_client import WireClient
from tokenbus.gateway.anthropic import schemas
from tokenbus.gateway.anthropic.encoding import MessageEncoder
from tokenbus.gateway.anthropic.turns import (
    AnthropicFieldNames,
    CacheBreakpoint,
    Content,
    InputMessage,
    Turn,
    cache_ttl_ms,
    to_turns,
)
from tokenbus.gateway.http import http_errors
from tokenbus.gateway.http.http_errors import NameOf
from tokenbus.gateway.serving import conversation
from tokenbus.gateway.serving.dialect import ApiEndpoint, ParsedCall, ParsedGeneration, RequestHead, UnservedField
from tokenbus.gateway.serving.seeds import wire_seed
from tokenbus.protocol.prompt import history
from tokenbus.protocol.wire import codec, errors, reasoning
from tokenbus.protocol.wire import messages as wire
from tokenbus.protocol.wire.checks import validation

_CLIENT_TOOL = (None, "custom")
"""Types of tools that the client describes and runs. All others are known only to Anthropic's models."""
_UNSERVED = {"mcp_servers": UnservedField("only tools that the client runs are served", (None, []))}
_IGNORED = {
    "metadata": "a name for abuse reports",
    "service_tier": "a choice among Anthropic's prices; priority decides the order here",
    "context_management": "clients can shorten long conversations themselves",
    "container": "tools that run in a container are left out",
    "inference_geo": "a choice among Anthropic's places",
    "speed": "a choice among Anthropic's prices",
    "thinking.display": "reasoning is always shown",
    "tools[].allowed_callers": "clients run all tools",
    "tools[].defer_loading": "the model knows all tools from the beginning",
    "tools[].eager_input_streaming": "arguments are sent as the model writes them",
    "tools[].input_examples": "chat templates have no place for them",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class AnthropicTool(msgspec.Struct, frozen=True, kw_only=True):
    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheBreakpoint | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Says whether the model reasons, and for how many tokens.

    Anthropic's limits on a budget, 1,024 and `max_tokens`, apply to its own models. Here it may be smaller, and one
    larger than `max_tokens` has no effect."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None


class MessagesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a message request. Unknown fields are ignored, as clients of many versions expect."""

    model: str | None = None
    messages: list[InputMessage] | None = None
    system: Content | None = None
    max_tokens: int | None = None
    cache_control: CacheBreakpoint | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    thinking: Thinking | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The former name of `output_config.format`."""
    seed: int | None = None
    """This field and those below are not Anthropic's; they have the same meaning as on the wire."""
    cache_salt: str | None = None
    session_id: str | None = None
    priority: int | None = None
    timeout_ms: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wanted_format(self) -> OutputFormat | None:
        config = self.output_config
        return config.format if config is not None and config.format is not None else self.output_format


class CountTokensRequest(MessagesRequest, frozen=True, kw_only=True):
    """The body: that of a message request, without the fields that only matter for an answer."""


def read(asked: MessagesRequest, head: RequestHead) -> ParsedGeneration:
    """Validates a body as a router would. Raises RequestError with Anthropic's name for the field at fault."""
    request, name_of = _to_wire(asked, head)
    if asked.max_tokens is None:
        raise errors.invalid_field("max_tokens", "is required")
    return ParsedGeneration(
        model=head.model,
        requests=(request,),
        encoder=MessageEncoder,
        stream=bool(asked.stream),
        name_of=name_of,
    )


def read_count(asked: CountTokensRequest, head: RequestHead) -> ParsedCall[wire.TokenizeRequest, wire.TokenizeReply]:
    """Validates a body like a message request's. Raises RequestError with Anthropic's name for the field at fault."""
    request, name_of = _to_wire(asked, head)
    return ParsedCall(
        model=head.model,
        request=conversation.prompt_of(request, only_count=True),
        send=WireClient.tokenize,
        encode=lambda reply: msgspec.json.encode(schemas.MessageTokensCount(input_tokens=reply.count or 0)),
        name_of=name_of,
    )


_FREE_FORM = codec.FREE_FORM | {"input", "schema"}
ENDPOINT = ApiEndpoint(
    path="/v1/messages",
    summary="A message",
    body=MessagesRequest,
    read=read,
    response=schemas.AnthropicMessage,
    required=("messages", "max_tokens"),
    unserved=_UNSERVED,
    ignored=_IGNORED,
    free_form=_FREE_FORM,
)
COUNT_TOKENS = ApiEndpoint(
    path="/v1/messages/count_tokens",
    summary="The number of tokens of a message's prompt",
    body=CountTokensRequest,
    read=read_count,
    response=schemas.MessageTokensCount,
    required=("messages",),
    unserved=_UNSERVED,
    ignored=_IGNORED,
    free_form=_FREE_FORM,
)


def _to_wire(asked: MessagesRequest, head: RequestHead) -> tuple[wire.GenerateRequest, NameOf]:
    """Returns the valid request that a body becomes (perhaps only to count its tokens), and the body's names for the
    request's fields."""
    _check_conversation(asked.messages)
    turns = to_turns(asked.system, asked.messages or [])
    tools = {number: _to_tool(tool) for number, tool in enumerate(asked.tools or []) if tool.type in _CLIENT_TOOL}
    request = _to_request(asked, turns, list(tools.values()), head)
    names = AnthropicFieldNames(turns, list(tools))
    with http_errors.renaming(names.of):
        validation.check_request(request)
        # Routers check past calls only when rendering them; here the blocks that they came from are known.
        history.message_dicts(request.messages or [])
    return request, names.of


def _check_conversation(given: Sequence[InputMessage] | None) -> None:
    if given is None:
        raise errors.invalid_field("messages", "is required")
    if not given:
        raise errors.invalid_field("messages", "at least one message is required")
    conversation.check_count("messages", given)


def _to_tool(tool: AnthropicTool) -> dict[str, Any]:
    fields = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def _to_choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None or choice.type != "tool":
        return None if choice is None else _CHOICES[choice.type]
    return {"type": "function", "function": {"name": choice.name}}


def _to_format(wanted: OutputFormat | None) -> wire.ResponseFormat | None:
    if wanted is None:
        return None
    return wire.ResponseFormat(type="json_schema", json_schema=wire.JsonSchema(schema=wanted.schema))


def _cache_control(asked: MessagesRequest) -> wire.CacheControl | None:
    """Returns the hint for the whole prompt, which is kept as long as its longest-kept part."""
    marks = [asked.cache_control, *(tool.cache_control for tool in asked.tools or [])]
    of_messages = cache_ttl_ms(asked.system, asked.messages or [])
    ttl_ms = max([of_messages, *(mark.ttl_ms for mark in marks if mark is not None)])
    return wire.CacheControl(ttl_ms=ttl_ms) if ttl_ms else None


def _to_reasoning(asked: MessagesRequest) -> wire.ReasoningOptions | None:
    """Returns how long the model may reason, as a hint: clients send budgets to all kinds of models."""
    effort = asked.output_config.effort if asked.output_config is not None else None
    budget = None
    if asked.thinking is not None and asked.thinking.type == "disabled":
        effort = "none"
    elif asked.thinking is not None:
        budget = asked.thinking.budget_tokens
    if effort is None and budget is None:
        return None
    return wire.ReasoningOptions(effort=effort, max_tokens=budget, optional=True if budget is not None else None)


def _template_arguments(asked: MessagesRequest, effort: str | None) -> dict[str, Any] | None:
    """Returns the chat template's variables. Without `thinking`, a model reasons if it does so by default."""
    given = asked.chat_template_kwargs
    if asked.thinking is not None and asked.thinking.type != "disabled":
        given = {"enable_thinking": True} | (given or {})
    return reasoning.template_arguments(effort, given)


def _to_request(
    asked: MessagesRequest, turns: Sequence[Turn], tools: list[dict[str, Any]], head: RequestHead
) -> wire.GenerateRequest:
    """Converts to a wire request, which is always streamed, so that a worker notices if this gateway dies."""
    choice, options = asked.tool_choice, _to_reasoning(asked)
    return wire.GenerateRequest(
        id=head.id,
        messages=[turn.message for turn in turns],
        continue_final_message=True if turns and turns[-1].message.role == "assistant" else None,
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        seed=wire_seed("seed", asked.seed),
        stop=asked.stop_sequences,
        response_format=_to_format(asked.wanted_format),
        tools=tools or None,
        tool_choice=_to_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        return_progress=True if asked.stream else None,
        cache_control=_cache_control(asked),
        cache_salt=asked.cache_salt,
        session_id=asked.session_id or head.session,
        priority=asked.priority,
        timeout_ms=asked.timeout_ms,
        reasoning=options,
        chat_template_kwargs=_template_arguments(asked, None if options is None else options.effort),
    )
