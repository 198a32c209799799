"""In a day of virtual time, scheduler, block pool, queue and prefix index grow no larger than in its first hours."""

import gc
import random
import sys
import types
from collections.abc import Iterator

from tokenbus.replay.settings import ReplaySettings
from tokenbus.replay.simulation import Simulation
from tokenbus.replay.traces import TracedRequest
from tokenbus.router.placement.policies import KvAware

_HOURS, _REQUESTS_AN_HOUR = 24, 60
_SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)


class SampledTrace(list[TracedRequest]):
    """A trace that takes a sample after each hour of it."""

    def __init__(self, requests: list[TracedRequest], simulation: Simulation) -> None:
        super().__init__(requests)
        self._simulation = simulation
        self.sizes: list[int] = []

    def __iter__(self) -> Iterator[TracedRequest]:
        for request in super().__iter__():
            if request.at_s > 3_600 * (1 + len(self.sizes)):
                self.sizes.append(self._size())
            yield request

    def _size(self) -> int:
        """Returns the bytes of all that workers and routers hold, but not of the steps that workers report."""
        seen = {id(worker.steps): worker.steps for worker in self._simulation._workers}
        size, found = 0, [*self._simulation._workers, *self._simulation._routers]
        while found:
            one = found.pop()
            if id(one) not in seen and not isinstance(one, _SHARED):
                seen[id(one)] = one
                size += sys.getsizeof(one)
                found += gc.get_referents(one)
        return size


def test_a_day_of_requests_leaves_nothing_larger_than_its_first_hours() -> None:
    rng = random.Random(1)
    requests = [_request(rng, number) for number in range(_HOURS * _REQUESTS_AN_HOUR)]
    settings = ReplaySettings(
        trace="", workers=2, kv_blocks=256, block_size=16, max_num_seqs=4, routers=2, kv_token_bytes=64
    )
    simulation = Simulation(settings, KvAware())
    trace = SampledTrace(requests, simulation)
    simulation.play(trace)
    simulation.check_integrity()
    assert len(simulation.outcomes) == len(requests)
    assert max(trace.sizes[-4:]) <= 1.02 * max(trace.sizes[4:8]), trace.sizes


def _request(rng: random.Random, number: int) -> TracedRequest:
    """Returns a request, in bursts of ten, of a tenant of its own or one of three, with or without a common prefix."""
    at_s = (number // 10) * 36_000 / _REQUESTS_AN_HOUR
    tenant = f"t{number}" if rng.random() < 0.3 else f"t{rng.randrange(3)}"
    first = rng.randrange(8) if rng.random() < 0.5 else number
    num_blocks = rng.randrange(1, 30)
    ids = (first, *range(1_000 * number + 10_000, 1_000 * number + 9_999 + num_blocks))
    return TracedRequest(at_s, 16 * num_blocks - rng.randrange(16), rng.randrange(1, 100), ids, 16, tenant)
