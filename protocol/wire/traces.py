"""The messages that tell how single requests went, for consoles and other clients."""

from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from tokenbus.protocol.wire import errors, limits
from tokenbus.protocol.wire.codec import Message
from tokenbus.protocol.wire.params import Range

GAP_BUCKETS = 14
"""Items of `gaps`: below 1 ms, below 2, 4, 8 and so on; the last one is everything from 4,096 ms."""
MAX_TRACES = 200


class TraceRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Asks each router how the tenant's recent requests went. Each answers, with those that it knows, latest first."""

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=limits.MAX_ID_BYTES)] | None = None
    """Only this one. A gateway adds a `-` and more to the ids of its clients: this finds them, too."""
    failed: bool = False
    """Only requests that ended in an error."""
    slower_than_ms: Annotated[float | None, Range(0, 1e12)] = None
    """Only requests that waited longer than this for their first token."""
    limit: Annotated[int | None, Range(1, MAX_TRACES)] = None
    """The most requests in an answer; 50 if absent."""


class TraceAttempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One try to run a request on a worker. Times are in ms since the router received the request."""

    worker_id: str
    """Name of the worker."""
    begun_ms: float
    """When it was chosen."""
    accepted_ms: float | None = None
    """When it accepted; null if it has not."""
    continued_ms: float | None = None
    """When it sampled its first token, as far as the router heard; null if it has not, or if there were none before."""
    policy: str = ""
    """Name of the policy that chose it; empty if this router did not choose."""
    candidates: int = 0
    """Workers that could have been chosen."""
    held_tokens: int = 0
    """Tokens at the prompt's beginning that it was expected to hold."""
    most_held_tokens: int = 0
    """The most of them that any of the candidates was expected to hold."""
    wait_ms: float = 0.0
    """The time after which it was expected to begin to compute the prompt, waits for a place and KV memory included."""
    fetch_from: str = ""
    """Name of the worker from which it was told to fetch blocks; empty if it was not."""
    fetch_tokens: int = 0
    """Tokens of the blocks that were expected from there."""
    has_leg: bool = False
    """Whether that worker was to compute the prompt first."""
    tokens: int = 0
    """Tokens of the completion that had been sampled before."""
    refused: str = ""
    """Code of the error with which it refused; empty if it did not."""
    left_ms: float | None = None
    """When the request was taken from it, to continue elsewhere; null if it was not."""
    left: str = ""
    """`lost`, or `leaving` for a worker that gave the request up; empty if it was not taken from it."""
    heard_ms: float | None = None
    """When the router last heard of a worker that was lost."""


class RequestTrace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The way of one request, without any of its text."""

    id: str
    """Its id."""
    model: str
    """Its model."""
    received_at_ms: int
    """Unix time in ms at which this router received it, or would have if it has taken it over."""
    state: str
    """`waiting` until a worker accepts it, then `running`, then its finish reason; `by_worker` if that is not known."""
    code: str = ""
    """The code of the error with which it has ended."""
    key_id: str = ""
    """The id of its API key."""
    adopted: bool = False
    """Whether another router had received it. What happened there is not known."""
    tokenize_ms: float = 0.0
    """Time in which its prompt was tokenized."""
    held_ms: float = 0.0
    """Time in which it waited for its model to be loaded, or for a worker of it."""
    queue_ms: float = 0.0
    """Time in which it waited in the router because every worker was busy."""
    attempts: list[TraceAttempt] = []
    """The workers that were asked, in this order; of more than 32 the first and the last ones."""
    worker_queue_ms: float | None = None
    """Time from the first accept to the first step; null before the first token, like `prefill_ms`."""
    prefill_ms: float | None = None
    """Time from the first step to the first token."""
    fetch_ms: float = 0.0
    """The part of `worker_queue_ms` in which blocks were fetched."""
    total_ms: float = 0.0
    """Time from its receipt to its end, or until now."""
    prompt_tokens: int = 0
    """Tokens of the prompt; 0 while unknown."""
    cached_tokens: int = 0
    """Those of them that did not have to be computed."""
    fetched_tokens: int = 0
    """Those of the cached ones that came from another worker."""
    completion_tokens: int = 0
    """Tokens of the completion so far."""
    gaps: list[int] = []
    """Times between tokens at its last worker: how many took less than 1 ms, 2, 4, 8 and so on; the 14th counts all
    from 4,096 ms. Known at its end."""


def first_token_ms(trace: RequestTrace) -> float | None:
    """Returns the time from a request's receipt to its first token; None if it has none, or if this router has taken
    it over since, and so does not know when its first worker had accepted it."""
    if trace.adopted and trace.attempts and not trace.attempts[0].policy:
        return None
    accepted_ms = next((one.accepted_ms for one in trace.attempts if one.accepted_ms is not None), None)
    if accepted_ms is None or trace.worker_queue_ms is None or trace.prefill_ms is None:
        return None
    return min(trace.total_ms, accepted_ms + trace.worker_queue_ms + trace.prefill_ms)


class TraceReply(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Tells what one router knows. Requests that went through other routers are in their replies."""

    router_id: str
    """The router that answers."""
    requests: list[RequestTrace] = []
    """The latest first."""
    truncated: bool = False
    """Whether there are more, which did not fit."""
    error: errors.Error | UnsetType = UNSET
    """Why there are none."""
