"""When requests are sent in open loop, whether or not earlier ones have been answered; pure."""

import random
from collections.abc import Iterator

from tokenbus.replay.load.points import Kind, Point
from tokenbus.replay.load.workload import Ask


def poisson(rate: float, burst: int, rng: random.Random) -> Iterator[float]:
    """Seconds from the start, for ever: `rate` requests a second on average, always `burst` at the same time."""
    now = 0.0
    while True:
        now += rng.expovariate(rate / burst)
        for _ in range(burst):
            yield now


def timed(asks: Iterator[Ask], point: Point, burst: int, rng: random.Random) -> Iterator[Ask]:
    """The same requests, at the times that the load gives them."""
    if point.kind is Kind.SPEEDUP:
        return (ask._replace(at_s=ask.at_s / point.value) for ask in asks)
    times = poisson(point.value, burst, rng)
    return (ask._replace(at_s=at) for ask, at in zip(asks, times, strict=False))
