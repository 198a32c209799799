"""Fleets whose workers have full prefix caches: the same for all sides of a benchmark, from a seed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tokenbus.protocol.wire import block_hash, internal, messages
from tokenbus.router.fleet.fleet import Fleet

BLOCK = 16
MODEL = "m"
PARENT = block_hash.root_hash(block_hash.PrefixDomain("f", tenant="default"))
_VOCABULARY = 150_000
_EPOCH = "1-a"


class Conversation(NamedTuple):
    """A chain of blocks that one worker holds."""

    worker: int
    token_ids: bytes


def conversations(workers: int, num_blocks: int, rng: np.random.Generator) -> list[Conversation]:
    """Returns conversations of 64 to 512 blocks each, until all workers together hold `num_blocks`."""
    found = []
    each = num_blocks // workers
    for worker in range(workers):
        held = 0
        while held < each:
            length = min(int(rng.integers(64, 513)), each - held)
            found.append(Conversation(worker, some_tokens(BLOCK * length, rng)))
            held += length
    return found


def some_tokens(count: int, rng: np.random.Generator) -> bytes:
    return rng.integers(0, _VOCABULARY, count, dtype=np.uint32).tobytes()


def prompts(told: Sequence[Conversation], tokens: int, count: int, rng: np.random.Generator) -> list[bytes]:
    """Returns packed token ids. Each prompt starts with a conversation that some worker holds, for at most half its
    length."""
    found = []
    for _ in range(count):
        begun = told[int(rng.integers(len(told)))].token_ids[: 4 * tokens // 2]
        found.append(begun + some_tokens(tokens - len(begun) // 4, rng))
    return found


def worker_id(number: int) -> str:
    return f"w{number}"


def card(number: int, max_blocks: int) -> messages.Card:
    return messages.Card(
        worker_id=worker_id(number),
        epoch=_EPOCH,
        model=MODEL,
        source="m",
        engine="sim",
        engine_version="1",
        context_length=131_072,
        max_num_seqs=256,
        max_num_batched_tokens=8_192,
        hash_scheme="xxh3-64:f",
        features=["generate"],
        state=messages.WorkerState.READY,
        host="h",
        pids=messages.Pids(front=1, engine=2),
        versions={},
        kv_block_size=BLOCK,
        total_kv_blocks=max_blocks,
    )


def events(
    number: int,
    seq: int,
    load: messages.Load,
    stored: Sequence[internal.BlockRun] = (),
    removed: Sequence[int] = (),
) -> internal.Events:
    """Returns an entry of that worker's event log."""
    return internal.Events(
        worker_id=worker_id(number),
        epoch=_EPOCH,
        seq=seq,
        load=load,
        state=messages.WorkerState.READY,
        stored=list(stored),
        removed=list(removed),
    )


def fleet(workers: int, max_blocks: int) -> Fleet:
    """Returns workers of one model that hold nothing yet."""
    found = Fleet(began_at=0.0)
    for number in range(workers):
        found.apply_card(card(number, max_blocks), 0.0)
    return found


def fill(bed: Fleet, told: Sequence[Conversation], rng: np.random.Generator) -> None:
    """Makes each worker report the blocks it holds, and a random load."""
    runs: dict[int, list[internal.BlockRun]] = {}
    for one in told:
        hashes = block_hash.block_hashes_of_bytes(one.token_ids, BLOCK, PARENT)
        runs.setdefault(one.worker, []).append(internal.BlockRun(parent=PARENT, hashes=hashes))
    for number, stored in runs.items():
        held = sum(len(run.hashes) for run in stored)
        load = messages.Load(running=int(rng.integers(8)), used_blocks=int(rng.integers(held)))
        bed.apply_events(MODEL, events(number, 0, load, stored), 0.0)
