"""The message that asks for a completion, and the structs inside it."""

from typing import Annotated, Any

import msgspec

from tokenbus.protocol.wire.codec import Message
from tokenbus.protocol.wire.params import TIMEOUT_MS, GenerationParams


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One part of a chat message's content."""

    type: str
    """`text`; other types are refused as `unsupported`."""
    text: str | None = None
    """The part's text."""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One turn of a conversation, in the form of OpenAI's chat API."""

    role: str
    """`system`, `user`, `assistant`, or whatever the model's template knows."""
    content: str | list[ContentPart] | None = None
    """A string, or a list of text parts."""
    reasoning_content: str | None = None
    """The reasoning before an assistant's answer or calls; models that want to see it again get it."""
    name: str | None = None
    """Passed to the template; in a result, the called function's name if absent."""
    tool_calls: list[dict[str, Any]] | None = None
    """The assistant's calls: `{id, type, function: {name, arguments}}`. `arguments` is the text of a JSON object, or
    the object itself; an id is made if absent."""
    tool_call_id: str | None = None
    """In a message with the role `tool`, the call whose result it is; the first without a result if absent."""


class Lora(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A LoRA adapter that is loaded on the model, and how strongly it acts."""

    name: str
    """Name under which the adapter was loaded."""
    scale: float = 1.0
    """Factor by which its weights are multiplied."""


class ResumeFrom(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an earlier stream of the same request that the client already has."""

    token_ids: list[int]
    """Every sampled token that was received, fewer than `max_tokens`. The new stream begins behind them."""
    hash_scheme: str | None = None
    """The `hash_scheme` of the earlier stream's head, without which ids of another vocabulary could not be told."""


class RoutingOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Pins a request to a worker, overrides the policy, or asks why a worker was chosen."""

    worker_id: str | None = None
    """The only worker that may get the request."""
    policy: str | None = None
    """Name of a policy: `kv`, `least_loaded`, `round_robin`, `random`, or one that the router has installed."""
    explain: bool | None = None
    """Asks for `routing` in the terminal."""


class GenerateRequest(Message, GenerationParams, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for a completion; exactly one of `messages`, `prompt` and `token_ids` must be given."""

    id: str | None = None
    """1 to 128 of `A-Za-z0-9_-`, unique among the tenant's requests in flight. The router makes one if absent."""
    messages: list[ChatMessage] | None = None
    """A conversation of at most 4,096 turns, rendered with the model's chat template."""
    prompt: str | None = None
    """A text that is tokenized as it is: names of special tokens in it are plain text."""
    token_ids: list[int] | None = None
    """A prompt that is already tokenized."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, nested at most 64 levels deep."""
    lora: list[Lora] | None = None
    """Adapters to use; they must be loaded on the model."""
    timeout_ms: Annotated[float | None, TIMEOUT_MS] = None
    """Time from the router's receipt to the terminal; when it is over, the request ends in `deadline_exceeded`."""
    resume_from: ResumeFrom | None = None
    """Continues an earlier stream after the part that was received."""
    routing: RoutingOptions | None = None
    """Influences or explains the choice of a worker."""
