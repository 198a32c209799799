"""Who runs which request, by the workers' own word; pure."""

from collections.abc import Iterable, Mapping

from tokenbus.protocol.wire.subjects import WorkerAddress
from tokenbus.router.fleet.worker import Worker

MAX_RUNNING = 65_536
"""Requests of one worker that are remembered by their ids."""


class RequestOwners:
    """The requests that workers run, whoever has placed them there. Keeps the workers' own sets of them as well."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, str], Worker] = {}
        """By model and key, by the last word of any worker of the model."""

    def __repr__(self) -> str:
        return f"<RequestOwners of {len(self._by_key)} requests>"

    def find(self, model: str, key: str) -> Worker | None:
        """The worker of that model that says it holds a request."""
        return self._by_key.get((model, key))

    def start(self, worker: Worker, key: str) -> None:
        """A worker has a request: it is no longer merely booked."""
        booking = worker.bookings.pop(key, None)
        if booking is not None and booking.will_cache_blocks and len(worker.expected_to_cache) < MAX_RUNNING:
            worker.expected_to_cache.add(key)
        if len(worker.running) < MAX_RUNNING:
            worker.running.add(key)
            self._by_key[worker.card.model, key] = worker

    def finish(self, worker: Worker, key: str) -> None:
        """A worker has ended a request, which may have left blocks."""
        worker.bookings.pop(key, None)
        self._release(worker, key)
        worker.running.discard(key)
        if key in worker.expected_to_cache:
            worker.expected_to_cache.remove(key)
            worker.num_unreported += 1

    def replace(self, worker: Worker, keys: Iterable[str]) -> None:
        """A snapshot says all that a worker runs."""
        keys = list(keys)
        for key in keys:
            worker.bookings.pop(key, None)
        self.remove_worker(worker)
        worker.running = set(keys[:MAX_RUNNING])
        self._by_key |= {(worker.card.model, key): worker for key in worker.running}
        worker.expected_to_cache &= worker.running

    def remove_worker(self, worker: Worker) -> None:
        """Nothing that a worker ran is with it any more."""
        for key in worker.running:
            self._release(worker, key)

    def check_integrity(self, workers: Mapping[WorkerAddress, Worker]) -> None:
        """Asserts that everyone here is one of these, and says so itself."""
        for (model, key), worker in self._by_key.items():
            assert key in worker.running, key
            assert workers[WorkerAddress(model, worker.card.worker_id)] is worker

    def _release(self, worker: Worker, key: str) -> None:
        if self._by_key.get((worker.card.model, key)) is worker:
            del self._by_key[worker.card.model, key]
