"""Tells clients how their tenant's requests went: those in flight, and the ends of the last ones.

An end is kept by the router that tells of it (`ends.py`), so that one router of the fleet has it. Nothing of a
request's text is kept."""

import collections
import itertools
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tokenbus.protocol.bus.reply_sender import ReplySender
from tokenbus.protocol.wire import codec, errors, internal, limits, messages, subjects
from tokenbus.router.requests.flights.flight import Flight, Flights
from tokenbus.router.requests.flights.way import Way

MAX_ENDS = 4_096
"""Requests that have ended and are remembered. Beyond that, the oldest are forgotten of the tenant that has most."""
_DEFAULT_LIMIT = 50
_MAX_GAPS = 14
"""Counts in `gaps`; further ones are not a worker's."""


class _End(NamedTuple):
    """All that is kept of a request that has ended. Times are those of the monotonic clock."""

    key: str
    address: subjects.ModelAddress
    received_at: float
    ended_at: float
    way: Way
    reason: str
    code: str
    tokens: tuple[int, int, int]
    """Tokens of the prompt, those of them that were cached, and tokens of the completion."""
    first_token: internal.FirstToken | None
    end: internal.StreamEnd | None

    @property
    def times(self) -> tuple[float, float] | None:
        """Time in ms from its accept to its first step, and from there to its first token; None without a token."""
        end = self.end
        if end is not None and end.completion_tokens and end.gaps:  # workers of earlier versions tell neither
            return end.queue_ms, end.prefill_ms
        return _times_of(self.first_token)


class RequestTraces:
    """The requests of one router, for those who ask how they went."""

    def __init__(
        self,
        replies: ReplySender,
        router_id: str,
        flights: Flights,
        max_payload: Callable[[], int],
        capacity: int = MAX_ENDS,
    ) -> None:
        self._replies = replies
        self._router_id = router_id
        self._flights = flights
        self._max_payload = max_payload
        self._capacity = capacity
        self._ends: dict[str, collections.deque[_End]] = {}
        """By tenant, the oldest first."""
        self._tenants: dict[int, dict[str, None]] = {}
        """The tenants by the number of their ends, each of which changes by one at a time."""
        self._most = 0
        """The most ends of a tenant."""
        self._num_ends = 0
        self._by_key: dict[str, _End] = {}
        """The last end of each request key: ids may be used again."""

    def __repr__(self) -> str:
        return f"<RequestTraces {len(self)} ended>"

    def __len__(self) -> int:
        return self._num_ends

    def keep(self, flight: Flight, reason: str, code: errors.Code | None, tokens: tuple[int, int, int]) -> None:
        """Keeps the end of a request, in place of an older one if there are too many."""
        now = time.monotonic()
        if flight.ended_by is not None:  # it has run there, even if its accept was not read or came too late
            flight.way.accepted(flight.ended_by, now)
        end = self._by_key[flight.key] = _End(
            flight.key,
            flight.address,
            flight.received_at,
            now,
            flight.way,
            reason,
            "" if code is None else code,
            tokens,
            flight.completion.first_token,
            _kept(flight.end),
        )
        own = self._ends.setdefault(flight.address.tenant, collections.deque())
        own.append(end)
        self._num_ends += 1
        self._count(flight.address.tenant, len(own) - 1, len(own))
        if self._num_ends > self._capacity:
            self._forget_one(flight.address.tenant)

    def _forget_one(self, tenant: str) -> None:
        """Forgets the oldest end of this tenant if it has more than its share, or else of the one that has most."""
        if len(self._ends[tenant]) * len(self._ends) <= self._capacity:
            tenant = next(iter(self._tenants[self._most]))
        own = self._ends[tenant]
        oldest = own.popleft()
        self._num_ends -= 1
        self._count(tenant, len(own) + 1, len(own))
        if not own:
            del self._ends[tenant]
        if self._by_key.get(oldest.key) is oldest:
            del self._by_key[oldest.key]

    def _count(self, tenant: str, before: int, now: int) -> None:
        """Notes a tenant's number of ends, so that who has most is found without a look at every tenant."""
        if before:
            del self._tenants[before][tenant]
            if not self._tenants[before]:
                del self._tenants[before]
        if now:
            self._tenants.setdefault(now, {})[tenant] = None
        if now > self._most or self._most not in self._tenants:
            self._most = now

    def answer(self, reply: str, asked: messages.TraceRequest, encoding: codec.Encoding, tenant: str) -> None:
        """Answers one who asks for requests of a tenant."""
        found, truncated = self.find(asked, tenant, time.monotonic(), time.time())
        room = self._max_payload() - limits.MESSAGE_RESERVE_BYTES
        while True:
            answer = messages.TraceReply(router_id=self._router_id, requests=found, truncated=truncated)
            payload = codec.encode(answer, encoding)
            if len(payload) <= room or not found:
                break
            found, truncated = found[: len(found) // 2], True
        self._replies.send(reply, payload, codec.content_headers(encoding))

    def refuse(self, reply: str, encoding: codec.Encoding, error: errors.Error) -> None:
        """Answers one who asks with an error."""
        answer = messages.TraceReply(router_id=self._router_id, error=error)
        self._replies.send(reply, codec.encode(answer, encoding), codec.content_headers(encoding))

    def find(
        self, asked: messages.TraceRequest, tenant: str, now: float, unix_now: float
    ) -> tuple[list[messages.RequestTrace], bool]:
        """Returns the requests that are asked for, the latest first, and whether there are more. `now` is a time of the
        monotonic clock, `unix_now` the same as Unix time."""
        most = asked.limit or _DEFAULT_LIMIT
        found = list(itertools.islice(self._all(asked, tenant, now, unix_now), most + 1))
        return found[:most], len(found) > most

    def _all(
        self, asked: messages.TraceRequest, tenant: str, now: float, unix_now: float
    ) -> Iterator[messages.RequestTrace]:
        request_id = asked.id
        beginning = f"{subjects.encode_name(tenant)}:{request_id or ''}"
        slower_than_s = -1.0 if asked.slower_than_ms is None else asked.slower_than_ms / 1e3

        def matches(key: str) -> bool:
            return key.startswith(beginning) and (request_id is None or key[len(beginning) :][:1] in ("", "-"))

        running = [one for one in self._flights.all() if matches(one.key)]
        for flight in sorted([] if asked.failed else running, key=lambda one: -one.received_at):
            if _waited_s(flight.way, flight.received_at, now, _times_of(flight.completion.first_token)) > slower_than_s:
                yield _of_flight(flight, now, unix_now)
        known = None if request_id is None else self._by_key.get(beginning)
        for end in reversed(self._ends.get(tenant, ())) if known is None else (known,):
            if not matches(end.key) or (asked.failed and not end.code):
                continue
            if _waited_s(end.way, end.received_at, end.ended_at, end.times) > slower_than_s:
                yield _of_end(end, now, unix_now)


def _kept(end: internal.StreamEnd | None) -> internal.StreamEnd | None:
    """Returns what is kept of a worker's report: no text, which a worker may make long."""
    if end is None:
        return None
    return codec.replace(end, id="", router_id="", code="", gaps=end.gaps[:_MAX_GAPS], answer=None)


def _waited_s(way: Way, received_at: float, ended_at: float, times: tuple[float, float] | None) -> float:
    """Returns the time to a request's first token, or how long it waited for one in vain."""
    accepted_at = next((step.accepted_at for step in way.steps if step.accepted_at is not None), None)
    if accepted_at is None or times is None:
        return ended_at - received_at
    return accepted_at - received_at + sum(times) / 1e3


def _times_of(first_token: internal.FirstToken | None) -> tuple[float, float] | None:
    return None if first_token is None else (first_token.queue_ms, first_token.prefill_ms)


def _of_flight(flight: Flight, now: float, unix_now: float) -> messages.RequestTrace:
    first = flight.completion.first_token
    return _trace(
        flight.address,
        flight.request_id,
        flight.way,
        (flight.received_at, now, now, unix_now),
        "waiting" if flight.worker_id is None else "running",
        "",
        (flight.num_prompt_tokens, 0 if first is None else first.cached_tokens, len(flight.completion)),
        _times_of(first),
        None,
    )


def _of_end(end: _End, now: float, unix_now: float) -> messages.RequestTrace:
    return _trace(
        end.address,
        subjects.key_to_request_id(end.key),
        end.way,
        (end.received_at, end.ended_at, now, unix_now),
        end.reason,
        end.code,
        end.tokens,
        end.times,
        end.end,
    )


def _trace(
    address: subjects.ModelAddress,
    request_id: str,
    way: Way,
    times: tuple[float, float, float, float],
    state: str,
    code: str,
    tokens: tuple[int, int, int],
    first_token: tuple[float, float] | None,
    end: internal.StreamEnd | None,
) -> messages.RequestTrace:
    """`times` are its receipt, its end and now, by the monotonic clock, and the Unix time of now."""
    received_at, ended_at, now, unix_now = times
    queue_ms, prefill_ms = (None, None) if first_token is None else first_token
    return messages.RequestTrace(
        id=request_id,
        model=address.model,
        received_at_ms=round(1e3 * (unix_now - (now - received_at))),
        state=state,
        code=code,
        key_id=address.key_id,
        adopted=way.is_adopted,
        tokenize_ms=_ms(way.tokenize_s),
        held_ms=_ms(way.held_s),
        queue_ms=_ms(way.queue_s),
        attempts=way.attempts(received_at),
        worker_queue_ms=queue_ms,
        prefill_ms=prefill_ms,
        fetch_ms=0.0 if end is None else end.fetch_ms,
        total_ms=_ms(ended_at - received_at),
        prompt_tokens=tokens[0],
        cached_tokens=tokens[1],
        fetched_tokens=0 if end is None else end.fetched_tokens,
        completion_tokens=tokens[2],
        gaps=[] if end is None else end.gaps,
    )


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
