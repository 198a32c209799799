"""A bounded queue that is fair between tenants.

Tenants share the queue by deficit round robin: in each round a tenant earns a quantum of tokens and spends it on its
own requests, so a tenant with many or large requests only delays itself. Within a tenant requests leave in the order of
arrival, where each step of priority counts as `PRIORITY_S` seconds of waiting. A request can therefore be overtaken
only by those that arrive a bounded time after it.

When the queue overflows, the tenant with the most queued tokens loses its last request.

Requests whose stream has begun and lost its worker come before all others, and count against no limit and no tenant."""

import bisect
import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

from tokenbus.protocol.averages import DecayingRate

QUANTUM_TOKENS = 256
"""Tokens that each tenant earns in a round."""
PRIORITY_S = 1.0
_MIN_RETRY_MS = 100.0
_MAX_RETRY_MS = 60_000.0
_DEFAULT_RETRY_MS = 1_000.0
"""Retry hint while no request has left the queue recently."""

_Position = tuple[float, int]
"""Arrival time shifted by priority, and a serial number that makes it unique."""


class QueuedRequest(NamedTuple):
    """A request in the queue."""

    key: str
    tenant: str
    arrived_at: float
    tokens: int
    """The request's cost to its tenant: prompt tokens plus the tokens that it is expected to generate."""
    priority: int = 0
    """Lower numbers leave first."""
    needs: Hashable = None
    """The kind of worker that it needs: of a tenant's requests with the same needs, all can be started or none."""


class _TenantQueue:
    """The requests of one tenant."""

    def __init__(self) -> None:
        self.positions: dict[Hashable, list[_Position]] = {}
        """Sorted, by what the requests need."""
        self.requests: dict[_Position, QueuedRequest] = {}
        self.tokens = 0
        self.deficit = 0

    def add(self, position: _Position, request: QueuedRequest) -> None:
        bisect.insort(self.positions.setdefault(request.needs, []), position)
        self.requests[position] = request
        self.tokens += request.tokens

    def remove(self, position: _Position) -> QueuedRequest:
        request = self.requests.pop(position)
        positions = self.positions[request.needs]
        del positions[bisect.bisect_left(positions, position)]
        if not positions:
            del self.positions[request.needs]
        self.tokens -= request.tokens
        return request

    def first(self, can_start: Callable[[QueuedRequest], bool]) -> QueuedRequest | None:
        """Returns the first request that can be started."""
        heads = sorted(positions[0] for positions in self.positions.values())
        return next((self.requests[head] for head in heads if can_start(self.requests[head])), None)

    def rounds_until(self, request: QueuedRequest) -> int:
        """Returns after how many rounds the tenant can afford a request."""
        return max(0, -((self.deficit - request.tokens) // QUANTUM_TOKENS))

    def last(self) -> QueuedRequest:
        """Returns the request that would leave after all others."""
        return self.requests[max(positions[-1] for positions in self.positions.values())]


class FairQueue:
    """Holds at most `max_requests` requests of at most `max_tokens` tokens together."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._tenants: dict[str, _TenantQueue] = {}
        self._round: deque[str] = deque()
        """Tenants in the order in which they are served; the current one is first."""
        self._positions: dict[str, tuple[str, _Position]] = {}
        """Tenant and position of each request, by its key."""
        self._begun: deque[QueuedRequest] = deque()
        self._num_needing = 0
        self._count = 0
        self._tokens = 0
        self._left = DecayingRate()

    def __repr__(self) -> str:
        return f"<FairQueue of {len(self)} requests, {self._tokens} tokens, {len(self._tenants)} tenants>"

    def __len__(self) -> int:
        return len(self._begun) + len(self._positions)

    def __contains__(self, key: str) -> bool:
        return key in self._positions or any(request.key == key for request in self._begun)

    @property
    def has_needs(self) -> bool:
        """Whether a request needs a worker of some kind."""
        return self._num_needing > 0

    def set_limits(self, max_requests: int, max_tokens: int) -> None:
        """Changes the limits; the next `enqueue` evicts what exceeds them."""
        self._max_requests, self._max_tokens = max_requests, max_tokens

    def enqueue(self, request: QueuedRequest) -> list[QueuedRequest]:
        """Adds a request and returns those evicted to make room, which may include the request itself."""
        assert request.key not in self._positions, request
        if request.tenant not in self._tenants:
            self._tenants[request.tenant] = _TenantQueue()
            self._round.append(request.tenant)
        self._count += 1
        position = (request.arrived_at + request.priority * PRIORITY_S, self._count)
        self._tenants[request.tenant].add(position, request)
        self._positions[request.key] = request.tenant, position
        self._tokens += request.tokens
        self._num_needing += bool(request.needs)
        evicted = []
        while len(self._positions) > self._max_requests or self._tokens > self._max_tokens:
            largest = max(self._tenants.values(), key=lambda tenant: tenant.tokens)
            evicted.append(self.remove(largest.last().key))
        return evicted

    def enqueue_begun(self, request: QueuedRequest) -> None:
        """Adds a request whose stream has begun, after others of that kind and before all others."""
        self._begun.append(request)
        self._num_needing += bool(request.needs)

    def pop(self, now: float) -> QueuedRequest:
        """Removes and returns the next request. The queue must not be empty."""
        request = self.pop_startable(now, lambda _: True)
        assert request is not None
        return request

    def pop_startable(self, now: float, can_start: Callable[[QueuedRequest], bool]) -> QueuedRequest | None:
        """Removes and returns the next request that can be started, which overtakes those that can't. `can_start` is
        asked once for all requests of a tenant with the same needs."""
        for request in self._begun:
            if can_start(request):
                return self.remove(request.key)
        saving: list[tuple[int, _TenantQueue, QueuedRequest]] = []
        least = math.inf
        for turn, name in enumerate(self._round):
            tenant = self._tenants[name]
            if (first := tenant.first(can_start)) is None:
                continue  # one that has nothing to start saves nothing
            saving.append((turn, tenant, first))
            least = min(least, tenant.rounds_until(first))
            if not least:
                break
        if not saving:
            return None
        # Those before the next one save a quantum in its last round too, which they can't spend yet either.
        num_rounds = int(least)
        turn, tenant, first = next(one for one in saving if one[1].rounds_until(one[2]) == num_rounds)
        for other_turn, other, _ in saving:
            other.deficit += QUANTUM_TOKENS * (num_rounds + (other_turn < turn))
        tenant.deficit -= first.tokens
        self._round.rotate(-turn)
        self.remove(first.key)
        self._left.add(now)
        return first

    def remove(self, key: str) -> QueuedRequest:
        """Removes and returns a request from any position."""
        if key not in self._positions:
            request = next(request for request in self._begun if request.key == key)
            self._begun.remove(request)
            self._num_needing -= bool(request.needs)
            return request
        name, position = self._positions.pop(key)
        tenant = self._tenants[name]
        request = tenant.remove(position)
        self._tokens -= request.tokens
        self._num_needing -= bool(request.needs)
        if not tenant.requests:  # an idle tenant keeps no credit, or it could starve others when it returns
            del self._tenants[name]
            self._round.remove(name)
        return request

    def retry_after_ms(self, now: float) -> float:
        """Estimates when the requests queued now will have left, from the rate of the last seconds."""
        per_s = self._left.per_s(now)
        if per_s < 1e-3:
            return _DEFAULT_RETRY_MS
        return min(_MAX_RETRY_MS, max(_MIN_RETRY_MS, 1e3 * (len(self) + 1) / per_s))

    def check_integrity(self) -> None:
        assert sorted(self._round) == sorted(self._tenants)
        assert len(self._positions) <= self._max_requests
        assert self._tokens == sum(tenant.tokens for tenant in self._tenants.values()) <= self._max_tokens
        for name, tenant in self._tenants.items():
            assert sorted(itertools.chain(*tenant.positions.values())) == sorted(tenant.requests), name
            assert tenant.requests, name
            for needs, positions in tenant.positions.items():
                assert positions == sorted(positions), name
                assert {tenant.requests[at].needs for at in positions} == {needs}
            assert tenant.tokens == sum(request.tokens for request in tenant.requests.values())
            assert all(self._positions[request.key] == (name, at) for at, request in tenant.requests.items())
        assert sum(len(tenant.requests) for tenant in self._tenants.values()) == len(self._positions)
        waiting = itertools.chain(self._begun, *(tenant.requests.values() for tenant in self._tenants.values()))
        assert self._num_needing == sum(bool(one.needs) for one in waiting)
