"""Compares how long a router takes to choose a worker with NVIDIA Dynamo's `SelectionService` in the same process.

Run: .venv/bin/python -m bench.router.choice_dynamo [--pairs 9] [--tokens 1024 8192] [--blocks 260000]

A choice starts with a list of token ids and ends with a worker on which the prompt is booked: hash, match, cost, book.
In Dynamo that is `await select_and_reserve(...)`, which has received the same blocks over ZMQ. Both sides get the same
prompts, each of which continues a conversation that some worker holds. Bookings are taken back after each round,
outside the measurement. A choice is measured in CPU time of all threads of this process, and in wall time."""

import asyncio
import gc
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import uvloop

from bench import flags, paired
from bench.baselines import dynamo_wheel
from bench.router import cached_blocks, choice
from tokenbus.protocol.wire import block_hash
from tokenbus.router.placement.placement import PlacementOptions
from tokenbus.router.placement.predictions import PREDICTION_TTL_S

_SEED = 1
_EXPLAINED = PlacementOptions(explain=True)
_SAMPLES = 100


class Sample(NamedTuple):
    """The time of one choice, in microseconds."""

    cpu: float
    wall: float


class Watch:
    """Times a choice by both clocks."""

    def __init__(self) -> None:
        self.taken: list[Sample] = []

    def __enter__(self) -> None:
        self._wall, self._cpu = time.perf_counter_ns(), time.process_time_ns()

    def __exit__(self, *_: object) -> None:
        cpu, wall = time.process_time_ns() - self._cpu, time.perf_counter_ns() - self._wall
        self.taken.append(Sample(cpu / 1e3, wall / 1e3))


Round = Callable[[Sequence[list[int]]], list[Sample]]
"""Chooses a worker for each prompt."""


class TokenbusSide:
    """The core of a router, with workers whose caches are full."""

    def __init__(self, workers: int, told: Sequence[cached_blocks.Conversation]) -> None:
        self._router = choice.Router(workers, told, np.random.default_rng(_SEED))
        self._now = 0.5

    def round(self, prompts: Sequence[list[int]]) -> list[Sample]:
        watch, placed = Watch(), []
        for number, token_ids in enumerate(prompts):
            with watch:
                data = block_hash.pack_token_ids(token_ids)
                placed.append(self._router.choose(f"r{number}", data, self._now))
        for number, one in enumerate(placed):
            self._router.unbook(f"r{number}", one)
        return watch.taken

    def overlap(self, token_ids: list[int]) -> dict[int, int]:
        """Returns the leading blocks that each worker holds, without workers that hold none. All predictions have
        expired."""
        self._now += PREDICTION_TTL_S
        self._router.fleet.renew_all_leases(self._now)
        found = self._router.choose("sample", block_hash.pack_token_ids(token_ids), self._now, _EXPLAINED)
        self._router.unbook("sample", found)
        assert found.report is not None
        return {int(one.worker_id[1:]): one.overlap_blocks for one in found.report.candidates if one.overlap_blocks}


class DynamoSide:
    """Dynamo's service, with the same workers."""

    def __init__(
        self, core: Any, runner: asyncio.Runner, told: Sequence[cached_blocks.Conversation], workers: int
    ) -> None:
        self._runner = runner
        held = sum(len(one.token_ids) for one in told) // (4 * cached_blocks.BLOCK)
        self._service = runner.run(_start(core))
        filling = dynamo_wheel.fill(self._service, told, workers, 2 * held // workers + 1_024)
        self._publishers = runner.run(filling)

    def round(self, prompts: Sequence[list[int]]) -> list[Sample]:
        return self._runner.run(self._choose(prompts))

    async def _choose(self, prompts: Sequence[list[int]]) -> list[Sample]:
        watch = Watch()
        for number, token_ids in enumerate(prompts):
            request = {"model_name": dynamo_wheel.MODEL, "token_ids": token_ids, "selection_id": f"r{number}"}
            with watch:
                await self._service.select_and_reserve(request)
        for number in range(len(prompts)):
            await self._service.free_reservation(f"r{number}")
        return watch.taken

    def overlap(self, token_ids: list[int]) -> dict[int, int]:
        """Returns the leading blocks that each worker holds, without workers that hold none."""
        return self._runner.run(dynamo_wheel.overlap(self._service, array("I", token_ids).tobytes()))

    def close(self) -> None:
        self._runner.run(_stop(self._service))
        self._publishers.close()


async def _start(core: Any) -> Any:
    return core.SelectionService(indexer_threads=4)


async def _stop(service: Any) -> None:
    await service.shutdown_async()


class Supply:
    """Makes new prompts for each round, the same for both sides."""

    def __init__(self, told: Sequence[cached_blocks.Conversation], tokens: int, count: int) -> None:
        self._told, self._tokens, self._count = told, tokens, count

    def of_round(self, number: int) -> list[list[int]]:
        found = cached_blocks.prompts(self._told, self._tokens, self._count, np.random.default_rng([_SEED, number]))
        return [array("I", one).tolist() for one in found]


def compare(name: str, first: Round, second: Round, supplies: tuple[Supply, Supply], rounds: int) -> list[str]:
    """Returns a line for each clock: median and p99 of both sides, and the ratio of their medians, second / first."""
    samples: tuple[list[list[Sample]], list[list[Sample]]] = ([], [])

    def once(at: int, work: Round) -> Callable[[], None]:
        return lambda: samples[at].append(work(supplies[at].of_round(len(samples[at]))))

    paired.compare(once(0, first), once(1, second), rounds)
    lines = []
    for clock, label in enumerate(Sample._fields):
        measured = [[[one[clock] for one in taken] for taken in found[1:]] for found in samples]
        ratios = [statistics.median(b) / statistics.median(a) for a, b in zip(*measured, strict=True)]
        low, middle, high = paired.quartiles(ratios)
        cells = "".join(_cell([value for taken in found for value in taken]) for found in measured)
        lines.append(f"{name:28}{label:>6}{cells}    {middle:.3f} ({low:.3f} to {high:.3f})")
    return lines


def _cell(taken: Sequence[float]) -> str:
    return f"{statistics.median(taken):>12.0f}{sorted(taken)[int(0.99 * len(taken))]:>8.0f}"


def check(ours: TokenbusSide, theirs: DynamoSide, supply: Supply) -> float:
    """Checks that both sides see the same overlap at every worker; returns the mean of the largest overlaps, in
    blocks."""
    best = []
    for token_ids in supply.of_round(1 << 20)[:_SAMPLES]:
        seen, other = ours.overlap(token_ids), theirs.overlap(token_ids)
        if seen != other:
            sys.exit(f"the two do not hold the same: {seen} against {other}")
        best.append(max(seen.values(), default=0))
    return statistics.mean(best)


def main() -> None:
    parser = flags.parser(__doc__, workers=64, blocks=260_000, pairs=9)
    parser.add_argument("--many", type=int, default=1_000, help="workers with which ours is compared with itself")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_024, 8_192])
    parser.add_argument("--count", type=int, default=150, help="choices of a round")
    options = parser.parse_args()
    core = dynamo_wheel.find()
    told = cached_blocks.conversations(options.workers, options.blocks, np.random.default_rng(_SEED))
    told_many = cached_blocks.conversations(options.many, options.blocks, np.random.default_rng(_SEED))
    ours, many = TokenbusSide(options.workers, told), TokenbusSide(options.many, told_many)
    lines = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        theirs = DynamoSide(core, runner, told, options.workers)
        gc.collect()
        gc.freeze()
        for tokens in options.tokens:
            supply, supply_many = Supply(told, tokens, options.count), Supply(told_many, tokens, options.count)
            print(f"{tokens} tokens: both see the same overlap, {check(ours, theirs, supply):.1f} blocks on average")
            name = f"{tokens} tokens, Dynamo/ours"
            lines += compare(name, theirs.round, ours.round, (supply, supply), options.pairs)
            name = f"{tokens} tokens, {options.workers}/{options.many}"
            lines += compare(name, ours.round, many.round, (supply, supply_many), options.pairs)
        theirs.close()
    head = f"{'median':>12}{'p99':>8}"
    print(f"\n{'µs of a choice':28}{'clock':>6}{head}{head}    second / first (quartiles)", *lines, sep="\n")


if __name__ == "__main__":
    main()
