"""When requests are sent in open loop, whether or not earlier ones have been answered; pure."""

import random
from collections.abc import Iterator

from tokenbus.replay.load.points import LoadKind, LoadPoint
from tokenbus.replay.load.workload import TimedRequest


def poisson(rate: float, burst: int, rng: random.Random) -> Iterator[float]:
    """Seconds from the start, for ever: `rate` requests a second on average, always `burst` at the same time."""
    now = 0.0
    while True:
        now += rng.expovariate(rate / burst)
        for _ in range(burst):
            yield now


def schedule(
    requests: Iterator[TimedRequest], point: LoadPoint, burst: int, rng: random.Random
) -> Iterator[TimedRequest]:
    """The same requests, at the times that the load gives them."""
    if point.kind is LoadKind.SPEEDUP:
        return (request._replace(at_s=request.at_s / point.value) for request in requests)
    times = poisson(point.value, burst, rng)
    return (request._replace(at_s=at) for request, at in zip(requests, times, strict=False))
