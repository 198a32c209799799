"""Requests that wait because every worker of their model is busy: in turn, fair between tenants, bounded; pure.

Between tenants turns are shared out by deficit round robin: each gets a quantum of tokens a round and spends it on its
own requests, so that a tenant with many or large ones delays itself. Within a tenant a request's turn is when it came,
`priority_s` seconds later for each step of priority: who matters more goes first, and whoever waits is overtaken for a
bounded time only.

When there are too many, the tenant with the most tokens waiting gives up its last one."""

import bisect
from collections import deque
from typing import NamedTuple

from tokenbus.router.fleet.decaying_rate import DecayingRate

QUANTUM_TOKENS = 256
"""What each tenant may spend in a round."""
_SHORTEST_RETRY_MS = 100.0
_LONGEST_RETRY_MS = 60_000.0
_UNKNOWN_RETRY_MS = 1_000.0

_Turn = tuple[float, int]
"""When a request came, put off by its priority, and a number that no other has."""


class QueuedRequest(NamedTuple):
    """A request that waits for its placement."""

    key: str
    tenant: str
    arrived_at: float
    tokens: int
    """Prompt tokens, and those that it may generate: what its tenant pays for it."""
    priority: int = 0


class _Line:
    """The requests of one tenant, in turn."""

    def __init__(self) -> None:
        self.turns: list[_Turn] = []
        self.requests: dict[_Turn, QueuedRequest] = {}
        self.tokens = 0
        self.deficit = 0

    def add(self, turn: _Turn, request: QueuedRequest) -> None:
        bisect.insort(self.turns, turn)
        self.requests[turn] = request
        self.tokens += request.tokens

    def remove(self, turn: _Turn) -> QueuedRequest:
        del self.turns[bisect.bisect_left(self.turns, turn)]
        request = self.requests.pop(turn)
        self.tokens -= request.tokens
        return request


class FairQueue:
    """At most `max_requests` of together at most `max_tokens`."""

    def __init__(self, max_requests: int, max_tokens: int, *, priority_s: float = 1.0) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._priority_s = priority_s
        self._lines: dict[str, _Line] = {}
        self._round: deque[str] = deque()
        self._places: dict[str, tuple[str, _Turn]] = {}
        """Tenant and turn of each request, by its key."""
        self._count = 0
        self._tokens = 0
        self._left = DecayingRate()

    def __repr__(self) -> str:
        return f"<Backlog of {len(self)} requests, {self._tokens} tokens, {len(self._lines)} tenants>"

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def set(self, max_requests: int, max_tokens: int) -> None:
        """Other bounds, from the next request on."""
        self._max_requests, self._max_tokens = max_requests, max_tokens

    def put(self, request: QueuedRequest) -> list[QueuedRequest]:
        """Takes a request; returns those that have to be refused for it, itself perhaps among them."""
        assert request.key not in self._places, request
        if request.tenant not in self._lines:
            self._lines[request.tenant] = _Line()
            self._round.append(request.tenant)
        self._count += 1
        turn = (request.arrived_at + request.priority * self._priority_s, self._count)
        self._lines[request.tenant].add(turn, request)
        self._places[request.key] = request.tenant, turn
        self._tokens += request.tokens
        refused = []
        while len(self) > self._max_requests or self._tokens > self._max_tokens:
            refused.append(self._give_up())
        return refused

    def pop(self, now: float) -> QueuedRequest:
        """The one whose turn it is; not to be asked of an empty backlog."""
        while True:
            line = self._lines[self._round[0]]
            request = line.requests[line.turns[0]]
            if request.tokens <= line.deficit:
                line.deficit -= request.tokens
                self.remove(request.key)
                self._left.add(now)
                return request
            line.deficit += QUANTUM_TOKENS
            self._round.rotate(-1)

    def remove(self, key: str) -> QueuedRequest:
        """Takes one out, whoever's turn it is."""
        tenant, turn = self._places.pop(key)
        line = self._lines[tenant]
        request = line.remove(turn)
        self._tokens -= request.tokens
        if not line.turns:
            del self._lines[tenant]
            self._round.remove(tenant)
        return request

    def retry_after_ms(self, now: float) -> float:
        """When what waits now will have been placed, if it goes on as in the last seconds."""
        per_s = self._left.per_s(now)
        if per_s < 1e-3:
            return _UNKNOWN_RETRY_MS
        return min(_LONGEST_RETRY_MS, max(_SHORTEST_RETRY_MS, 1e3 * (len(self) + 1) / per_s))

    def check_integrity(self) -> None:
        """Asserts what must hold between any two calls."""
        assert sorted(self._round) == sorted(self._lines)
        assert len(self) <= self._max_requests
        assert self._tokens == sum(line.tokens for line in self._lines.values()) <= self._max_tokens
        for tenant, line in self._lines.items():
            assert line.turns == sorted(line.requests), tenant
            assert line.turns, tenant
            assert line.tokens == sum(request.tokens for request in line.requests.values())
            assert all(self._places[request.key] == (tenant, turn) for turn, request in line.requests.items())
        assert sum(len(line.turns) for line in self._lines.values()) == len(self)

    def _give_up(self) -> QueuedRequest:
        """The last of whoever has most waiting."""
        line = max(self._lines.values(), key=lambda line: line.tokens)
        return self.remove(line.requests[line.turns[-1]].key)
