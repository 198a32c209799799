"""Compares how fast a router applies KV events with the `RadixTree` of NVIDIA Dynamo's wheel.

Run: .venv/bin/python -m bench.router.ingest [--pairs 9] [--blocks 131072] [--run 16]

Each side gets its own wire format, encoded in advance. Ours is MessagePack, decoded and applied to the fleet: one
message for each run of 16 blocks, with load, state and sequence number. Dynamo's is the JSON that its binding takes:
one event for each run. Blocks are stored into an empty index, or each stored run replaces another one, which is removed
in the same message on our side and in an event of its own on Dynamo's. Times are CPU times of all threads of this
process; nothing goes over a socket. All threads share one core, since waking Dynamo's on another core takes up to three
times as long as its work."""

import gc
import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from bench import flags, paired
from bench.baselines import dynamo_wheel
from bench.router import cached_blocks
from tokenbus.protocol.wire import block_hash, codec, internal, messages
from tokenbus.router.placement.placement import Placement, PlacementOptions, PlacementRequest
from tokenbus.router.placement.policies import KvAware

_SEED = 1
_LOAD = messages.Load(running=3, used_blocks=100)
_DECODER = codec.Decoder(internal.Events)
_TWIN = 0x5555_5555_5555_5555


class Run(NamedTuple):
    """Consecutive blocks of a chain, which a worker stores together."""

    worker: int
    parent: int
    """0 at the start of a chain."""
    hashes: list[int]

    def twin(self) -> "Run":
        """Returns other blocks in the same position."""
        return Run(self.worker, self.parent and self.parent ^ _TWIN, [name ^ _TWIN for name in self.hashes])


class Change(NamedTuple):
    """A worker stores a run, and may remove another one."""

    stored: Run
    removed: Run | None = None


Payload = tuple[int, bytes]
"""The number of a worker, and a message of it."""


class Side(Protocol):
    """Applies changes in its own format."""

    def encode(self, changes: Sequence[Change]) -> list[Payload]: ...

    def take(self, payloads: Iterable[Payload]) -> None: ...

    def holds(self, run: Run) -> int:
        """Returns how many blocks of a chain's first run it believes its worker to hold."""
        ...


class TokenbusSide:
    def __init__(self, workers: int, max_blocks: int) -> None:
        self._fleet = cached_blocks.fleet(workers, max_blocks)
        self._seqs = [0] * workers

    def encode(self, changes: Sequence[Change]) -> list[Payload]:
        return [(change.stored.worker, codec.encode(self._event(change))) for change in changes]

    def take(self, payloads: Iterable[Payload]) -> None:
        decode, take = _DECODER.decode, self._fleet.apply_events
        for _, payload in payloads:
            take(cached_blocks.MODEL, decode(payload), 0.0)

    def _event(self, change: Change) -> internal.Events:
        stored, removed = change
        seq = self._seqs[stored.worker]
        self._seqs[stored.worker] += 1
        run = internal.BlockRun(parent=stored.parent or cached_blocks.PARENT, hashes=stored.hashes)
        return cached_blocks.events(stored.worker, seq, _LOAD, [run], removed.hashes[::-1] if removed else [])

    def holds(self, run: Run) -> int:
        prompt = PlacementRequest("r", cached_blocks.BLOCK * len(run.hashes), run.hashes)
        only = PlacementOptions(only=cached_blocks.worker_id(run.worker))
        found = self._fleet.place("m", prompt, KvAware(), random.Random(_SEED), 0.0, only)
        assert isinstance(found, Placement)
        return found.overlap_blocks


class DynamoSide:
    def __init__(self, core: Any) -> None:
        self._tree = core.RadixTree()

    def encode(self, changes: Sequence[Change]) -> list[Payload]:
        return [(change.stored.worker, payload) for change in changes for payload in _events(change)]

    def take(self, payloads: Iterable[Payload]) -> None:
        apply = self._tree.apply_event
        for worker, payload in payloads:
            apply(worker, payload)

    def holds(self, run: Run) -> int:
        found: int = self._tree.find_matches(run.hashes).scores.get((run.worker, 0), 0)
        return found


def _events(change: Change) -> list[bytes]:
    """Returns events as Dynamo's binding takes them. Our hash of a block serves as both of its hashes."""
    stored, removed = change
    named = [{"block_hash": name, "tokens_hash": name} for name in stored.hashes]
    found = [_json({"stored": {"parent_hash": stored.parent or None, "blocks": named}})]
    if removed is not None:
        found.append(_json({"removed": {"block_hashes": removed.hashes[::-1]}}))
    return found


def _json(data: dict[str, Any]) -> bytes:
    return json.dumps({"event_id": 0, "data": data, "dp_rank": 0}, separators=(",", ":")).encode()


def runs(workers: int, num_blocks: int, length: int) -> list[Run]:
    """Returns the runs that workers with full caches hold: the chains in order, the workers in turn."""
    of_worker: dict[int, list[Run]] = {}
    for one in cached_blocks.conversations(workers, num_blocks, np.random.default_rng(_SEED)):
        parent, hashes = 0, block_hash.block_hashes_of_bytes(one.token_ids, cached_blocks.BLOCK, cached_blocks.PARENT)
        for start in range(0, len(hashes), length):
            cut = hashes[start : start + length]
            of_worker.setdefault(one.worker, []).append(Run(one.worker, parent, cut))
            parent = cut[-1]
    return [run for turn in itertools.zip_longest(*of_worker.values()) for run in turn if run is not None]


def exchange(new: Sequence[Run], old: Sequence[Run]) -> list[Change]:
    """Makes each worker store run after run, and remove an old one for each, the last of a chain first."""
    leaving: dict[int, list[Run]] = {}
    for run in old:
        leaving.setdefault(run.worker, []).append(run)
    return [Change(run, leaving[run.worker].pop()) for run in new]


def check(way: Side, there: Sequence[Run], gone: Sequence[Run] = ()) -> None:
    """Checks by the first run of each chain that everything was applied."""
    firsts = [run for run in there if not run.parent], [run for run in gone if not run.parent]
    if any(way.holds(run) != len(run.hashes) for run in firsts[0]) or any(way.holds(run) for run in firsts[1]):
        sys.exit(f"{type(way).__name__} has not applied what it was given")


def store(make: Callable[[], Side], held: Sequence[Run], rounds: int) -> tuple[list[Side], Callable[[], None]]:
    """Returns empty sides, and a function that fills the next of them at each call."""
    ways = [make() for _ in range(rounds)]
    return ways, _in_turn([(way, way.encode([Change(run) for run in held])) for way in ways])


def replace(way: Side, held: Sequence[Run], others: Sequence[Run], rounds: int) -> Callable[[], None]:
    """Returns a function that replaces all held runs by the others, or back, at each call."""
    way.take(way.encode([Change(run) for run in held]))
    sides = itertools.islice(itertools.cycle([(others, held), (held, others)]), rounds)
    return _in_turn([(way, way.encode(exchange(new, old))) for new, old in sides])


def _in_turn(works: Sequence[tuple[Side, list[Payload]]]) -> Callable[[], None]:
    """Returns a function that does the next piece of work at each call."""
    left = iter(works)

    def work() -> None:
        way, payloads = next(left)
        way.take(payloads)

    return work


def row(name: str, found: tuple[float, float, paired.Ratio], num_blocks: int) -> str:
    first, second, ratio = found
    rates = [1 / one for one in (ratio.third_quartile, ratio.median, ratio.first_quartile)]
    speed = f"{rates[1]:.2f} ({rates[0]:.2f} to {rates[2]:.2f})"
    return f"{name:26}{num_blocks / second / 1e3:>14.0f}{num_blocks / first / 1e3:>14.0f}    {speed}"


def main() -> None:
    options = flags.parser(__doc__, workers=64, blocks=131_072, run=16, pairs=9).parse_args()
    core = dynamo_wheel.find()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    held = runs(options.workers, options.blocks, options.run)
    others, rounds, num_blocks = [run.twin() for run in held], options.pairs + 1, sum(len(run.hashes) for run in held)

    def ours() -> TokenbusSide:
        return TokenbusSide(options.workers, 4 * options.blocks // options.workers)

    def theirs() -> DynamoSide:
        return DynamoSide(core)

    their_ways, their_work = store(theirs, held, rounds)
    our_ways, our_work = store(ours, held, rounds)
    gc.collect()
    gc.freeze()
    stored = paired.compare(their_work, our_work, options.pairs)
    for way in their_ways + our_ways:
        check(way, held, others)
    first, second = theirs(), ours()
    their_work, our_work = (replace(way, held, others, rounds) for way in (first, second))
    gc.collect()
    gc.freeze()
    replaced = paired.compare(their_work, our_work, options.pairs)
    for way in (first, second):
        check(way, *((others, held) if rounds % 2 else (held, others)))
    print(f"\n{'thousand blocks/s of CPU':26}{'ours':>14}{'Dynamo':>14}    ours / Dynamo (quartiles)")
    print(row("stored", stored, num_blocks))
    print(row("stored and removed mixed", replaced, 2 * num_blocks))


if __name__ == "__main__":
    main()
