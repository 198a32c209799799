"""The message that asks for a completion, and what it is made of."""

from typing import Any, Literal

import msgspec

from tokenbus.protocol.wire.message import Message


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a chat message's content; `type` must be `text`."""

    type: str
    """`text`; other kinds are refused as `unsupported`."""
    text: str | None = None
    """The part's text."""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One turn of a conversation, as in OpenAI's chat."""

    role: str
    """`system`, `user`, `assistant`, or whatever the model's template knows."""
    content: str | list[ContentPart] | None = None
    """A text, or a list of text parts."""
    name: str | None = None
    """Passed to the template."""
    tool_calls: list[dict[str, Any]] | None = None
    """Passed to the template."""
    tool_call_id: str | None = None
    """Passed to the template."""


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for constrained output; `text` asks for nothing."""

    type: Literal["text", "json_object", "json_schema"]
    """`text`, `json_object` or `json_schema`."""
    json_schema: dict[str, Any] | None = None
    """With `json_schema`: the schema."""


class Lora(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An adapter loaded on the model, and how strongly it acts."""

    name: str
    """Name under which the adapter was loaded."""
    scale: float = 1.0
    """Factor on its weights."""


class ResumeFrom(msgspec.Struct, frozen=True, kw_only=True):
    """What a client already holds of a completion: its sampled tokens and how many bytes of its text."""

    token_ids: list[int]
    """Every sampled token received."""
    text_offset: int
    """UTF-8 bytes of text held."""


class RoutingOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Pins a request to a worker, overrides the policy by name, or asks why a worker was chosen."""

    worker_id: str | None = None
    """Only this worker."""
    policy: str | None = None
    """Name of a policy: `least_loaded`, `round_robin`."""
    explain: bool | None = None
    """Ask for `routing` in the terminal."""


class GenerateRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for a completion; exactly one of `messages`, `prompt` and `token_ids`."""

    id: str | None = None
    """1 to 128 of `A-Za-z0-9_-`, unique in its tenant while in flight; made by the router where absent."""
    messages: list[ChatMessage] | None = None
    """A conversation, rendered with the model's chat template; at most 4,096 turns."""
    prompt: str | None = None
    """A text, used as it is; nothing in it is a special token."""
    token_ids: list[int] | None = None
    """A prompt that is tokenized already, used as it is."""
    max_tokens: int | None = None
    """At least 1. Absent: the model's own, else what the context leaves, at most the worker's `--max-new-tokens`."""
    min_tokens: int | None = None
    """No stop before so many; 0 where absent."""
    temperature: float | None = None
    """0 to 100; 0 is greedy. Absent: the model's, else 0.7."""
    top_p: float | None = None
    """Above 0, up to 1. Absent: the model's, else 0.9."""
    top_k: int | None = None
    """From 0, which is off. Absent: the model's, else 40."""
    min_p: float | None = None
    """0 to 1. Absent: the model's, else 0."""
    repetition_penalty: float | None = None
    """0.01 to 10; 1 changes nothing."""
    repetition_last_n: int | None = None
    """Tokens that the penalties look back; 64 where absent."""
    presence_penalty: float | None = None
    """-2 to 2; 0 changes nothing."""
    frequency_penalty: float | None = None
    """-2 to 2; 0 changes nothing."""
    seed: int | None = None
    """0 to 4,294,967,295; repeats the same answer for the same request alone on the same build."""
    stop: str | list[str] | None = None
    """Texts that end the completion and are not part of it: one or up to 16, each of 1 to 1,024 bytes."""
    stop_token_ids: list[int] | None = None
    """Beside the model's own end tokens; at most 128."""
    ignore_eos: bool | None = None
    """Go on behind the model's end tokens."""
    logit_bias: dict[str | int, float] | None = None
    """By token id, as a decimal text or in MessagePack also as a number."""
    logprobs: int | None = None
    """0 to 20 alternatives for each token."""
    response_format: ResponseFormat | None = None
    """Constrained output."""
    grammar: str | None = None
    """Constrained output, as a GBNF text."""
    tools: list[dict[str, Any]] | None = None
    """As in OpenAI's chat."""
    tool_choice: str | dict[str, Any] | None = None
    """As in OpenAI's chat."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template; nested at most 64 deep."""
    lora: list[Lora] | None = None
    """Adapters that are loaded on the model."""
    cache_prompt: bool | None = None
    """Whether this prompt's KV may be reused and kept; true where absent."""
    cache_salt: str | None = None
    """Keeps a cache apart within the tenant; at most 256 bytes."""
    session_id: str | None = None
    """A hint that keeps a conversation together; at most 256 bytes."""
    priority: int | None = None
    """-1,000 to 1,000; lower is sooner, 0 where absent."""
    timeout_ms: float | None = None
    """Above 0: time from the router's receipt to the terminal; then it ends in `deadline_exceeded`."""
    stream: bool | None = None
    """false: the terminal is the only message and holds the whole text. true where absent."""
    resume_from: ResumeFrom | None = None
    """Goes on behind what was received of an earlier stream."""
    return_token_ids: bool | None = None
    """Asks for `token_ids` in every chunk."""
    return_progress: bool | None = None
    """Asks for `progress` while the prompt is computed."""
    routing: RoutingOptions | None = None
    """Wishes about the worker."""
