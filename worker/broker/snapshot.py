"""Splits a snapshot of a worker into messages of bounded size; pure."""

from collections.abc import Iterable, Iterator

from tokenbus.protocol.wire import internal, messages

REQUESTS_PER_PART = 256
"""A running request takes at most about 600 bytes, so a part stays below `PART_BYTES`."""
HASHES_PER_PART = 16_384
"""A hash takes 9 bytes and a run of one block about 40, so with `RUNS_PER_PART` a part stays below `PART_BYTES`."""
RUNS_PER_PART = 2_048


def split(
    worker_id: str,
    epoch: str,
    seq: int,
    running: list[internal.RunningRequest],
    runs: list[internal.BlockRun],
    load: messages.Load,
) -> list[internal.SnapshotPart]:
    """Returns at least one part; together they state what the worker held after event `seq`."""
    contents: list[tuple[list[internal.RunningRequest], list[internal.BlockRun]]] = []
    contents += [(running[at : at + REQUESTS_PER_PART], []) for at in range(0, len(running), REQUESTS_PER_PART)]
    contents += [([], part) for part in _parts_of(_cut(runs))]
    contents = contents or [([], [])]
    return [
        internal.SnapshotPart(
            worker_id=worker_id,
            epoch=epoch,
            seq=seq,
            part=number,
            parts=len(contents),
            runs=blocks,
            running=requests,
            load=load,
        )
        for number, (requests, blocks) in enumerate(contents)
    ]


def _cut(runs: Iterable[internal.BlockRun]) -> Iterator[internal.BlockRun]:
    """Splits runs so that each has at most `HASHES_PER_PART` hashes."""
    for run in runs:
        for at in range(0, len(run.hashes), HASHES_PER_PART):
            # a split run continues behind the last hash of the part before
            parent = run.hashes[at - 1] if at else run.parent
            yield internal.BlockRun(parent=parent, hashes=run.hashes[at : at + HASHES_PER_PART])


def _parts_of(runs: Iterable[internal.BlockRun]) -> Iterator[list[internal.BlockRun]]:
    """Groups runs into parts within both limits."""
    part: list[internal.BlockRun] = []
    num_hashes = 0
    for run in runs:
        # a part is full when either limit is reached
        if part and (len(part) == RUNS_PER_PART or num_hashes + len(run.hashes) > HASHES_PER_PART):
            yield part
            part, num_hashes = [], 0
        part.append(run)
        num_hashes += len(run.hashes)
    if part:
        yield part
