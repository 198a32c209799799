"""The internal messages between routers and workers, always in MessagePack."""

from typing import Annotated, Any, Literal

import msgspec

from tokenbus.protocol.wire import codec, errors, limits
from tokenbus.protocol.wire import messages as public
from tokenbus.protocol.wire.params import COUNT, DURATION_MS, REMAINING_MS, GenerationParams, Range


class RunResume(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The part of a completion that was sampled before this run, which continues it."""

    token_ids: bytes
    """The sampled tokens, as unsigned 32-bit little-endian integers."""
    logprobs: bytes = b""
    """Their log probabilities, if the request asks for them, in a form that only workers read. Those of tokens that a
    client gave are unknown and left out."""
    cached_tokens: Annotated[int, COUNT] = 0
    """Prompt tokens that the first worker had cached, for `usage`."""
    queue_ms: Annotated[float, DURATION_MS] = 0.0
    """Time from the first accept to the first step, for `timings`."""
    prefill_ms: Annotated[float, DURATION_MS] = 0.0
    """Time from the first step to the first token, for `timings`."""
    elapsed_ms: Annotated[float, DURATION_MS] = 0.0
    """Time since the first accept, for `timings`."""


class Run(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """A request that a router has placed on a worker."""

    request_id: str
    """`<tenant token>:<id>`."""
    attempt: Annotated[int, COUNT]
    """Raised by one at every dispatch of the request."""
    epoch: str
    """The epoch of the worker for which the run is meant; in any other epoch the worker refuses it."""
    router_id: str
    """The router that sends it."""
    reply: str
    """The client's reply subject, to which chunks are published."""
    encoding: codec.Encoding
    """Encoding of the chunks: `json` or `msgpack`."""
    token_ids: bytes
    """Unsigned 32-bit little-endian integers."""
    params: GenerationParams
    """The generation parameters of the request."""
    is_chat: bool = False
    """Whether the prompt is a conversation that was rendered with the chat template, so that its answer may have
    reasoning and tool calls."""
    remaining_ms: Annotated[float | None, REMAINING_MS] = None
    """Time left of the request's `timeout_ms`."""
    age_ms: Annotated[float | None, REMAINING_MS] = None
    """Time since the router received the request; a cancel that arrived earlier was not meant for it."""
    crashes: int = 0
    """Engines that have died in a step with this request in it."""
    resume_from: RunResume | None = None
    """The completion so far, if the run continues a stream."""
    routing: public.RoutingReport | None = None
    """The routing report for the terminal, if the client asked for it."""
    routing_options: public.RoutingOptions | None = None
    """The client's wishes for the choice of a worker, for a router that places the request again."""


class RunReply(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's answer to a run."""

    accepted: bool
    """Whether the worker takes the run; if so, it owns the terminal from now on."""
    error: errors.Error | None = None
    """Why the run was refused."""
    same_reply: bool = False
    """The id is in flight in a stream to the very same reply subject: publish nothing there."""
    cancelled: bool = False
    """The run was refused because its cancel arrived first."""


class Control(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """A command from a router or an operator to a worker."""

    op: Literal["drop", "drain", "clear_cache", "load", "unload"]
    """The command."""
    request_id: str | None = None
    """The request to `drop`."""
    attempt: Annotated[int | None, COUNT] = None
    """The attempt to `drop`, together with all earlier ones."""
    moved: bool = False
    """Whether another worker continues the request to `drop`, so that it ends here even if it has sent a token."""
    model: str | None = None
    """The model to `load`: a file, a directory or a name on the Hub, as seen from the worker."""
    served_name: str | None = None
    """The name under which to serve the model to `load`; the file's name if absent."""
    replicas: int = 1
    """Replicas of the model to `load`."""
    settings: dict[str, Any] = {}
    """Engine settings of the model to `load`, by name, where they differ from the worker's own."""


class ControlReply(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's answer to a command."""

    ok: bool
    """Whether the command was carried out. An attempt that has sent a token or has ended refuses a `drop` that does
    not say `moved`."""
    error: errors.Error | None = None
    """Why the command was not carried out."""
    progress: float | None = None
    """The share of a `load` that is done, 0 to 1. More replies follow until it is 1 or `ok` is false."""
    worker_ids: list[str] = []
    """The new replicas, once a `load` is done."""
    epoch: str | None = None
    """The epoch in which a `drop` was carried out; a later epoch knows nothing of what an earlier one has published."""


class Take(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks a leaving worker to give up a stream, so that another worker can continue it."""

    request_id: str
    """`<tenant token>:<id>`."""
    attempt: Annotated[int, COUNT]
    """The attempt that runs there."""
    known_tokens: Annotated[int, COUNT] = 0
    """The number of its sampled tokens that the router knows."""
    router_id: str = ""
    """The router that asks. If the stream has another guardian, the worker refuses."""


class TakeReply(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's answer to `take`. It follows the last chunk of the stream, and is the same if that router asks
    again."""

    ok: bool
    """Whether the worker has given up the stream. If not, it is not leaving, does not have the stream, has already
    ended it, can't fit the reply in a message, or knows another router as the guardian."""
    epoch: str
    """The worker's epoch."""
    num_tokens: int = 0
    """The number of the stream's sampled tokens."""
    token_ids: bytes = b""
    """Those of its tokens that the router does not know, as unsigned 32-bit little-endian integers."""
    logprobs: bytes = b""
    """The log probabilities of `token_ids`, if the request asks for them, in a form that only workers read."""
    first_token: "FirstToken | None" = None
    """Its first token's cached prompt tokens and times, once it has a token."""


class Guard(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks a router to become the guardian of a request. A worker asks this for a stream whose guardian is gone, and a
    router that stops asks it for a request that no worker has."""

    run: Run
    """The request, with the completion so far. `router_id` names the previous guardian. If no worker has the request,
    `epoch` is empty and `attempt` is the last one."""
    stream_no: int | None = None
    """Number of the stream, if a worker has it."""
    hash_scheme: str = ""
    """The hash scheme of the worker that accepted it first; empty if none has."""


class GuardReply(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """A router's answer to `guard`."""

    request_id: str
    """`<tenant token>:<id>`."""
    attempt: Annotated[int, COUNT]
    """The attempt that it was asked about."""
    accepted: bool
    """Whether the router is the request's guardian from now on."""
    router_id: str
    """The router that answers."""


class GuardCheck(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks a router whether it is still the guardian of a worker's streams. It answers only if it is not."""

    request_ids: list[str]
    """The keys of the streams whose guardian it is, as far as the worker knows."""


class Unguarded(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """A router's answer to a check."""

    router_id: str
    """The router that answers."""
    request_ids: list[str]
    """Those of the requests that it does not know."""


class Tokenize(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks a worker for the token ids of a text or of a conversation."""

    text: str | None = None
    """A text, in which names of special tokens are plain text."""
    messages: list[public.ChatMessage] | None = None
    """A conversation, to be rendered with the model's chat template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the template."""
    tools: list[dict[str, Any]] | None = None
    """The tools of the request, for the template."""


class TokenizeReply(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """The token ids, or the error."""

    token_ids: bytes | None = None
    """Unsigned 32-bit little-endian integers."""
    error: errors.Error | None = None
    """Why there are no token ids."""


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


class EmbedResult(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """The embeddings, or the error."""

    vectors: bytes = b""
    """One row for each input, as 32-bit little-endian floats."""
    prompt_tokens: int = 0
    """Tokens of all inputs."""
    error: errors.Error | None = None


class Rerank(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks a worker for the scores of documents. Asking again, or asking another worker, gives the same answer."""

    query: str
    documents: list[str]
    remaining_ms: Annotated[float, REMAINING_MS]
    """Time left of the request's `timeout_ms`."""


class RerankResult(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """The scores, or the error."""

    scores: bytes = b""
    """One for each document in their order, as 32-bit little-endian floats."""
    prompt_tokens: int = 0
    """Tokens of all documents, each with the query."""
    error: errors.Error | None = None


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


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """Announces a request that the worker has accepted."""

    id: str
    """`<tenant token>:<id>`."""
    stream_no: int
    """Number of the stream, unique in this epoch, by which entries name it."""
    attempt: int
    """The attempt that was accepted."""
    prompt_tokens: int
    """Tokens of the prompt."""
    router_id: str = ""
    """The router that has placed it and is its guardian."""


class FirstToken(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tells how long a stream took to reach its first token, and what else its first worker decides."""

    stream_no: int
    """Number of the stream."""
    cached_tokens: int
    """Prompt tokens that were cached."""
    queue_ms: float
    """Time from the accept to the first step."""
    prefill_ms: float
    """Time from the first step to the first token."""
    max_tokens: int | None = None
    """Tokens that the stream may have: what its request asks for, or less if the worker's limits allow less."""


class BlockRun(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive blocks of one hash chain."""

    parent: int
    """Hash of the block before the first one."""
    hashes: list[int]
    """Hashes of the blocks, in their order."""


class Events(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of a worker's numbered event log. An empty one is a heartbeat."""

    worker_id: str
    """The worker whose log it is."""
    epoch: str
    """The worker's epoch."""
    seq: int
    """Number of the entry, from 0 in each epoch, without gaps."""
    load: public.Load
    """Load after this event."""
    state: public.WorkerState
    """State after this event."""
    cleared: bool = False
    """Whether all earlier blocks are gone, because a new engine has started."""
    removed: list[int] = []
    """Hashes of blocks that are gone."""
    stored: list[BlockRun] = []
    """Blocks that are new."""
    started: list[Started] = []
    """Requests that the worker has accepted."""
    stream_nos: bytes = b""
    """The stream of each of `token_ids`, as unsigned 32-bit little-endian integers."""
    token_ids: bytes = b""
    """Sampled tokens that clients are about to get, in the order of sampling; unsigned 32-bit little-endian."""
    logprobs: dict[int, bytes] = {}
    """Log probabilities of these tokens by stream number, for requests that ask for them. Only workers read them."""
    first_tokens: list[FirstToken] = []
    """Streams whose first token is among `token_ids`."""
    finished: list[str] = []
    """Keys of requests that have ended, sent after their terminal."""
    taken: list[str] = []
    """Keys of requests that a router has taken from here, to continue them elsewhere."""
    guardians: dict[int, str] = {}
    """The new guardians of streams, by stream number; only the router that was named last acts on a stream."""


class Seal(public.Message, frozen=True, kw_only=True):
    """Says that the chunks with the tokens of an entry have reached the broker."""

    epoch: str
    """The worker's epoch."""
    seq: int
    """Number of the entry."""


class SnapshotRequest(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks what a worker holds. An empty message asks for no tokens."""

    known_tokens: dict[str, int] = {}
    """Requests whose sampled tokens are wanted, each with the number of tokens that are known."""
    wants_others: bool = False
    """Whether the tokens of all other requests are wanted too: all that their present attempt has sampled."""


class RunningRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request in a worker's snapshot."""

    id: str
    """`<tenant token>:<id>`."""
    attempt: int
    """The attempt that is running."""
    stream_no: int
    """Number of the stream."""
    num_tokens: int = 0
    """The number of its sampled tokens."""
    token_ids: bytes = b""
    """Those of its tokens that are not known yet, if they are wanted, as unsigned 32-bit little-endian integers."""
    logprobs: bytes = b""
    """The log probabilities of `token_ids`, if the request asks for them, in a form that only workers read."""
    first_token: FirstToken | None = None
    """The account of its first token, once it has one that this worker has sampled."""
    router_id: str = ""
    """Its guardian."""


class SnapshotPart(public.Message, frozen=True, kw_only=True):
    """One part of a snapshot: everything that a worker held after event `seq`."""

    worker_id: str
    """The worker that answers."""
    epoch: str
    """The worker's epoch."""
    seq: int
    """The last event before the snapshot."""
    part: int
    """Number of this part, from 0."""
    parts: int
    """Number of all parts."""
    runs: list[BlockRun]
    """Blocks that the worker holds."""
    running: list[RunningRequest]
    """Requests that the worker holds."""
    load: public.Load
    """Load of the worker."""
