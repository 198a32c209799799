"""Brings a request to a worker that accepts it, or ends it with the reason why none did."""

import asyncio
import contextlib
import time
from collections.abc import Collection

import structlog
from nats.aio.msg import Msg

from tokenbus.protocol.bus.bus import Bus, NoRespondersError, OutboundBufferLimitError, PayloadTooLargeError
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import codec, errors, internal, limits, messages, subjects, validation
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.metrics import RouterMetrics
from tokenbus.router.placement.placement import NoWorker, Placement
from tokenbus.router.requests import worker_replies
from tokenbus.router.requests.flight import Flight, Flights
from tokenbus.router.requests.placement_queue import PlacementQueue

_run_replies = codec.Decoder(internal.RunReply)
_control_replies = codec.Decoder(internal.ControlReply)
MAX_TRIES = 12
"""Workers that may refuse a request before it ends with the last one's refusal. One that was not reached is no try."""

_ASK_AGAIN_S = 0.1
_LONGEST_PATIENCE_S = 2.0
_MUTE_S = 7.5
"""A worker that lives and has not answered a drop for so long will not answer it."""
_LONGEST_FLUSH_S = 5.0
"""A broker that takes longer to answer a ping is as good as away."""


class AlreadyStreamingError(Exception):
    """The request is in flight, by a stream that speaks to the same inbox: nothing may be said there."""


class Dispatch:
    """Sends requests where they were placed, and waits for their accept."""

    def __init__(
        self,
        connection: Bus,
        names: subjects.Subjects,
        fleet: Fleet,
        flights: Flights,
        queue: PlacementQueue,
        router_id: str,
        metrics: RouterMetrics,
    ) -> None:
        self._connection = connection
        self._names = names
        self._fleet = fleet
        self._flights = flights
        self._queue = queue
        self._router_id = router_id
        self._metrics = metrics
        self._accepting = self._metrics.phases.labels("accept")
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<Dispatch of {self._router_id}, {self._queue!r}>"

    async def bring(self, flight: Flight) -> None:
        """Returns when a worker has accepted the request, or when it was cancelled before one had.

        Raises RequestError when none will accept it, and AlreadyStreamingError when one has it already."""
        refused: dict[str, errors.Error] = {}
        tries = 0
        while tries < MAX_TRIES:
            if flight.cancelled:
                return
            if flight.spoken:  # while a worker that has refused it was asked, another had it
                raise errors.request_error(errors.Code.WORKER_LOST)
            remaining_ms = flight.remaining_ms(time.monotonic())
            if remaining_ms is not None and remaining_ms <= 0:
                raise errors.request_error(errors.Code.DEADLINE_EXCEEDED)
            with flight.span.start_child("place"):
                found = await self._queue.place(flight, refused)
            match found:
                case None:
                    return
                case NoWorker():
                    if not _forgive_absent(refused) and not self._may_return(flight, refused):
                        break
                    await asyncio.sleep(_ASK_AGAIN_S * 2 ** min(tries, 3))
                    tries += 1
                case Placement(worker) as placement:
                    refusal = await self._give(flight, placement)
                    if refusal is None:
                        return
                    refused[worker.card.worker_id] = refusal
                    tries += not worker.has_no_responders
        if not flight.cancelled:
            raise errors.RequestError(self._why_nobody(flight, refused))

    async def _give(self, flight: Flight, placement: Placement) -> errors.Error | None:
        """None if the worker has accepted, or the request was cancelled. Raises RequestError for a final refusal."""
        address = placement.worker.card.address
        if flight.cancelled:
            self._fleet.unbook(address, flight.key)
            return None
        began = time.perf_counter()
        refusal = await self._try_traced(flight, placement)
        self._accepting.observe(time.perf_counter() - began)
        if refusal is None:
            return None
        self._metrics.placements_rejected.labels(refusal.code).inc()
        self._fleet.unbook(address, flight.key)
        if flight.spoken or not refusal.retryable:
            raise errors.RequestError(refusal)
        return refusal

    async def take_back(self, flight: Flight, card: messages.Card) -> errors.Error | None:
        """Has a worker drop a request that it may hold; None if it keeps it, because it has spoken.

        Otherwise nobody holds the request any more, and it may be placed again unless `flight.spoken`. Returns only
        when the worker has answered, or that life of it is over: "nobody listens" may be a moment of its reconnect.
        Raises RequestError(worker_lost) where it lives and does not answer: it may hold the request still."""
        flight.in_doubt = True
        try:
            return await self._until_dropped(flight, card)
        finally:
            flight.in_doubt = False

    async def _until_dropped(self, flight: Flight, card: messages.Card) -> errors.Error | None:
        subject = self._names.worker(card.model, card.worker_id, "control")
        drop = codec.encode(internal.Control(op="drop", request_id=flight.key, attempt=flight.attempt))
        patience_s, mute_s = limits.ACCEPT_TIMEOUT_S, 0.0
        while mute_s < _MUTE_S:
            last_event = self._fleet.last_event_seq(card)
            waits_s = _ASK_AGAIN_S
            if flight.spoken and flight.ended_at == card.worker_id:  # by its terminal: a drop would be refused
                self._accepted(flight, card)
                return None
            try:
                answer = await self._ask(subject, drop, patience_s)
                reply = worker_replies.read(_control_replies, answer.data, card.worker_id)
            except ConnectionError:  # this router's own: it says nothing of the worker
                await asyncio.sleep(_ASK_AGAIN_S)
                continue
            except (NoRespondersError, errors.RequestError):
                await asyncio.sleep(_ASK_AGAIN_S)
            except TimeoutError:
                waits_s, patience_s = patience_s, min(2 * patience_s, _LONGEST_PATIENCE_S)  # the way may just be long
            else:
                self._fleet.renew_lease(card, time.monotonic())
                if not reply.ok:
                    self._fleet.mark_behind(card)  # its end may have been said while nobody listened for it
                    self._accepted(flight, card)
                    return None
                return errors.make_error(errors.Code.NO_WORKER, f"worker {card.worker_id} did not accept in time")
            if self._fleet.is_lost(card):
                now = time.monotonic()
                if self._fleet.was_behind(card, now):
                    self._flights.spoke(flight)
                self._fleet.remove(card, now)
                return errors.make_error(errors.Code.WORKER_LOST)
            if self._fleet.last_event_seq(card) != last_event:
                mute_s += waits_s
        raise errors.request_error(errors.Code.WORKER_LOST, f"worker {card.worker_id} does not answer any more")

    async def _ask(self, subject: str, payload: bytes, patience_s: float, headers: dict[str, str] | None = None) -> Msg:
        """As the bus's `request`, but a worker counts as silent only once everything that had come for this router by
        the end of `patience_s` has been read: an answer that lies unread is no silence."""
        asking = asyncio.ensure_future(
            self._connection.request(subject, payload, patience_s + _LONGEST_FLUSH_S, headers)
        )
        try:
            done, _ = await asyncio.wait([asking], timeout=patience_s)
            if not done:
                await self._read_all()
                if not asking.done():
                    raise TimeoutError(f"no reply on {subject} within {patience_s} s")
            return await asking
        finally:
            asking.cancel()

    async def _read_all(self) -> None:
        """Returns when what has come for this router by now has been read. Raises ConnectionError."""
        try:
            await self._connection.flush(_LONGEST_FLUSH_S)
        except TimeoutError as error:
            raise ConnectionError("the broker does not answer") from error

    async def _try_traced(self, flight: Flight, placement: Placement) -> errors.Error | None:
        known: tracing.Attributes = {
            tracing.WORKER_ID: placement.worker.card.worker_id,
            tracing.ATTEMPT: flight.attempt + 1,
        }
        with flight.span.start_child("dispatch", "client", known) as span:
            refusal = await self._try(flight, placement, span.headers())
            if refusal is not None:
                span.set_error(str(refusal.code))
            return refusal

    async def _try(self, flight: Flight, placement: Placement, headers: dict[str, str]) -> errors.Error | None:
        """Sends a run to one worker; None when it accepts. An answer that fails to come is cleared up first."""
        card = placement.worker.card
        flight.attempt += 1
        flight.ended_at = None
        flight.awaiting, flight.in_doubt = card.worker_id, True
        subject = self._names.worker(card.model, card.worker_id, "run")
        run = codec.encode(self._run(flight, placement))
        try:
            answer = await self._ask(subject, run, limits.ACCEPT_TIMEOUT_S, headers)
        except NoRespondersError:
            self._fleet.mark_no_responders(card)
            return errors.make_error(errors.Code.NO_WORKER, f"worker {card.worker_id} does not answer")
        except PayloadTooLargeError as error:
            return errors.make_error(errors.Code.PAYLOAD_TOO_LARGE, str(error))
        except (TimeoutError, ConnectionError):
            flight.awaiting = None
            return await self.take_back(flight, card) if self._flights.holds(flight) else None
        finally:
            flight.awaiting, flight.in_doubt = None, False
        if not self._flights.holds(flight):
            return None  # it has ended before its accept was read
        try:
            reply = worker_replies.read(_run_replies, answer.data, card.worker_id)
        except errors.RequestError as problem:
            return problem.error if await self.take_back(flight, card) is not None else None
        if reply.same_reply:
            raise AlreadyStreamingError(flight.key)
        if not reply.accepted:
            flight.cancelled = flight.cancelled or reply.cancelled
            return reply.error or errors.make_error(errors.Code.INTERNAL)
        if self._fleet.is_lost(card):
            return await self.take_back(flight, card)
        self._accepted(flight, card)
        return None

    def _may_return(self, flight: Flight, refused: Collection[str]) -> bool:
        """Whether the one worker that a request wants could take it, and is away just now."""
        wish = flight.request.routing
        if wish is None or not wish.worker_id or wish.worker_id in refused:
            return False
        worker = self._fleet.find(subjects.WorkerAddress(flight.model, wish.worker_id))
        return worker is not None and worker.may_recover and worker.card.context_length > flight.num_prompt_tokens

    def _run(self, flight: Flight, placement: Placement) -> internal.Run:
        assert flight.prompt_ids is not None, flight
        card = placement.worker.card
        return internal.Run(
            request_id=flight.key,
            attempt=flight.attempt,
            epoch=card.epoch,
            router_id=self._router_id,
            reply=flight.reply,
            encoding=flight.encoding,
            token_ids=flight.prompt_ids,
            params=validation.to_params(flight.request),
            remaining_ms=flight.remaining_ms(time.monotonic()),
            age_ms=(time.monotonic() - flight.received_at) * 1e3,
            routing=placement.report,
        )

    def _accepted(self, flight: Flight, card: messages.Card) -> None:
        self._flights.accept(flight, card.worker_id, time.monotonic())
        self._log.info(
            "request_placed",
            request_id=flight.key,
            router_id=self._router_id,
            worker_id=card.worker_id,
            attempt=flight.attempt,
        )
        if flight.cancelled:
            with contextlib.suppress(
                OutboundBufferLimitError, ConnectionError
            ):  # the client's own cancel may still get through
                self._connection.publish(self._names.cancel(flight.request_id, flight.tenant), b"")

    def _why_nobody(self, flight: Flight, refused: dict[str, errors.Error]) -> errors.Error:
        """The most useful of the refusals: that of a worker which is merely busy before that of one which is gone."""
        wish = flight.request.routing
        if not refused and wish is not None and wish.worker_id:
            return errors.make_error(
                errors.Code.NO_WORKER, f"worker {wish.worker_id} does not serve {flight.model} now"
            )
        busy = [error for error in refused.values() if error.code is errors.Code.OVERLOADED]
        if busy:
            return min(busy, key=lambda error: error.retry_after_ms or 0.0)
        return next(reversed(refused.values()), errors.make_error(errors.Code.NO_WORKER))


def _forgive_absent(refused: dict[str, errors.Error]) -> bool:
    """Lets those be tried again that did not answer, or not in time: they may be back soon. False if there are none."""
    codes = (errors.Code.NO_WORKER, errors.Code.WORKER_LOST, errors.Code.ENGINE_POISONED)
    absent = [worker_id for worker_id, error in refused.items() if error.code in codes]
    for worker_id in absent:
        del refused[worker_id]
    return bool(absent)
