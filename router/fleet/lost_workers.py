"""Remembers workers that were lost, for those who look at the fleet."""

from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire.subjects import WorkerAddress
from tokenbus.router.workers.worker import Worker

_TTL_S = 600.0
_MAX_WORKERS = 256


class LostWorkers:
    """The last incarnations of workers that were lost within ten minutes and are not back."""

    def __init__(self) -> None:
        self._workers: TTLCache[Worker] = TTLCache(_TTL_S, _MAX_WORKERS)

    def __repr__(self) -> str:
        return f"<LostWorkers {len(self._workers)}>"

    def add(self, worker: Worker) -> None:
        self._workers.put(_key(worker.card.address), worker, worker.last_seen_at)

    def is_back(self, address: WorkerAddress) -> None:
        self._workers.pop(_key(address))

    def all(self, now: float) -> list[Worker]:
        """Returns them, the last one lost last."""
        self._workers.expire(now)
        return self._workers.values(now)


def _key(address: WorkerAddress) -> str:
    return f"{address.model} {address.worker_id}"
