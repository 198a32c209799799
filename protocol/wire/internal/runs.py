"""The messages that carry requests to workers, and on to other workers and routers."""

from typing import Annotated, Any, Literal

import msgspec

from tokenbus.protocol.wire import codec, errors, limits
from tokenbus.protocol.wire import messages as public
from tokenbus.protocol.wire.internal.event_log import FirstToken, StreamState
from tokenbus.protocol.wire.params import COUNT, DURATION_MS, REMAINING_MS, SECONDS, GenerationParams, Range


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

    @classmethod
    def of(
        cls, token_ids: bytes, logprobs: bytes, first: "FirstToken | RunResume | None", elapsed_ms: float
    ) -> "RunResume | None":
        """Returns a completion with the numbers of its first token, or of the run that began with them; None if it has
        no token."""
        if not token_ids:
            return None
        return cls(
            token_ids=token_ids,
            logprobs=logprobs,
            cached_tokens=first.cached_tokens if first else 0,
            queue_ms=first.queue_ms if first else 0.0,
            prefill_ms=first.prefill_ms if first else 0.0,
            elapsed_ms=elapsed_ms,
        )


class RunAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that a run is to be computed with."""

    digest: str
    """Digest of its file."""
    scale: Annotated[float, Range(0, limits.MAX_ADAPTERS * limits.MAX_ADAPTER_SCALE)]
    """Factor by which its weights are multiplied."""


class FetchSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker of the model that has more of a prompt's KV blocks than the run's worker, or computes them."""

    worker_id: str
    """The worker."""
    epoch: str
    """Its epoch; in any other epoch it has nothing to give."""
    leg_ms: Annotated[float, DURATION_MS] = 0.0
    """If above 0, that worker computes the blocks that it lacks, which the router expects to take this long."""


class Run(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """A request that a router has placed on a worker."""

    request_id: str
    """`<tenant token>:<id>`."""
    attempt: Annotated[int, COUNT]
    """Raised by one at every dispatch of the request."""
    epoch: str
    """The epoch of the worker for which the run is meant; in any other epoch the worker refuses it, or leaves it
    unanswered while it has no card."""
    router_id: str
    """The router that sends it."""
    router_network: str = ""
    """The cluster of the broker that this router is connected to, or that broker's own id if it is in none."""
    reply: str
    """The client's reply subject, to which chunks are published."""
    encoding: codec.Encoding
    """Encoding of the chunks: `json` or `msgpack`."""
    token_ids: bytes
    """Unsigned 32-bit little-endian integers."""
    params: GenerationParams
    """The generation parameters of the request."""
    key_id: str = ""
    """The id of the client's API key; empty if it has none. It is for the request's next guardian."""
    charged_tokens: Annotated[int, COUNT] = 0
    """Tokens that count against limits of the client until the request has ended. They are for its next guardian."""
    rate_limits: public.RateLimits | None = None
    """The limits that the client is told of."""
    adapters: list[RunAdapter] = []
    """The adapters that `lora` in `params` names, ordered by digest, each once, without those whose scale is 0."""
    is_chat: bool = False
    """Whether the prompt is a conversation that was rendered with the chat template, so that its answer may have
    reasoning and tool calls."""
    remaining_ms: Annotated[float | None, REMAINING_MS] = None
    """Time left of the request's `timeout_ms`."""
    age_ms: Annotated[float | None, REMAINING_MS] = None
    """Time since the router received the request; a cancel that arrived earlier was not meant for it."""
    resume_from: RunResume | None = None
    """The completion so far, if the run continues a stream."""
    expected_cached_tokens: Annotated[int, COUNT] = 0
    """Tokens of the prompt that the router expects the worker to hold, or to get from another worker. Until the worker
    knows better, its load counts only the others as queued."""
    fetch_from: FetchSource | None = None
    """Where blocks of the prompt can be fetched instead of computed; a failed fetch does not end the run."""
    routing: public.RoutingReport | None = None
    """The routing report for the terminal, if the client asked for it."""
    routing_options: public.RoutingOptions | None = None
    """The client's wishes for the choice of a worker, for a router that places the request again."""
    copy_of: str = ""
    """The id of the request whose prompt this one has, as its client says."""
    passes_on: bool = False
    """Deprecated since 0.2.1: every router passes on cancels and resyncs. Still true, for workers of 0.2.0."""
    wants_answer: bool = False
    """Whether the end of the stream is to have its answer, since the router can then say how the next turn begins."""
    wants_reasoning: bool = False
    """Whether that answer is to have its reasoning, which this conversation's client sends back."""


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

    op: (
        Literal["drop", "cancel", "resync", "stop", "drain", "clear_cache", "retain"]
        | Literal["load", "unload", "load_adapter", "unload_adapter", "pull"]
    )
    """The command. `cancel` and `resync` are clients', passed on by a router with the client's reply subject. `unload`
    keeps a worker whose model is loaded on demand, and any other leaves."""
    request_id: str | None = None
    """The request to `drop`, `cancel`, `resync` or `stop`, as `<tenant token>:<id>`."""
    body: bytes = b""
    """The client's message to `cancel` or `resync`."""
    content_type: str | None = None
    """Its content type."""
    attempt: Annotated[int | None, COUNT] = None
    """The attempt to `drop`, together with all earlier ones."""
    moved: bool = False
    """Whether another worker continues the request to `drop`, so that it ends here even if it has sent a token."""
    grace_s: Annotated[float | None, SECONDS] = None
    """Seconds that running streams have to finish after `drain` or `unload`; the worker's own `--grace-s` if absent. A
    later command changes it."""
    handover_s: Annotated[float | None, SECONDS] = None
    """Seconds that routers then have to move the others to other workers; the worker's own `--handover-s` if absent. At
    0 none is moved, and they end with what was generated."""
    tenant: str | None = None
    """The tenant whose session is to `retain`."""
    session_id: str | None = None
    """The session to `retain`: its cached prefixes are kept, or evicted first."""
    ttl_ms: Annotated[float | None, DURATION_MS] = None
    """The time to `retain` it; 0: it is evicted first. A router waits for no reply."""
    model: str | None = None
    """The model to `load` beside the worker's own: a file, a directory or a name on the Hub, as seen from the worker.
    The name of a model that its process loads on demand loads that one. Without it, `load` asks a worker whose card
    says `loadable` for its own model. A load in progress is joined. There is one reply, with the `progress`; a router
    asks again every 500 ms, and a model that no router has asked for in 3 s is no longer loaded. For `pull`, the name
    on the Hub of a model to fetch onto the worker's machine, without loading it."""
    served_name: str | None = None
    """The name under which to serve the model to `load`; the file's name if absent."""
    replicas: int = 1
    """Replicas of the model to `load`."""
    settings: dict[str, Any] = {}
    """Engine settings of the model to `load`, by name, where they differ from the worker's own."""
    adapter: str | None = None
    """The name of the adapter to `load_adapter` or `unload_adapter`. An adapter of that name is replaced."""
    path: str | None = None
    """The file of the adapter to `load_adapter`, as seen from the worker."""
    tenants: list[str] | None = None
    """The tenants that may use the adapter to `load_adapter`; all of them if absent."""


class ControlReply(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's answer to a command."""

    ok: bool
    """Whether the command was carried out. An attempt that has sent a token or ended needs `moved` to be dropped."""
    error: errors.Error | None = None
    """Why the command was not carried out."""
    progress: float | None = None
    """The share of a `load` or `pull` that is done, 0 to 1. More replies follow until it is 1 or `ok` is false."""
    worker_ids: list[str] = []
    """The new replicas, once a `load` is done."""
    epoch: str | None = None
    """The epoch in which a `drop` was carried out; a later epoch knows nothing of what an earlier one has published."""


class NextTurn(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """Tells a worker how the next turn of a conversation is likely to begin, once its stream has ended there, so that
    idle steps can compute it. Nothing is replied."""

    request_id: str
    """The request that has ended, as `<tenant token>:<id>`."""
    epoch: str
    """The worker's epoch."""
    num_known: Annotated[int, COUNT]
    """The number of leading tokens of that request's prompt with which the next one begins too."""
    token_ids: bytes
    """The tokens that follow these, as unsigned 32-bit little-endian integers."""


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


class TakeReply(public.Message, StreamState, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's answer to `take`, with the stream so far. It follows the last chunk of the stream, and is the same if
    that router asks again."""

    ok: bool
    """Whether the worker has given up the stream. If not, it is not leaving, does not have the stream, has already
    ended it, has too many tokens for a reply, or knows another router as the guardian."""
    epoch: str
    """The worker's epoch."""
    last_words: public.Chunk | None = None
    """The terminal that ends the stream with what was generated, once it has a token: the router sends it if no other
    worker continues the stream."""


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
    last_words: public.Chunk | None = None
    """The terminal that a worker has left for it, in case no other worker continues it."""


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
    passes_on: bool = False
    """Deprecated since 0.2.1: as in a run."""


class GuardCheck(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks a router whether it is still the guardian of a worker's streams."""

    request_ids: list[str]
    """The keys of the streams whose guardian it is, as far as the worker knows; none if they have all ended."""
    attempts: list[int] = []
    """The attempt of each."""
    epoch: str = ""
    """The worker's epoch. A router that knows another one does not answer."""
    number: int = 0
    """The check's number, which the answer repeats; 0 in those of `wire-check`, which confirm nothing."""


class Unguarded(public.Message, frozen=True, kw_only=True, omit_defaults=True):
    """A router's answer to a check."""

    router_id: str
    """The router that answers."""
    request_ids: list[str]
    """The requests that it does not know; none if it guards them all."""
    passes_on: bool = False
    """Deprecated since 0.2.1: as in a run."""
    moved: dict[str, int] = {}
    """The requests that it has given to another worker or in another attempt, each with the attempt that it was asked
    about."""
    doubtful: list[str] = []
    """The requests that it has not given to another worker, and that it does not confirm: it is about to find out
    whether that worker has them, or looks for a worker."""
    number: int = 0
    """The number of the check."""
    network: str = ""
    """The cluster of the broker that it is connected to, or that broker's own id if it is in none. Between workers and
    routers of different networks there are links that may be down while both are well."""
