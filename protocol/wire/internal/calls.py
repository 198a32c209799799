"""The calls that a worker answers at once, outside any stream."""

from typing import Annotated, Any

from tokenbus.protocol.wire import errors, limits
from tokenbus.protocol.wire import messages as public
from tokenbus.protocol.wire.params import COUNT, REMAINING_MS, Range


class Tokenize(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks a worker for the token ids of a text or of a conversation."""

    text: str | None = None
    """A text, in which names of special tokens are plain text."""
    suffix: str | None = None
    """A text that follows the completion of `text`."""
    messages: list[public.ChatMessage] | None = None
    """A conversation, to be rendered with the model's chat template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the template."""
    tools: list[dict[str, Any]] | None = None
    """The tools of the request, for the template."""
    add_special_tokens: bool = True
    """Whether BOS is prepended if the model's prompts begin with it."""
    max_tokens: Annotated[int | None, COUNT] = None
    """The maximum number of tokens: a text that certainly has more is refused as `prompt_too_long`."""


class TokenizeResult(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """The token ids, or the error."""

    token_ids: bytes | None = None
    """Unsigned 32-bit little-endian integers."""
    error: errors.Error | None = None
    """Why there are no token ids."""


class Detokenize(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks a worker for the text of tokens."""

    token_ids: bytes
    """Unsigned 32-bit little-endian integers."""


class DetokenizeResult(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """The text, or the error."""

    text: str = ""
    """The text of these tokens in a completion."""
    error: errors.Error | None = None
    """Why there is no text."""


class Embed(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks a worker for embeddings. Asking again, or asking another worker, gives the same answer."""

    inputs: list[str | list[int]]
    """Strings or lists of token ids."""
    dimensions: Annotated[int | None, Range(1, limits.MAX_TOKENS)] = None
    """Length of the vectors; the model's own if absent."""
    normalize: bool = True
    """Whether the vectors are scaled to unit length."""
    remaining_ms: Annotated[float, REMAINING_MS]
    """Time left of the request's `timeout_ms`."""
    call_id: str | None = None
    """Names this message, so that an `abort` can take it back."""
    tenant: str = ""
    """The tenant whose request it is: tenants take turns in a worker. Requests without one count as of one tenant."""


class EmbedResult(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """The embeddings, or the error."""

    vectors: bytes = b""
    """One row for each input, as 32-bit little-endian floats."""
    prompt_tokens: int = 0
    """Tokens of all inputs."""
    error: errors.Error | None = None
    """Why there are no embeddings."""


class Rerank(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks a worker for the scores of documents. Asking again, or asking another worker, gives the same answer."""

    query: str
    """The query."""
    documents: list[str]
    """The documents."""
    remaining_ms: Annotated[float, REMAINING_MS]
    """Time left of the request's `timeout_ms`."""
    call_id: str | None = None
    """Names this message, so that an `abort` can take it back."""
    tenant: str = ""
    """The tenant whose request it is: tenants take turns in a worker. Requests without one count as of one tenant."""


class RerankResult(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """The scores, or the error."""

    scores: bytes = b""
    """One for each document in their order, as 32-bit little-endian floats."""
    prompt_tokens: int = 0
    """Tokens of all documents, each with the query."""
    error: errors.Error | None = None
    """Why there are no scores."""


class AbortCall(public.Message, frozen=True, kw_only=True):
    """Takes back an `embed` or a `rerank`: the worker computes no more of its inputs, and does not reply to it."""

    call_id: str


class TokenizerPart(public.Message, frozen=True, kw_only=True):
    """One part of a worker's tokenizer bundle."""

    digest: str
    """Digest of the whole bundle, the one in the card."""
    part: int
    """Number of this part, from 0."""
    parts: int
    """Number of all parts."""
    data: bytes
    """This part of the bundle."""
