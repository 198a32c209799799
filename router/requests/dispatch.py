"""Finds a worker that accepts a request, or ends the request with the most useful of the refusals.

    place: wait for a worker that has room and has not refused, and book the request there
      |-- a worker --> try it --> it accepts: done
      |                  '------> it refuses: note that, and place again
      '-- none ------> wait for one --> nothing to wait for: the search has failed
                         '------------> another chance: forget passing refusals, and place again

The search fails after `_MAX_TRIES`. A worker that could not be reached costs no try. Neither does one that is too busy
for a stream that has begun, during the first `patience_s`: several routers may have sent their streams there at the
same time. Such a stream also waits that long while no worker could continue it at all.

If the request was at a worker before that is lost (`redispatch`), the search begins once nothing more can arrive from
there, and before each try asks again whether this router knows all that the client may have (workers/event_log.py)."""

import asyncio
import dataclasses
import time
from typing import NoReturn

import structlog

from tokenbus.protocol.wire import errors, messages
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.placement.adapters import has_all
from tokenbus.router.placement.placement import NoWorker, Placement
from tokenbus.router.requests.attempts import AlreadyStreamingError, Attempt, Attempts, Revocation
from tokenbus.router.requests.flights.flight import Flight
from tokenbus.router.requests.queueing.model_loads import ModelLoads
from tokenbus.router.requests.queueing.placement_queue import PlacementQueue
from tokenbus.router.telemetry.metrics import RouterMetrics
from tokenbus.router.workers.worker import Worker

_MAX_TRIES = 12
_RETRY_S = 0.1
_SETTLE_POLL_S = 0.02
_RETURN_S = 2.0
"""The time that a worker which is back has to say what it still runs."""
_MISSING_S = 4.0
"""A worker that is not back while others of its site are heard for so long has died."""
_UNREACHABLE = (errors.Code.NO_WORKER, errors.Code.WORKER_LOST, errors.Code.ENGINE_POISONED)
"""Refusals after which the worker may soon be back."""


@dataclasses.dataclass(slots=True)
class _Search:
    """The search for a worker of one request."""

    flight: Flight
    lost: Worker | None
    """The worker that had the request before, if that worker is gone."""
    began_at: float
    served_at: float
    """When some worker was last known that could take the request."""
    refused: dict[str, errors.Error] = dataclasses.field(default_factory=dict)
    """The refusals of workers that are not chosen again for now."""
    tries: int = 0
    pauses: int = 0


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

    def begin(self, flight: Flight) -> Attempt | None:
        """Places a new request and sends its run, all at once; returns None if something has to be waited for, which
        `dispatch` does. Raises RequestError for a request that no worker would accept."""
        now = time.monotonic()
        remaining_ms = flight.remaining_ms(now)
        if remaining_ms is not None and remaining_ms <= 0:
            return None
        with flight.span.start_child("place"):
            placement = self._queue.place_at_once(flight, (), now)
        return self._attempts.begin(flight, placement) if isinstance(placement, Placement) else None

    def take_accept(self, flight: Flight, attempt: Attempt) -> bool:
        """Returns whether the worker has accepted the request, now that it has answered. If it has not, `dispatch`
        decides what follows."""
        is_accepted = self._attempts.take_accept(flight, attempt)
        if is_accepted:
            self._accepting.observe(time.monotonic() - attempt.began_at)
        return is_accepted

    async def dispatch(self, flight: Flight, lost: Worker | None = None, attempt: Attempt | None = None) -> None:
        """Returns when a worker has accepted the request, or when the request was cancelled or this router stopped
        before that.

        `lost` is the worker that had the request before, if that worker is gone; `attempt` is the one that `begin` has
        begun. Raises RequestError if no worker accepts the request, and AlreadyStreamingError if a worker has it
        already."""
        now = time.monotonic()
        search = _Search(flight, lost, now, now)
        if attempt is not None and await self._try(search, attempt.placement, attempt):
            return
        while search.tries < _MAX_TRIES and not self._is_over(flight):
            match await self._place(search):
                case None:  # cancelled while it waited
                    return
                case Placement() as placement:
                    if await self._try(search, placement):
                        return
                case NoWorker():
                    began_at = time.monotonic()
                    has_chance = await self._wait(search)
                    flight.way.held_s += time.monotonic() - began_at
                    if not has_chance:
                        break
        if not self._is_over(flight):
            raise errors.RequestError(_final_error(flight, search.refused))

    def _is_over(self, flight: Flight) -> bool:
        return flight.cancelled or self.is_stopped

    def _is_patient(self, search: _Search) -> bool:
        return search.flight.has_begun and time.monotonic() - search.began_at < self._patience_s

    async def _place(self, search: _Search) -> Placement | NoWorker | None:
        """Books the request on a worker. Raises RequestError if its deadline passes first, and what the queue does."""
        remaining_ms = search.flight.remaining_ms(time.monotonic())
        if remaining_ms is not None and remaining_ms <= 0:
            raise errors.request_error(errors.Code.DEADLINE_EXCEEDED)
        with search.flight.span.start_child("place"):
            return await self._queue.place(search.flight, search.refused)

    async def _try(self, search: _Search, placement: Placement, attempt: Attempt | None = None) -> bool:
        """Sends the request to the worker on which it is booked; returns False and notes the refusal if it is refused.

        Returns True as well if the request has ended meanwhile. Raises RequestError for a refusal that every other
        worker would repeat, and the errors of `_may_continue`."""
        worker = placement.worker
        refusal = await self._run(search, placement, attempt)
        search.served_at = time.monotonic()
        if refusal is None:
            return True
        if refusal.code is errors.Code.WORKER_LOST:
            search.lost = worker
        search.flight.way.refused(refusal.code)
        search.refused[worker.card.worker_id] = refusal
        is_busy = refusal.code is errors.Code.OVERLOADED and self._is_patient(search)
        search.tries += not worker.has_no_responders and not is_busy
        return False

    async def _wait(self, search: _Search) -> bool:
        """Waits for another chance after no worker could be chosen; returns False if there is nothing to wait for."""
        flight, refused = search.flight, search.refused
        suitable = [one for one in self._fleet.workers_of(flight.model) if one.may_recover and _suits(one.card, flight)]
        if flight.has_begun and not suitable:
            if time.monotonic() - search.served_at >= self._patience_s:
                return False
            refused.clear()
            await asyncio.sleep(_RETRY_S)
            return True
        search.served_at = time.monotonic()
        is_patient = self._is_patient(search)
        passing = (*_UNREACHABLE, errors.Code.OVERLOADED) if is_patient else _UNREACHABLE
        again = [worker_id for worker_id, error in refused.items() if error.code in passing]
        may_return = any(
            one.card.worker_id not in refused and one.card.context_length > flight.num_prompt_tokens for one in suitable
        )
        if not again and not (may_return and (flight.needs or _pinned(flight))):
            return not refused and await self._wait_served(flight)
        for worker_id in again:
            del refused[worker_id]
        await asyncio.sleep(_RETRY_S * 2 ** min(search.pauses, 3))
        search.pauses += 1
        search.tries += not is_patient
        return True

    async def _wait_served(self, flight: Flight) -> bool:
        """Waits for a worker if none has the request's model loaded; returns whether a new one has appeared. Raises
        RequestError."""
        remaining_s = flight.remaining_s(time.monotonic())
        return await self._loads.wait_served(flight.model, remaining_s, lambda: self._is_over(flight))

    async def redispatch(self, flight: Flight, worker: Worker, *, is_certain: bool, takes: bool = False) -> None:
        """Continues a request whose worker is lost or leaving. Unless the loss is certain, the run is revoked first, or
        taken.

        Raises RequestError if the client may have text that this router does not know, or if the worker is alive but
        doesn't reply, and AlreadyStreamingError if another router has continued the request."""
        revocation, takes = Revocation.LOST, takes or worker.state is messages.WorkerState.LEAVING
        if not is_certain:
            revocation = await self._attempts.revoke(flight, worker, takes=takes)
        if revocation is Revocation.LOST:
            revocation = await self._settle(flight, worker)
        if revocation is Revocation.KEPT:
            return
        if flight.prompt_ids is None and not flight.cancelled:  # forgotten to free memory
            self._give_up(flight, worker)
        if revocation is Revocation.LOST and not is_certain:  # the worker may be alive, and still run the attempt
            self._attempts.move(flight, worker.card.address, flight.attempt)
        heard_at = worker.last_seen_at if revocation is Revocation.LOST else None
        flight.way.left(time.monotonic(), heard_at)
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

    async def _settle(self, flight: Flight, worker: Worker) -> Revocation:
        """Waits until nothing more can arrive from a lost worker, or until it turns out that the worker was only out of
        reach. Returns `KEPT` if it has ended the request or still has it.

        Raises RequestError if the client may have received something that this router does not know, or if too many
        workers in a row were lost with the request."""
        while time.monotonic() < worker.settled_at and not flight.cancelled:
            if worker.log.end_seq is not None and _knows_all_text(flight, worker):
                break
            await asyncio.sleep(_SETTLE_POLL_S)
        if not _knows_all_text(flight, worker):
            revocation = await self._outlast_link(flight, worker)
            if revocation is not Revocation.LOST:
                return revocation
        if not self._may_continue(flight, worker):
            return Revocation.KEPT
        if flight.cancelled:
            return Revocation.LOST
        # a frontend that fences itself has not died
        code = flight.completion.add_loss(worker.incarnation, is_death=worker.log.end_seq is None)
        if code is not None:
            raise errors.request_error(code, "too many workers in a row were lost with the request")
        return Revocation.LOST

    def _may_continue(self, flight: Flight, lost: Worker) -> bool:
        """Returns False if a lost worker has ended the request. Raises RequestError if the client may have received
        something that this router does not know."""
        if flight.has_new_tokens and flight.ended_by == lost.card.worker_id:
            self._attempts.accept(flight, lost.card)
            return False
        if not flight.cancelled and not _knows_all_text(flight, lost):
            self._give_up(flight, lost)
        return True

    async def _outlast_link(self, flight: Flight, lost: Worker) -> Revocation:
        """Waits for a worker that may be well behind a link that is down, and holds the request. Only that worker knows
        what its client has, so it is asked as soon as it is back, and again if the link fails before it answers.

        Raises RequestError(worker_lost) if it is back and does not answer."""
        card, now, was_behind = lost.card, time.monotonic(), lost.log.is_behind
        until = now + (self._patience_s if self._fleet.is_cut_off(lost, now) else 0.0)
        missed_since = None  # when others of its site were heard again
        while now < until and not self._is_over(flight):
            back = self._fleet.find_worker(card.address)
            if back is not None and back is not lost:
                lost, missed_since = back, None
                if back.card.epoch != card.epoch:
                    break
                flight.completion.is_back(back.incarnation)
                revocation = await self._attempts.revoke(flight, back)
                if revocation is not Revocation.LOST:
                    flight.lacks_tokens = was_behind
                    return revocation
            elif self._fleet.is_cut_off(lost, now):
                missed_since = None
            else:
                missed_since = missed_since or now
                if now - missed_since >= _MISSING_S:
                    break
            await asyncio.sleep(_RETRY_S)
            now = time.monotonic()
        return Revocation.LOST

    async def _has_returned(self, flight: Flight, lost: Worker) -> bool:
        """Whether a worker that counted as lost was only out of reach, and still has the request: then it keeps it."""
        card, until = lost.card, time.monotonic() + _RETURN_S
        while (back := self._fleet.find_worker(card.address)) is not None and back.card.epoch == card.epoch:
            if not back.log.is_behind:
                has_kept = flight.attempt_worker_id == card.worker_id and not flight.cancelled
                if not has_kept or self._fleet.owner_of(flight.key, flight.model) is not back:
                    return False
                self._attempts.accept(flight, back.card)
                return True
            if time.monotonic() >= until or self._is_over(flight):
                return False
            await asyncio.sleep(_SETTLE_POLL_S)
        return False

    def _give_up(self, flight: Flight, lost: Worker) -> NoReturn:
        """Raises RequestError for a request that this router can't continue, or AlreadyStreamingError if another router
        has continued it: a worker may have named that router the guardian while this one was disconnected."""
        if self._fleet.owner_of(flight.key, flight.model) not in (None, lost):
            raise AlreadyStreamingError(flight.key)
        self._log.warning(
            "stream_given_up",
            request_id=flight.key,
            worker_id=lost.card.worker_id,
            attempt=flight.attempt,
            tokens=len(flight.completion),
            reason=_doubt(flight, lost) or "forgotten",
        )
        raise errors.request_error(errors.Code.WORKER_LOST)

    async def _run(self, search: _Search, placement: Placement, attempt: Attempt | None) -> errors.Error | None:
        """Returns None if the worker has accepted the request, or if the request has ended or was cancelled."""
        flight, lost = search.flight, search.lost
        address = placement.worker.card.address
        flight.completion.is_back(placement.worker.incarnation)
        if attempt is None:
            if lost is not None and await self._has_returned(flight, lost):
                self._fleet.unbook(address, flight.key)
                return None
            try:
                # more may have arrived from the lost worker while the request waited for this one
                may_start = not flight.cancelled and (lost is None or self._may_continue(flight, lost))
            except (errors.RequestError, AlreadyStreamingError):
                self._fleet.unbook(address, flight.key)
                raise
            if not may_start:
                self._fleet.unbook(address, flight.key)
                return None
            attempt = self._attempts.begin(flight, placement)
        refusal = await self._attempts.finish(flight, attempt)
        self._accepting.observe(time.monotonic() - attempt.began_at)
        if refusal is None:
            return None
        self._metrics.placements_rejected.labels(refusal.code).inc()
        self._fleet.unbook(address, flight.key)
        if refusal.code is errors.Code.WORKER_LOST:
            match await self._settle(flight, placement.worker):
                case Revocation.KEPT:
                    return None
                case Revocation.DROPPED:
                    text = f"worker {placement.worker.card.worker_id} was out of reach"
                    return errors.make_error(errors.Code.NO_WORKER, text)
                case Revocation.LOST:
                    return refusal
        if not refusal.retryable and flight.first_accepted_at is not None:  # the request was fine for its first worker
            raise errors.request_error(errors.Code.WORKER_LOST, f"no worker can continue it: {refusal.message}")
        if not refusal.retryable:
            raise errors.RequestError(refusal)
        return refusal


def _pinned(flight: Flight) -> str:
    """Returns the id of the only worker that may get a request; empty if any may."""
    routing = flight.request.routing
    return (routing.worker_id if routing is not None else None) or ""


def _suits(card: messages.Card, flight: Flight) -> bool:
    """Returns whether a worker may get a request and has what it needs."""
    return (
        _pinned(flight) in ("", card.worker_id)
        and flight.hash_scheme in ("", card.hash_scheme)
        and (not flight.feature or flight.feature in card.features)
        and has_all(card, flight.adapters, flight.tenant)
    )


def _knows_all_text(flight: Flight, worker: Worker) -> bool:
    return not _doubt(flight, worker)


def _doubt(flight: Flight, worker: Worker) -> str:
    """Returns why the client may have received something from a lost worker that this router does not know; empty if it
    can't have."""
    return worker.log.doubt(flight.completion.last_seq, is_streamed=flight.request.is_streamed)


def _final_error(flight: Flight, refused: dict[str, errors.Error]) -> errors.Error:
    """Prefers a busy worker's refusal, which says when to retry, to that of one that is gone."""
    if len(flight.completion):
        return errors.make_error(errors.Code.WORKER_LOST, "no other worker could continue the stream")
    if not refused and (pinned := _pinned(flight)):
        return errors.make_error(errors.Code.NO_WORKER, f"worker {pinned} does not serve {flight.model} now")
    if not refused and flight.adapters:
        return errors.make_error(errors.Code.OVERLOADED, "the workers that have the adapters are busy")
    if not refused and flight.feature:
        return errors.make_error(errors.Code.NO_WORKER, f"no worker with the feature {flight.feature} is available")
    busy = [error for error in refused.values() if error.code is errors.Code.OVERLOADED]
    if busy:
        return min(busy, key=lambda error: error.retry_after_ms or 0.0)
    return next(reversed(refused.values()), errors.make_error(errors.Code.NO_WORKER))
