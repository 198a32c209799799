"""Cuts a snapshot of a worker into messages of a bounded size; pure."""

from protocol import internal, messages

REQUESTS_PER_PART = 256
"""A running request takes at most about 600 bytes, so that a part stays below `PART_BYTES`."""


def split(
    worker_id: str, epoch: str, seq: int, running: list[internal.RunningRequest], load: messages.Load
) -> list[internal.SnapshotPart]:
    """At least one part; together they say what the worker held after event `seq`."""
    groups = [running[at : at + REQUESTS_PER_PART] for at in range(0, len(running), REQUESTS_PER_PART)] or [[]]
    return [
        internal.SnapshotPart(
            worker_id=worker_id,
            epoch=epoch,
            seq=seq,
            part=number,
            parts=len(groups),
            runs=[],
            running=group,
            load=load,
        )
        for number, group in enumerate(groups)
    ]
