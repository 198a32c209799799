"""A beat: what a process says of its idle workers, compared with what is known of them."""

from collections.abc import Mapping
from typing import NamedTuple

from tokenbus.protocol.wire import internal
from tokenbus.protocol.wire.subjects import WorkerAddress
from tokenbus.router.workers.worker import Worker


class BeatUpdate(NamedTuple):
    """The effects of a beat."""

    heard: list[Worker]
    """The workers for which it is a sign of life."""
    back: list[Worker]
    """Those of them that got no requests before, because of their silence."""
    refused: list[str]
    """The workers for which it can't speak: those of another process, and those whose log it contradicts."""
    strange: list[str]
    """Workers that are not known, or not by this epoch."""
    num_lost: int
    """Entries of event logs that have not arrived."""


def apply(
    workers: Mapping[WorkerAddress, Worker], model: str, process: str, beat: internal.Beat, now: float
) -> BeatUpdate:
    """Renews the leases of the workers of a beat, and compares their event logs with it."""
    update = BeatUpdate([], [], [], [], 0)
    num_lost = 0
    for worker_id, seq in beat.seqs.items():
        worker = workers.get(WorkerAddress(model, worker_id))
        if worker is None or worker.card.epoch != beat.epoch:
            update.strange.append(worker_id)
            continue
        before = worker.log.num_lost
        if worker.card.process != process or not worker.log.confirm(seq):
            update.refused.append(worker_id)
            continue
        num_lost += worker.log.num_lost - before
        was_silent = now - worker.last_seen_at >= worker.suspect_after_s
        if was_silent or worker.lease_expired or worker.has_no_responders:
            update.back.append(worker)
        worker.has_no_responders = False
        worker.renew_lease(now, beat.next_ms / 1e3)
        update.heard.append(worker)
    return update._replace(num_lost=num_lost)
