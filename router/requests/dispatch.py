"""Tries workers until one accepts a request, or ends the request with the most useful of their refusals."""

import asyncio
import time
from collections.abc import Collection

from tokenbus.protocol.wire import errors, messages, subjects
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.metrics import RouterMetrics
from tokenbus.router.placement.placement import NoWorker, Placement
from tokenbus.router.requests.attempts import Attempts
from tokenbus.router.requests.flight import Flight
from tokenbus.router.requests.placement_queue import PlacementQueue

_MAX_TRIES = 12
"""Refusals after which a request ends with the last one. A worker that could not be reached is no try."""
_RETRY_S = 0.1
_UNREACHABLE = (errors.Code.NO_WORKER, errors.Code.WORKER_LOST, errors.Code.ENGINE_POISONED)
"""Refusals by workers that may soon be back."""


class Dispatcher:
    """Takes requests to workers, again if a worker is lost."""

    def __init__(self, fleet: Fleet, queue: PlacementQueue, attempts: Attempts, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._queue = queue
        self._attempts = attempts
        self._metrics = metrics
        self._accepting = self._metrics.phases.labels("accept")

    def __repr__(self) -> str:
        return f"<Dispatcher {self._queue!r}>"

    async def dispatch(self, flight: Flight) -> None:
        """Returns when a worker has accepted the request, or when it was cancelled before one had.

        Raises RequestError if no worker accepts it, and AlreadyStreamingError if one has it already."""
        refused: dict[str, errors.Error] = {}
        tries = 0
        while tries < _MAX_TRIES:
            if flight.cancelled:
                return
            if flight.first_token_sent:  # another worker streamed it while this router was asking one that refused
                raise errors.request_error(errors.Code.WORKER_LOST)
            remaining_ms = flight.remaining_ms(time.monotonic())
            if remaining_ms is not None and remaining_ms <= 0:
                raise errors.request_error(errors.Code.DEADLINE_EXCEEDED)
            with flight.span.start_child("place"):
                outcome = await self._queue.place(flight, refused)
            match outcome:
                case None:
                    return
                case NoWorker():
                    # Every worker has refused. Those that were merely unreachable get another chance after a pause.
                    unreachable = [worker_id for worker_id, error in refused.items() if error.code in _UNREACHABLE]
                    if not unreachable and not self._may_return(flight, refused):
                        break
                    for worker_id in unreachable:
                        del refused[worker_id]
                    await asyncio.sleep(_RETRY_S * 2 ** min(tries, 3))
                    tries += 1
                case Placement(worker) as placement:
                    refusal = await self._try(flight, placement)
                    if refusal is None:
                        return
                    refused[worker.card.worker_id] = refusal
                    tries += not worker.has_no_responders
        if not flight.cancelled:
            raise errors.RequestError(_final_error(flight, refused))

    async def redispatch(self, flight: Flight, card: messages.Card, *, is_certain: bool) -> None:
        """Continues a request whose worker is lost, or seems to be if that is not certain.

        Raises RequestError(worker_lost) if the client already has text, or if the worker can't be asked."""
        refusal: errors.Error | None = errors.make_error(errors.Code.WORKER_LOST)
        if not is_certain:
            refusal = await self._attempts.revoke(flight, card)
        if refusal is None:
            return
        if flight.first_token_sent:
            raise errors.request_error(errors.Code.WORKER_LOST)
        await self.dispatch(flight)

    async def _try(self, flight: Flight, placement: Placement) -> errors.Error | None:
        """Returns None if the worker has accepted, or the request was cancelled. Raises RequestError for a refusal that
        no other worker can mend."""
        address = placement.worker.card.address
        if flight.cancelled:
            self._fleet.unbook(address, flight.key)
            return None
        began = time.perf_counter()
        refusal = await self._attempts.run(flight, placement)
        self._accepting.observe(time.perf_counter() - began)
        if refusal is None:
            return None
        self._metrics.placements_rejected.labels(refusal.code).inc()
        self._fleet.unbook(address, flight.key)
        if flight.first_token_sent or not refusal.retryable:
            raise errors.RequestError(refusal)
        return refusal

    def _may_return(self, flight: Flight, refused: Collection[str]) -> bool:
        """Whether the one worker that the request is pinned to is only away for the moment."""
        routing = flight.request.routing
        if routing is None or not routing.worker_id or routing.worker_id in refused:
            return False
        worker = self._fleet.find(subjects.WorkerAddress(flight.model, routing.worker_id))
        return worker is not None and worker.may_recover and worker.card.context_length > flight.num_prompt_tokens


def _final_error(flight: Flight, refused: dict[str, errors.Error]) -> errors.Error:
    """Prefers the refusal of a busy worker, which says when to retry, to that of one that is gone."""
    routing = flight.request.routing
    if not refused and routing is not None and routing.worker_id:
        text = f"worker {routing.worker_id} does not serve {flight.model} now"
        return errors.make_error(errors.Code.NO_WORKER, text)
    busy = [error for error in refused.values() if error.code is errors.Code.OVERLOADED]
    if busy:
        return min(busy, key=lambda error: error.retry_after_ms or 0.0)
    return next(reversed(refused.values()), errors.make_error(errors.Code.NO_WORKER))
