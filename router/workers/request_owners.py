"""Tracks which worker runs which request, by the workers' own events."""

from collections.abc import Iterable, Mapping

from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import limits
from tokenbus.protocol.wire.subjects import WorkerAddress
from tokenbus.router.workers.worker import Worker

MAX_RUNNING = 65_536
"""The most keys kept per worker; beyond that its requests have no known owner."""
_MAX_ENDED = 65_536
"""The most ended requests whose workers are known: at 1,000 requests a second all of a minute."""


class RequestOwners:
    """The running requests of all workers, whichever router placed them. Also maintains each worker's own sets of
    keys."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, str], Worker] = {}
        """By model and key: the worker of that model that last claimed the key."""
        self._ended: TTLCache[WorkerAddress] = TTLCache(limits.ENDED_STREAM_TTL_S, _MAX_ENDED)
        """By model and key: the worker of that model that ended a request, and publishes its stream again."""

    def __repr__(self) -> str:
        return f"<RequestOwners of {len(self._by_key)} requests>"

    def owner_of(self, model: str, key: str) -> Worker | None:
        """Returns the worker of that model that reports running a request."""
        return self._by_key.get((model, key))

    def holder_of(self, model: str, key: str, now: float) -> WorkerAddress | None:
        """Returns the worker of that model that has a request's stream, which may have ended."""
        owner = self._by_key.get((model, key))
        return owner.card.address if owner is not None else self._ended.get(f"{model} {key}", now)

    def record_started(self, worker: Worker, key: str) -> None:
        """Records that a worker has started a request, which is no longer merely booked."""
        booking = worker.bookings.pop(key, None)
        if booking is not None and booking.will_cache_blocks and len(worker.expected_to_cache) < MAX_RUNNING:
            worker.expected_to_cache.add(key)
        if len(worker.running) < MAX_RUNNING:
            worker.running.add(key)
            self._by_key[worker.card.model, key] = worker

    def record_finished(self, worker: Worker, key: str, now: float) -> None:
        """Records that a worker has ended a request."""
        self._record_ended(worker, key, now)
        worker.bookings.pop(key, None)
        self._release(worker, key)
        worker.running.discard(key)
        if key in worker.expected_to_cache:
            worker.expected_to_cache.remove(key)
            worker.num_unreported += 1

    def record_taken(self, worker: Worker, key: str) -> None:
        """Records that a router has taken a request from a worker, which says nothing about the worker's cache."""
        worker.bookings.pop(key, None)
        self._release(worker, key)
        worker.running.discard(key)
        worker.expected_to_cache.discard(key)

    def replace_running(self, worker: Worker, keys: Iterable[str], now: float) -> None:
        """Replaces everything known to run on a worker with a snapshot's keys."""
        keys = list(keys)
        for key in worker.running.difference(keys):
            self._record_ended(worker, key, now)
        for key in keys:
            worker.bookings.pop(key, None)
        self.remove_worker(worker)
        worker.running = set(keys[:MAX_RUNNING])
        self._by_key |= {(worker.card.model, key): worker for key in worker.running}
        worker.expected_to_cache &= worker.running

    def remove_worker(self, worker: Worker) -> None:
        """Removes all requests of a removed worker."""
        for key in worker.running:
            self._release(worker, key)

    def check_integrity(self, workers: Mapping[WorkerAddress, Worker]) -> None:
        """Asserts that every owner is one of these workers and has the request in its own set."""
        for (model, key), worker in self._by_key.items():
            assert key in worker.running, key
            assert workers[WorkerAddress(model, worker.card.worker_id)] is worker

    def expire(self, now: float) -> None:
        """Forgets the requests that ended too long ago."""
        self._ended.expire(now)

    def _record_ended(self, worker: Worker, key: str, now: float) -> None:
        self._ended.put(f"{worker.card.model} {key}", worker.card.address, now)

    def _release(self, worker: Worker, key: str) -> None:
        if self._by_key.get((worker.card.model, key)) is worker:
            del self._by_key[worker.card.model, key]
