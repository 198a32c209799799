"""Tries workers until one accepts a request, or ends it with the most useful of their refusals."""

import asyncio
import time
from collections.abc import Collection
from typing import NoReturn

import structlog

from tokenbus.protocol.wire import errors, messages, subjects
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.placement.adapters import has_all
from tokenbus.router.placement.placement import NoWorker, Placement
from tokenbus.router.requests.attempts import AlreadyStreamingError, Attempts, Revocation
from tokenbus.router.requests.flights.flight import Flight
from tokenbus.router.requests.queueing.model_loads import ModelLoads
from tokenbus.router.requests.queueing.placement_queue import PlacementQueue
from tokenbus.router.telemetry.metrics import RouterMetrics
from tokenbus.router.workers.worker import Worker

_MAX_TRIES = 12
"""Tries after which a request ends with one of its refusals. A worker that could not be reached does not count."""
_RETRY_S = 0.1
_SETTLE_POLL_S = 0.02
_UNREACHABLE = (errors.Code.NO_WORKER, errors.Code.WORKER_LOST, errors.Code.ENGINE_POISONED)
"""Refusals after which the worker may soon be back."""


class Dispatcher:
    """Finds a worker for each request, and another one if that worker is lost or leaves."""

    def __init__(
        self,
        fleet: Fleet,
        queue: PlacementQueue,
        attempts: Attempts,
        loads: ModelLoads,
        metrics: RouterMetrics,
        patience_s: float,
    ) -> None:
        """`patience_s` is how long a request that has begun waits for a worker that can continue it."""
        self._fleet = fleet
        self._queue = queue
        self._attempts = attempts
        self._loads = loads
        self._metrics = metrics
        self._patience_s = patience_s
        self.is_stopped = False
        """Whether this router is stopping: requests that no worker has are left to another router."""
        self._log = structlog.get_logger()
        self._accepting = self._metrics.phases.labels("accept")

    def __repr__(self) -> str:
        return f"<Dispatcher {self._queue!r}>"

    async def dispatch(self, flight: Flight, lost: Worker | None = None) -> None:
        """Returns when a worker has accepted the request, or when the request was cancelled or this router stopped
        before that.

        `lost` is the worker that had the request before, if that worker is gone. Raises RequestError if no worker
        accepts it, and AlreadyStreamingError if a worker has it already."""
        refused: dict[str, errors.Error] = {}
        tries, pauses = 0, 0
        began_at = served_at = time.monotonic()
        while tries < _MAX_TRIES:
            if flight.cancelled or self.is_stopped:
                return
            remaining_ms = flight.remaining_ms(time.monotonic())
            if remaining_ms is not None and remaining_ms <= 0:
                raise errors.request_error(errors.Code.DEADLINE_EXCEEDED)
            with flight.span.start_child("place"):
                outcome = await self._queue.place(flight, refused)
            is_patient = flight.has_begun and time.monotonic() - began_at < self._patience_s
            match outcome:
                case None:
                    return
                case NoWorker() if flight.has_begun and not self._is_served(flight):
                    # Only time in which no worker could continue it counts; otherwise `tries` is the limit.
                    if time.monotonic() - served_at >= self._patience_s:
                        break
                    refused.clear()
                    await asyncio.sleep(_RETRY_S)
                    continue
                case NoWorker():
                    # Every worker has refused. Those that were merely unreachable, or too busy for a stream that has
                    # begun, get another chance after a pause.
                    passing = (*_UNREACHABLE, errors.Code.OVERLOADED) if is_patient else _UNREACHABLE
                    again = [worker_id for worker_id, error in refused.items() if error.code in passing]
                    if not again and not self._may_return(flight, refused):
                        if refused or not await self._wait_served(flight):
                            break
                        continue
                    for worker_id in again:
                        del refused[worker_id]
                    await asyncio.sleep(_RETRY_S * 2 ** min(pauses, 3))
                    pauses += 1
                    tries += not is_patient
                case Placement(worker) as placement:
                    refusal = await self._try(flight, placement, lost)
                    if refusal is None:
                        return
                    if refusal.code is errors.Code.WORKER_LOST:
                        lost = worker
                    refused[worker.card.worker_id] = refusal
                    # several routers may choose the same worker at the same time, and it has no room for all requests
                    is_busy = is_patient and refusal.code is errors.Code.OVERLOADED
                    tries += not worker.has_no_responders and not is_busy
            served_at = time.monotonic()
        if not flight.cancelled and not self.is_stopped:
            raise errors.RequestError(_final_error(flight, refused))

    async def _wait_served(self, flight: Flight) -> bool:
        """Waits for a worker if none has the request's model loaded; returns whether a new one has appeared. Raises
        RequestError."""
        return await self._loads.wait_served(
            flight.model, flight.remaining_s(time.monotonic()), lambda: flight.cancelled or self.is_stopped
        )

    async def redispatch(self, flight: Flight, worker: Worker, *, is_certain: bool, takes: bool = False) -> None:
        """Continues a request whose worker is lost or leaving. Unless the loss is certain, the run is revoked first, or
        taken.

        Raises RequestError if the client may have text that this router does not know, or if the worker is alive but
        doesn't reply, and AlreadyStreamingError if another router has continued the request."""
        revocation, takes = Revocation.LOST, takes or worker.state is messages.WorkerState.LEAVING
        if not is_certain:
            revocation = await self._attempts.revoke(flight, worker, takes=takes)
        if revocation is Revocation.KEPT or (revocation is Revocation.LOST and not await self._settle(flight, worker)):
            return
        if flight.prompt_ids is None and not flight.cancelled:  # forgotten to free memory
            self._give_up(flight, worker)
        if revocation is Revocation.LOST and not is_certain:  # the worker may be alive, and still run the attempt
            self._attempts.move(flight, worker.card.address, flight.attempt)
        self._metrics.continued.labels(flight.model).inc()
        self._fleet.stats.continued += 1
        self._log.warning(
            "request_continued",
            request_id=flight.key,
            worker_id=worker.card.worker_id,
            attempt=flight.attempt,
            tokens=len(flight.completion),
        )
        await self.dispatch(flight, worker if revocation is Revocation.LOST else None)

    async def _settle(self, flight: Flight, worker: Worker) -> bool:
        """Waits until nothing more can arrive from a lost worker; returns False if that worker has ended the request.

        Raises RequestError if the client may have received something that this router does not know, or if too many
        workers in a row were lost with the request."""
        while time.monotonic() < worker.settled_at and not flight.cancelled:
            if worker.log.end_seq is not None and _knows_all_text(flight, worker):
                break
            await asyncio.sleep(_SETTLE_POLL_S)
        if not self._may_go_on(flight, worker):
            return False
        if flight.cancelled:
            return True
        # a frontend that fences itself has not died
        code = flight.completion.add_loss(is_death=worker.log.end_seq is None)
        if code is not None:
            raise errors.request_error(code, "too many workers in a row were lost with the request")
        return True

    def _may_go_on(self, flight: Flight, lost: Worker) -> bool:
        """Returns False if a lost worker has ended the request. Raises RequestError if the client may have received
        something that this router does not know."""
        if flight.has_new_tokens and flight.ended_by == lost.card.worker_id:
            self._attempts.accept(flight, lost.card)
            return False
        if not flight.cancelled and not _knows_all_text(flight, lost):
            self._give_up(flight, lost)
        return True

    def _give_up(self, flight: Flight, lost: Worker) -> NoReturn:
        """Raises RequestError for a request that this router can't continue, or AlreadyStreamingError if another router
        has continued it: a worker may have named that router the guardian while this one was disconnected."""
        if self._fleet.owner_of(flight.key, flight.model) not in (None, lost):
            raise AlreadyStreamingError(flight.key)
        raise errors.request_error(errors.Code.WORKER_LOST)

    async def _try(self, flight: Flight, placement: Placement, lost: Worker | None) -> errors.Error | None:
        """Returns None if the worker has accepted the request, or if the request has ended or was cancelled.

        Raises RequestError for a refusal that every other worker would repeat, and the errors of `_may_go_on`."""
        address = placement.worker.card.address
        try:
            # more may have arrived from the lost worker while the request waited for this one
            may_start = not flight.cancelled and (lost is None or self._may_go_on(flight, lost))
        except (errors.RequestError, AlreadyStreamingError):
            self._fleet.unbook(address, flight.key)
            raise
        if not may_start:
            self._fleet.unbook(address, flight.key)
            return None
        began = time.perf_counter()
        refusal = await self._attempts.run(flight, placement)
        self._accepting.observe(time.perf_counter() - began)
        if refusal is None:
            return None
        self._metrics.placements_rejected.labels(refusal.code).inc()
        self._fleet.unbook(address, flight.key)
        if refusal.code is errors.Code.WORKER_LOST:
            return refusal if await self._settle(flight, placement.worker) else None
        if not refusal.retryable and flight.first_accepted_at is not None:  # the request was fine for its first worker
            raise errors.request_error(errors.Code.WORKER_LOST, f"no worker can continue it: {refusal.message}")
        if not refusal.retryable:
            raise errors.RequestError(refusal)
        return refusal

    def _is_served(self, flight: Flight) -> bool:
        """Returns whether a worker that could continue the request is available, or is about to be."""
        routing = flight.request.routing
        only = routing.worker_id if routing is not None else None
        for worker in self._fleet.workers_of(flight.model):
            card = worker.card
            fits = flight.hash_scheme in ("", card.hash_scheme) and only in (None, "", card.worker_id)
            if fits and worker.may_recover and _can_serve(card, flight):
                return True
        return False

    def _may_return(self, flight: Flight, refused: Collection[str]) -> bool:
        """Whether the worker that the request is pinned to, or all those that have what it needs, are only temporarily
        unavailable."""
        routing = flight.request.routing
        if flight.needs and (routing is None or not routing.worker_id):
            return any(
                worker.may_recover
                and worker.card.worker_id not in refused
                and worker.card.context_length > flight.num_prompt_tokens
                and _can_serve(worker.card, flight)
                for worker in self._fleet.workers_of(flight.model)
            )
        if routing is None or not routing.worker_id or routing.worker_id in refused:
            return False
        worker = self._fleet.find(subjects.WorkerAddress(flight.model, routing.worker_id))
        return worker is not None and worker.may_recover and worker.card.context_length > flight.num_prompt_tokens


def _can_serve(card: messages.Card, flight: Flight) -> bool:
    """Returns whether a worker has the adapters and the feature that a request needs."""
    has_feature = not flight.feature or flight.feature in card.features
    return has_feature and has_all(card, flight.adapters, flight.tenant)


def _knows_all_text(flight: Flight, worker: Worker) -> bool:
    return worker.log.tells_all(flight.completion.last_seq, is_streamed=flight.request.is_streamed)


def _final_error(flight: Flight, refused: dict[str, errors.Error]) -> errors.Error:
    """Prefers a busy worker's refusal, which says when to retry, to that of one that is gone."""
    routing = flight.request.routing
    if len(flight.completion):
        return errors.make_error(errors.Code.WORKER_LOST, "no other worker could continue the stream")
    if not refused and routing is not None and routing.worker_id:
        text = f"worker {routing.worker_id} does not serve {flight.model} now"
        return errors.make_error(errors.Code.NO_WORKER, text)
    if not refused and flight.adapters:
        return errors.make_error(errors.Code.OVERLOADED, "the workers that have the adapters are busy")
    if not refused and flight.feature:
        return errors.make_error(errors.Code.NO_WORKER, f"no worker with the feature {flight.feature} is available")
    busy = [error for error in refused.values() if error.code is errors.Code.OVERLOADED]
    if busy:
        return min(busy, key=lambda error: error.retry_after_ms or 0.0)
    return next(reversed(refused.values()), errors.make_error(errors.Code.NO_WORKER))
