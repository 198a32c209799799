"""A sweep: its points, and when requests are due at each.

In a closed loop (a concurrency), a client sends its next request when it has the answer to the last one. In an open
loop (a rate or a speedup), requests are sent at their times, whether or not earlier ones have been answered."""

import enum
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tokenbus.replay.load.workload import TimedRequest, Workload

_REQUESTS = 100
_REQUESTS_PER_CLIENT = 10


class LoadKind(enum.StrEnum):
    CONCURRENCY = "concurrency"
    """Clients, each of which sends its next request once it has its answer."""
    RATE = "rate"
    """Requests per second."""
    SPEEDUP = "speedup"
    """The factor by which requests are sent faster than in the trace."""


_LABELS = {
    LoadKind.CONCURRENCY: "{:g} at a time",
    LoadKind.RATE: "{:g} requests/s",
    LoadKind.SPEEDUP: "{:g} × the trace's speed",
}


class LoadPoint(NamedTuple):
    kind: LoadKind
    value: float

    def __str__(self) -> str:
        return _LABELS[self.kind].format(self.value)


class Plan(NamedTuple):
    """A sweep to measure."""

    model: str
    points: tuple[LoadPoint, ...]
    workload: Workload
    clip: bool
    requests: int | None
    duration_s: float | None
    warmup: int
    burst: int
    max_in_flight: int
    temperature: float
    timeout_ms: float | None
    seed: int
    reuse_cache: bool
    json: Path | None
    html: Path | None

    def requests_at(self, point: LoadPoint, workload: Workload) -> int | None:
        """Returns the maximum number of requests in a run; None if only its duration limits them."""
        if workload.num_requests:
            return min(self.requests or workload.num_requests, workload.num_requests)
        if self.requests or self.duration_s:
            return self.requests
        return (
            max(_REQUESTS, _REQUESTS_PER_CLIENT * int(point.value)) if point.kind is LoadKind.CONCURRENCY else _REQUESTS
        )


def poisson(rate: float, burst: int, rng: random.Random) -> Iterator[float]:
    """Yields arrival times in seconds from the start, endlessly: `rate` requests per second on average, always `burst`
    at once."""
    now = 0.0
    while True:
        now += rng.expovariate(rate / burst)
        for _ in range(burst):
            yield now


def schedule(
    requests: Iterator[TimedRequest], point: LoadPoint, burst: int, rng: random.Random
) -> Iterator[TimedRequest]:
    """Returns the same requests with the times at which an open loop sends them."""
    if point.kind is LoadKind.SPEEDUP:
        return (request._replace(at_s=request.at_s / point.value) for request in requests)
    times = poisson(point.value, burst, rng)
    return (request._replace(at_s=at) for request, at in zip(requests, times, strict=False))
