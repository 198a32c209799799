"""Measures how long a router takes to choose a worker, from token ids to the booking: hash, match, cost, book.

Run: .venv/bin/python -m bench.router.choice [--workers 64 1000] [--blocks 260000] [--tokens 1024 8192]

The workers hold conversations of 64 to 512 blocks, `--blocks` of them in all. Each prompt continues one of these
conversations. Times are CPU time of this process, in microseconds."""

import gc
import random
import statistics
import time
from collections.abc import Sequence

import numpy as np

from bench import flags
from bench.router import cached_blocks
from tokenbus.router.placement.placement import Placement, PlacementOptions, PlacementRequest
from tokenbus.router.placement.policies import KvAware

_ANYONE = PlacementOptions()


class Router:
    """The core of a router, with workers whose prefix caches are full."""

    def __init__(self, workers: int, told: Sequence[cached_blocks.Conversation], rng: np.random.Generator) -> None:
        held = sum(len(one.token_ids) for one in told) // (4 * cached_blocks.BLOCK)
        self.fleet = cached_blocks.fleet(workers, 2 * held // workers + 1_024)
        cached_blocks.fill(self.fleet, told, rng)
        self._policy, self._rng = KvAware(), random.Random(1)

    def choose(self, key: str, data: bytes, now: float = 0.5, options: PlacementOptions = _ANYONE) -> Placement:
        """Does what a router does for each request, except for sending it."""
        scheme = self.fleet.model(cached_blocks.MODEL).hash_scheme
        assert scheme is not None
        prompt = PlacementRequest(key, len(data) // 4, scheme.hashes(data, "default"))
        found = self.fleet.place(cached_blocks.MODEL, prompt, self._policy, self._rng, now, options)
        assert isinstance(found, Placement)
        return found

    def unbook(self, key: str, placement: Placement) -> None:
        self.fleet.unbook(placement.worker.card.address, key)


def measure(workers: int, num_blocks: int, tokens: int, count: int) -> list[float]:
    """Returns the microseconds of each choice, sorted. Each prompt continues what a worker holds."""
    rng = np.random.default_rng(1)
    told = cached_blocks.conversations(workers, num_blocks, rng)
    router = Router(workers, told, rng)
    gc.collect()
    gc.freeze()
    taken = []
    for number, data in enumerate(cached_blocks.prompts(told, tokens, count, rng)):
        began = time.process_time_ns()
        key = f"r{number}"
        router.unbook(key, router.choose(key, data))
        taken.append((time.process_time_ns() - began) / 1e3)
    return sorted(taken)


def main() -> None:
    parser = flags.parser(__doc__, blocks=260_000, count=2_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 1_000])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_024, 8_192])
    options = parser.parse_args()
    for workers in options.workers:
        for tokens in options.tokens:
            taken = measure(workers, options.blocks, tokens, options.count)
            p99 = taken[int(0.99 * len(taken))]
            print(f"{workers} workers, {tokens} tokens: median {statistics.median(taken):.0f} µs, p99 {p99:.0f} µs")


if __name__ == "__main__":
    main()
