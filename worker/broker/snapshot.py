"""Splits a snapshot of a worker into messages of bounded size."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tokenbus.protocol.wire import codec, internal, messages

ItemT = TypeVar("ItemT")

REQUESTS_PER_PART = 48
"""A running request takes at most about 700 bytes without tokens, so a part stays below `PART_BYTES`."""
TOKEN_BYTES_PER_PART = 8 * 1024
"""Bytes of sampled tokens and their log probabilities, in addition to the rest of `REQUESTS_PER_PART` requests."""
HASHES_PER_PART = 2_560
"""A hash takes 9 bytes and a run of one block about 40, so with `RUNS_PER_PART` a part stays below `PART_BYTES`."""
RUNS_PER_PART = 512


def split(
    worker_id: str,
    epoch: str,
    seq: int,
    running: list[internal.RunningRequest],
    runs: list[internal.BlockRun],
    load: messages.Load,
) -> list[internal.SnapshotPart]:
    """Returns at least one part; together they state what the worker held after event `seq`. A request with many tokens
    spans several parts, in token order."""
    contents: list[tuple[list[internal.RunningRequest], list[internal.BlockRun]]] = []
    requests = _parts_of(_cut_requests(running), _token_bytes, REQUESTS_PER_PART, TOKEN_BYTES_PER_PART)
    blocks = _parts_of(_cut_runs(runs), lambda run: len(run.hashes), RUNS_PER_PART, HASHES_PER_PART)
    contents += [(part, []) for part in requests]
    contents += [([], part) for part in blocks]
    contents = contents or [([], [])]
    return [
        internal.SnapshotPart(
            worker_id=worker_id,
            epoch=epoch,
            seq=seq,
            part=number,
            parts=len(contents),
            runs=part_runs,
            running=part_running,
            load=load,
        )
        for number, (part_running, part_runs) in enumerate(contents)
    ]


def _token_bytes(request: internal.RunningRequest) -> int:
    return len(request.token_ids) + len(request.logprobs)


def _cut_requests(running: Iterable[internal.RunningRequest]) -> Iterator[internal.RunningRequest]:
    """Splits requests so that each has at most `TOKEN_BYTES_PER_PART`."""
    for request in running:
        if _token_bytes(request) <= TOKEN_BYTES_PER_PART:
            yield request
            continue
        for at in range(0, len(request.token_ids), TOKEN_BYTES_PER_PART):
            yield codec.replace(request, token_ids=request.token_ids[at : at + TOKEN_BYTES_PER_PART], logprobs=b"")
        for at in range(0, len(request.logprobs), TOKEN_BYTES_PER_PART):
            yield codec.replace(request, token_ids=b"", logprobs=request.logprobs[at : at + TOKEN_BYTES_PER_PART])


def _cut_runs(runs: Iterable[internal.BlockRun]) -> Iterator[internal.BlockRun]:
    """Splits runs so that each has at most `HASHES_PER_PART` hashes."""
    for run in runs:
        for at in range(0, len(run.hashes), HASHES_PER_PART):
            # a split run continues after the last hash of the previous part
            parent = run.hashes[at - 1] if at else run.parent
            yield internal.BlockRun(parent=parent, hashes=run.hashes[at : at + HASHES_PER_PART])


def _parts_of(
    items: Iterable[ItemT], size: Callable[[ItemT], int], max_items: int, max_size: int
) -> Iterator[list[ItemT]]:
    """Groups items into parts within both limits."""
    part: list[ItemT] = []
    part_size = 0
    for item in items:
        # a part is full when either limit is reached
        if part and (len(part) == max_items or part_size + size(item) > max_size):
            yield part
            part, part_size = [], 0
        part.append(item)
        part_size += size(item)
    if part:
        yield part
