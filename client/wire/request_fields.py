"""The keyword arguments of requests, as editors and type checkers see them. docs/wire.md says what each field means.

Each class has the fields of one wire message. A value may also be None, which is the same as leaving it out."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Required, TypedDict

from tokenbus.protocol.wire import messages

JsonObject = Mapping[str, Any]
"""A value that is passed on as it is."""


class ContentPartFields(TypedDict, total=False):
    type: Required[str]
    text: str | None


class ChatMessageFields(TypedDict, total=False):
    role: Required[str]
    content: str | Sequence[ContentPartFields] | None
    reasoning_content: str | None
    name: str | None
    tool_calls: Sequence[JsonObject] | None
    tool_call_id: str | None


Conversation = Sequence[ChatMessageFields | messages.ChatMessage | JsonObject]
"""Turns as dictionaries, `{"role": "user", "content": "..."}`. Other keys, as other APIs have, are ignored."""


class ResumeFields(TypedDict, total=False):
    token_ids: Required[Sequence[int]]
    hash_scheme: str | None


class RoutingFields(TypedDict, total=False):
    worker_id: str | None
    policy: str | None
    explain: bool | None


class ReasoningFields(TypedDict, total=False):
    max_tokens: int | None
    effort: str | None
    optional: bool | None


class JsonSchemaFields(TypedDict, total=False):
    schema: JsonObject | None
    name: str | None
    strict: bool | None
    description: str | None


class ResponseFormatFields(TypedDict, total=False):
    type: Required[Literal["text", "json_object", "json_schema"]]
    json_schema: JsonSchemaFields | None


class CacheControlFields(TypedDict, total=False):
    ttl_ms: float


class LoraFields(TypedDict, total=False):
    name: Required[str]
    scale: float


class GenerateFields(TypedDict, total=False):
    """The keyword arguments of `generate`."""

    messages: Conversation | None
    prompt: str | None
    suffix: str | None
    token_ids: Sequence[int] | bytes | None
    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    repetition_penalty: float | None
    repetition_last_n: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[str | int, float] | Mapping[int, float] | Mapping[str, float] | None
    logprobs: int | None
    prompt_logprobs: int | None
    prompt_logprobs_from: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    stream: bool | None
    tools: Sequence[JsonObject] | None
    tool_choice: str | JsonObject | None
    parallel_tool_calls: bool | None
    chat_template_kwargs: JsonObject | None
    reasoning: ReasoningFields | None
    continue_final_message: bool | None
    parse_output: bool | None
    response_format: ResponseFormatFields | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    lora: Sequence[LoraFields] | None
    return_token_ids: bool | None
    return_sampling: bool | None
    return_progress: bool | None
    cache_prompt: bool | None
    cache_salt: str | None
    cache_control: CacheControlFields | None
    session_id: str | None
    priority: int | None
    timeout_ms: float | None
    id: str | None
    resume_from: ResumeFields | None
    copy_of: str | None
    routing: RoutingFields | None


class EmbedFields(TypedDict, total=False):
    """The keyword arguments of `embed`."""

    input: Required[str | Sequence[str | Sequence[int]]]
    dimensions: int | None
    normalize: bool | None
    timeout_ms: float | None
    id: str | None


class RerankFields(TypedDict, total=False):
    """The keyword arguments of `rerank`."""

    query: Required[str]
    documents: Required[Sequence[str]]
    top_n: int | None
    timeout_ms: float | None
    id: str | None


class TokenizeFields(TypedDict, total=False):
    """The keyword arguments of `tokenize`."""

    messages: Conversation | None
    prompt: str | None
    tools: Sequence[JsonObject] | None
    chat_template_kwargs: JsonObject | None
    continue_final_message: bool | None
    add_special_tokens: bool | None
    only_count: bool | None
    return_tokenizer: bool | None
    timeout_ms: float | None
    id: str | None


class DetokenizeFields(TypedDict, total=False):
    """The keyword arguments of `detokenize`."""

    token_ids: Required[Sequence[int]]
    timeout_ms: float | None
    id: str | None
