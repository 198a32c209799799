"""Calls with one reply: embeddings, ranked documents, token ids, tokenizers, and KV blocks for another worker."""

from typing import Annotated, Any

from tokenbus.protocol.wire import codec, errors, limits
from tokenbus.protocol.wire import messages as public
from tokenbus.protocol.wire.internal.runs import RunAdapter
from tokenbus.protocol.wire.params import COUNT, PRIORITY, REMAINING_MS, Range


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
    continue_final_message: bool = False
    """Whether the prompt ends in the middle of the last message, which the answer continues."""
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
    return_pieces: bool = False
    """Whether the bytes of each token are wanted too."""


class DetokenizeResult(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """The text, or the error."""

    text: str = ""
    """The text of these tokens in a completion."""
    pieces: list[bytes] = []
    """The bytes of each token, if they are wanted."""
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


class ListingRequest(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks a router for its part of a listing."""

    asked: public.ModelsRequest
    """The client's request."""
    tenant: str
    """The client's tenant."""
    encoding: codec.Encoding
    """The encoding in which the client is answered; the router's answer is MessagePack."""
    max_bytes: int
    """The most bytes of the answer in that encoding."""


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


class BlockLeaseRequest(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks a worker for the KV blocks of a prompt."""

    identity: str
    """`kv_identity` of the worker that asks; a worker with a different one has nothing to give."""
    epoch: str
    """The epoch of the worker that is asked; in any other it has nothing to give."""
    tenant: str
    """The tenant's name as a subject token. Blocks of one tenant are given for requests of that tenant only."""
    cache_salt: str = ""
    """`cache_salt` of the request."""
    adapters: list[RunAdapter] = []
    """The adapters of the run, in the order of their digests: other adapters or scales have other blocks."""
    token_ids: bytes
    """The tokens of the blocks, from the beginning of the prompt, as unsigned 32-bit little-endian integers."""
    first: Annotated[int, COUNT] = 0
    """Number of the first block that is wanted."""
    computed_for: str = ""
    """`<tenant token>:<id>` of a request for which the worker is to compute the blocks that it lacks; if empty, it
    gives only what it has."""
    priority: Annotated[int, PRIORITY] = 0
    """`priority` of that request."""


class BlockLease(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's answer: how many blocks it can give. It gives them until the lease has not been used for 10 s."""

    lease: str = ""
    """Names the lease; empty if there is none."""
    num_blocks: Annotated[int, COUNT] = 0
    """Blocks that it has or computes, from `first` on and without a gap."""
    busy: bool = False
    """Whether there is no lease because the worker is already giving blocks to others."""


class BlockRead(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for a part of a block."""

    lease: str
    """The lease."""
    block: Annotated[int, COUNT] = 0
    """Number of the block in the prompt."""
    offset: Annotated[int, COUNT] = 0
    """Bytes of the block before this part."""
    num_bytes: Annotated[int, Range(0, limits.UPLOAD_PART_BYTES)] = 0
    """Bytes of the part; 0 ends the lease, and is not answered."""


class BlockPart(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a block; empty if the block or the lease is gone, or the block is not there yet."""

    data: bytes = b""
    """The bytes."""
    checksum: int = 0
    """xxh3_64 of the whole block."""
    later: bool = False
    """Whether the block is still to come: ask again."""
