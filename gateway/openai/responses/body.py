"""The body of a request for a response, in OpenAI's names."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from tokenbus.gateway.openai.conversation_fields import ConversationFields
from tokenbus.gateway.openai.fields import WireFields
from tokenbus.protocol.wire import errors
from tokenbus.protocol.wire import messages as wire


class InputContentPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a message, of a reasoning item or of a tool's output."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An item of the conversation. Its fields depend on its type."""

    type: str | None = None
    """Optional in a message."""
    id: str | None = None
    status: str | None = None
    role: str | None = None
    content: str | list[InputContentPart] | None = None
    encrypted_content: str | None = None
    """In reasoning items."""
    summary: list[InputContentPart] | None = None
    """In reasoning items; read if there is no other text in them."""
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    """In function calls."""
    input: str | None = None
    """In custom tool calls."""
    output: str | list[InputContentPart] | None = None
    tools: list[dict[str, Any]] | None = None
    """In items that offer more tools."""


class PlacedItem(NamedTuple):
    """An item of the conversation, and the field of the request that it comes from."""

    item: InputItem
    path: str


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Constrains the answer's text to JSON; `text` leaves it free."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesBody(ConversationFields, frozen=True, kw_only=True):
    """The body of a request. Unknown fields are ignored, as OpenAI's clients expect."""

    input: str | list[InputItem] | None = None
    """Empty if left out: OpenAI's clients require no field at all."""
    instructions: str | None = None
    max_output_tokens: int | None = None
    include: list[str] | None = None
    text: TextConfig | None = None
    metadata: dict[str, str] | None = None
    """Returned unchanged."""
    store: bool | None = None
    """Whether the response may be referred to later; true by default, as in OpenAI's API."""
    previous_response_id: str | None = None
    max_tool_calls: int | None = None
    """Returned unchanged, as the next two: it limits tools that a server runs, and there are none."""
    user: str | None = None
    safety_identifier: str | None = None

    def to_wire(self, session: str | None) -> WireFields:
        fields, names = super().to_wire(session)
        for field, name, given in (
            ("max_tokens", "max_output_tokens", self.max_output_tokens),
            ("response_format", "text.format", self.format),
        ):
            if given is None:
                continue
            if fields[field] not in (None, given):
                raise errors.invalid_field(names[field], f"is another name of {name}: give one of them")
            fields[field] = given
        return WireFields(fields, names)

    @property
    def items(self) -> list[InputItem]:
        """The input as items."""
        return self.input if isinstance(self.input, list) else [InputItem(role="user", content=self.input or "")]

    @property
    def placed(self) -> list[PlacedItem]:
        """The items with their paths in the request."""
        is_list = isinstance(self.input, list)
        return [PlacedItem(item, f"input[{index}]" if is_list else "input") for index, item in enumerate(self.items)]

    def offered(self, conversation: Sequence[PlacedItem]) -> list[tuple[str, dict[str, Any]]]:
        """Returns all tools, including those in the conversation, each with its path in the request."""
        places = [("tools", self.tools or [])]
        places += [(f"{path}.tools", item.tools or []) for item, path in conversation]
        return [(f"{place}[{index}]", tool) for place, tools in places for index, tool in enumerate(tools)]

    @property
    def format(self) -> wire.ResponseFormat | None:
        """The format of the answer's text, in the wire's form."""
        wanted = None if self.text is None else self.text.format
        if wanted is None:
            return None
        schema = None
        if wanted.type == "json_schema":
            schema = wire.JsonSchema(schema=wanted.schema, strict=wanted.strict)
        return wire.ResponseFormat(type=wanted.type, json_schema=schema)
