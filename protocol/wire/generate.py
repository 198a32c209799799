"""The messages that ask for a completion, or for the tokens of its prompt, and the structs inside them."""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from tokenbus.protocol.wire import errors
from tokenbus.protocol.wire.codec import Message
from tokenbus.protocol.wire.params import TIMEOUT_MS, CacheControl, GenerationParams
from tokenbus.protocol.wire.rate_limits import RateLimits


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One part of a chat message's content."""

    type: str
    """`text`; other types are refused as `unsupported`."""
    text: str | None = None
    """The part's text."""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One turn of a conversation, in the form of OpenAI's chat API."""

    role: str
    """`system`, `user`, `assistant`, or another role that the model's template knows."""
    content: str | list[ContentPart] | None = None
    """A string, or a list of text parts."""
    reasoning_content: str | None = None
    """The reasoning before an assistant's answer or calls, for models whose template reads it."""
    name: str | None = None
    """Passed to the template; in a result, the called function's name if absent."""
    tool_calls: list[dict[str, Any]] | None = None
    """The assistant's calls: `{id, type, function: {name, arguments}}`. `arguments` is the text of a JSON object, or
    the object itself; an id is made if absent."""
    tool_call_id: str | None = None
    """In a message with the role `tool`, the call whose result it is; if absent, the first call without a result."""


class ResumeFrom(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an earlier stream of the same request that the client already has."""

    token_ids: list[int]
    """Every sampled token that was received, fewer than `max_tokens`. The new stream begins after them."""
    hash_scheme: str | None = None
    """The `hash_scheme` of the earlier stream's head, by which ids of another vocabulary are recognized."""


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
    suffix: str | None = None
    """A text that follows the completion, which fills the gap between `prompt` and this. Only with `prompt`, and for
    models that have the feature `fim`."""
    token_ids: list[int] | bytes | None = None
    """A prompt that is already tokenized: a list, or packed as unsigned 32-bit little-endian integers, which is quicker
    to read. Packed ids are bytes in MessagePack and base64 in JSON; routers of earlier versions refuse them."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, at most 20,000 names, members and items, nested at most 64 levels deep."""
    timeout_ms: Annotated[float | None, TIMEOUT_MS] = None
    """Time from the router's receipt to the terminal; when it is over, the request ends in `deadline_exceeded`."""
    resume_from: ResumeFrom | None = None
    """Continues an earlier stream after the part that was received."""
    routing: RoutingOptions | None = None
    """Influences or explains the choice of a worker."""
    copy_of: str | None = None
    """The id of the first of several requests with the same prompt, each for another answer; the first names itself.
    The prompt counts with the first one, and the `usage` of at most 127 others has none of its tokens, if they come to
    the same worker, which the same `session_id` makes likely, after the first one's first token and within 60 s of its
    end, and without `cache_prompt: false`."""


class CacheRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Says how much longer a session's prefixes are worth keeping in workers' caches."""

    id: str | None = None
    """Like the id of a `generate` request."""
    session_id: str | None = None
    """The `session_id` of the tenant's requests. It must be given."""
    cache_control: CacheControl | None = None
    """The hint, which must be given. A `ttl_ms` of 0 ends the session: what only it has used is evicted first."""


class CacheReply(Message, frozen=True, kw_only=True):
    """Says that the hint was passed on, or why it was not. It does not say whether any worker knows the session."""

    id: str
    """The request's id."""
    model: str | UnsetType = UNSET
    """The model whose workers were told."""
    rate_limits: RateLimits | UnsetType = UNSET
    """The limits of the client and how much of them is left, if its key or its tenant has any."""
    error: errors.Error | UnsetType = UNSET
    """Why they were not told."""


class TokenizeRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for the prompt tokens of a `generate` request with the same prompt; exactly one of `messages` and
    `prompt` must be given."""

    id: str | None = None
    """Like the id of a `generate` request."""
    messages: list[ChatMessage] | None = None
    """A conversation, rendered with the model's chat template."""
    prompt: str | None = None
    """A text, in which names of special tokens are plain text."""
    tools: list[dict[str, Any]] | None = None
    """The tools of the request, which the template writes into the prompt."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    continue_final_message: bool | None = None
    """Whether the prompt ends in the middle of the last message, like that of a `generate` request. Routers of earlier
    versions ignore it: their replies lack `continues`. false if absent."""
    add_special_tokens: bool | None = None
    """Whether BOS is prepended if the model's prompts begin with it. true if absent."""
    only_count: bool | None = None
    """Leaves `token_ids` out of the reply. false if absent."""
    return_tokenizer: bool | None = None
    """Asks for `tokenizer` in the reply. false if absent."""
    timeout_ms: Annotated[float | None, TIMEOUT_MS] = None
    """Time from the router's receipt to its answer. 60,000 if absent."""


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The properties of a model's tokenizer, as its files have them."""

    vocab_size: int
    """The number of token ids."""
    bos_token: str | None = None
    """The text of the token with which texts begin."""
    eos_token: str | None = None
    """The text of the token with which texts end."""
    adds_bos: bool = False
    """Whether prompts begin with BOS."""
    chat_template: str | None = None
    """The chat template, in Jinja."""


class TokenizeReply(Message, frozen=True, kw_only=True):
    """The tokens of a prompt, or the error."""

    id: str
    """The request's id."""
    model: str | UnsetType = UNSET
    """The model whose tokens they are."""
    count: int | UnsetType = UNSET
    """The number of tokens."""
    token_ids: list[int] | UnsetType = UNSET
    """Their ids, unless only the count was asked for."""
    context_length: int | UnsetType = UNSET
    """The smallest context length of the model's workers, prompt and completion together. The prompt may be longer."""
    continues: bool | UnsetType = UNSET
    """true if the prompt ends in the middle of the last message, as `continue_final_message` asked."""
    tokenizer: TokenizerInfo | UnsetType = UNSET
    """The model's tokenizer, if asked for; absent if only workers can make the model's prompts."""
    error: errors.Error | UnsetType = UNSET
    """Why there are no tokens."""


class DetokenizeRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for the text of tokens."""

    id: str | None = None
    """Like the id of a `generate` request."""
    token_ids: list[int] | None = None
    """Ids of the model's vocabulary."""
    return_pieces: bool | None = None
    """Asks for `pieces` in the reply. false if absent."""
    timeout_ms: Annotated[float | None, TIMEOUT_MS] = None
    """Time from the router's receipt to its answer. 60,000 if absent."""


class TokenPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A token by itself."""

    text: str
    """Its text; bytes that do not form a whole character become U+FFFD."""
    bytes: list[int]
    """Its bytes."""


class DetokenizeReply(Message, frozen=True, kw_only=True):
    """The text of tokens, or the error."""

    id: str
    """The request's id."""
    model: str | UnsetType = UNSET
    """The model whose tokens they are."""
    text: str | UnsetType = UNSET
    """The text of these tokens in a completion: special tokens have none, and bytes that do not form a whole character
    become U+FFFD."""
    pieces: list[TokenPiece] | UnsetType = UNSET
    """Each of the tokens by itself, if asked for."""
    error: errors.Error | UnsetType = UNSET
    """Why there is no text."""
