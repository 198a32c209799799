"""Measures how long a router takes to choose a worker, from token ids to the booking: hash, match, cost, book.

Run: .venv/bin/python -m bench.router.choice [--workers 64 1000] [--blocks 260000] [--tokens 1024 8192]

The workers hold conversations of 64 to 512 blocks, `--blocks` of them in all. Each prompt continues one of these
conversations. Times are CPU time of this process, in microseconds."""

import gc
import random
import statistics
import time

import numpy as np

from bench import flags
from bench.router import cached_blocks
from tokenbus.router.placement.placement import Placement, PlacementOptions, PlacementRequest
from tokenbus.router.placement.policies import KvAware

_ANYONE = PlacementOptions()


class Testbed:
    """A fleet with full prefix caches, and prompts that continue what the workers hold."""

    def __init__(self, workers: int, num_blocks: int, seed: int) -> None:
        self.rng, self._numbers = random.Random(seed), np.random.default_rng(seed)
        self._told = cached_blocks.conversations(workers, num_blocks, self._numbers)
        self.fleet = cached_blocks.fleet(workers, 2 * num_blocks // workers + 1_024)
        cached_blocks.fill(self.fleet, self._told, self._numbers)

    def prompts(self, tokens: int, count: int) -> list[bytes]:
        return cached_blocks.prompts(self._told, tokens, count, self._numbers)

    def choose(self, number: int, data: bytes, policy: KvAware) -> None:
        """Does what a router does for each request, except for sending it."""
        scheme = self.fleet.hash_scheme_of("m")
        assert scheme is not None
        prompt = PlacementRequest(f"r{number}", len(data) // 4, scheme.hashes(data, "default"))
        placement = self.fleet.place("m", prompt, policy, self.rng, 0.5, _ANYONE)
        assert isinstance(placement, Placement)
        self.fleet.unbook(placement.worker.card.address, prompt.key)


def measure(workers: int, num_blocks: int, tokens: int, count: int) -> list[float]:
    """Returns the microseconds of each choice, sorted."""
    bed = Testbed(workers, num_blocks, seed=1)
    policy = KvAware()
    gc.collect()
    gc.freeze()
    taken = []
    for number, data in enumerate(bed.prompts(tokens, count)):
        began = time.process_time_ns()
        bed.choose(number, data, policy)
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
