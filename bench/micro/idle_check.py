"""Measures an engine's two checks of its KV cache when it becomes idle: of the counters, and of every block.

Run: .venv/bin/python -m bench.micro.idle_check [--blocks 7700 65000] [--lanes 64] [--rounds 9]

The block pool is filled with unused prefixes of equal length, one for each lane. The result is the CPU time of one
check of each kind, in turn. Every engine does the first; tests and TOKENBUS_DEBUG=1 do the second."""

import argparse
import statistics
import time
from array import array
from collections.abc import Callable

from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.kv.prefix_tree import Domain

_BLOCK_TOKENS = 16


def filled_pool(total_blocks: int, lanes: int) -> BlockPool:
    """Returns a pool whose blocks are all cached, except for fewer than there are lanes."""
    pool = BlockPool(total_blocks, _BLOCK_TOKENS, lanes)
    length = total_blocks // lanes * _BLOCK_TOKENS
    for number in range(lanes):
        token_ids = array("I", [number] * length)
        allocation = pool.allocate(Domain())
        allocation.allocate_blocks(length)
        allocation.cache_blocks(token_ids, length)
        pool.free(allocation, token_ids, length)
    assert pool.cache.evictable_blocks == total_blocks // lanes * lanes
    return pool


def _ms(check: Callable[[], None], times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        check()
    return (time.process_time() - began) / times * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, nargs="+", default=[7_700, 65_000])
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    for total in options.blocks:
        pool = filled_pool(total, options.lanes)
        rounds = [(_ms(pool.check_counts, 50), _ms(pool.check_integrity, 1)) for _ in range(options.rounds)]
        for name, values in zip(("counters", "every block"), zip(*rounds, strict=True), strict=True):
            low, middle, high = statistics.quantiles(values, n=4)
            print(f"{total:7,} blocks, {name:12}{middle:9.3f} ms ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
