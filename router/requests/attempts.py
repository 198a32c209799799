"""One attempt to run a request on one worker: sending the run, and finding out for certain who holds the request.

A request must never run on two workers at once. So when the reply to a `run` fails to come, or the worker that has
accepted it falls silent, the attempt is revoked with a `drop` before the request may be placed again. There are four
outcomes:

    the worker dropped it, or never had it      no worker holds it
    the worker refuses to drop it               it has sent text or the terminal: the request stays there
    the worker's epoch is over, or it is lost   no worker holds it, but the client may have text of this attempt
    the worker lives and never replies          unknown: the request ends in `worker_lost`

A leaving worker is asked instead to give up a request that it has accepted, with all its tokens. It refuses only if the
request has ended or another router is its guardian."""

import asyncio
import contextlib
import dataclasses
import enum
import time
from typing import TypeVar

import structlog
from nats.aio.msg import Msg

from tokenbus.protocol import tasks
from tokenbus.protocol.bus.bus import (
    Bus,
    NoRespondersError,
    OutboundBufferLimitError,
    Outgoing,
    PayloadTooLargeError,
)
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import codec, errors, internal, limits, messages, params, subjects
from tokenbus.protocol.wire.checks import validation
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.placement.placement import Placement
from tokenbus.router.requests.flights.flight import Flight, Flights
from tokenbus.router.requests.flights.worker_client import Operation, WorkerClient
from tokenbus.router.requests.next_turns import FEATURE
from tokenbus.router.workers.worker import Worker

AnswerT = TypeVar("AnswerT")

_RUN = Operation("run", codec.Decoder(internal.RunReply))
_CONTROL = Operation("control", codec.Decoder(internal.ControlReply))
_TAKE = Operation("take", codec.Decoder(internal.TakeReply))

_RETRY_S = 0.1
_MAX_TIMEOUT_S = 2.0
_GIVE_UP_S = 7.5
"""A live worker that has not replied to a drop for this long never will."""
_MAX_REPEATING = 64
"""The most ends that workers are asked for at a time."""
_FLUSH_TIMEOUT_S = 5.0
"""A broker that takes longer to answer a ping counts as disconnected."""


class Revocation(enum.Enum):
    """The end of an attempt to take a run back."""

    KEPT = enum.auto()
    """The worker keeps the request: it has published text or the terminal, or another router is its guardian."""
    DROPPED = enum.auto()
    """The worker publishes nothing more in this attempt, and every token of it is known."""
    LOST = enum.auto()
    """The worker is lost, whatever it has published."""


class AlreadyStreamingError(Exception):
    """The request is running already, and its stream goes to the same inbox: nothing else may be published there."""


@dataclasses.dataclass(slots=True, eq=False)
class Attempt:
    """A run on its way to a worker, until that worker's answer is read."""

    placement: Placement
    span: tracing.Span
    """Its own span, or the request's if nothing is recorded."""
    run: Outgoing
    began_at: float
    sent_at: float = 0.0
    """When the run was sent, or its last part."""
    reply: "asyncio.Future[Msg] | None" = None
    """The worker's answer; None while the run has not been sent, because it needs parts."""


class Attempts:
    """Runs requests on workers, and revokes runs whose outcome is unknown."""

    def __init__(
        self, bus: Bus, names: subjects.Subjects, workers: WorkerClient, fleet: Fleet, flights: Flights, router_id: str
    ) -> None:
        self._bus = bus
        self._names = names
        self._workers = workers
        self._fleet = fleet
        self._flights = flights
        self._router_id = router_id
        self._unanswered: dict[Flight, subjects.WorkerAddress] = {}
        """The workers whose answers are awaited."""
        self._repeating = asyncio.Semaphore(_MAX_REPEATING)
        self._log = structlog.get_logger()

    def begin(self, flight: Flight, placement: Placement) -> Attempt:
        """Starts an attempt, and sends its run unless that needs parts."""
        card = placement.worker.card
        if flight.request.prompt_logprobs is not None and not flight.request.is_streamed:
            # the terminal has those of the whole prompt, which are kept nowhere else; its client has nothing yet
            flight.completion.start_over()
        self._flights.start_attempt(flight, card.worker_id)
        span = flight.span
        if span.is_recording:
            known: tracing.Attributes = {tracing.WORKER_ID: card.worker_id, tracing.ATTEMPT: flight.attempt}
            span = span.start_child("dispatch", "client", known)
        run = self._workers.prepare(card, _RUN, self.to_run(flight, card.epoch, placement), span.headers())
        attempt = Attempt(placement, span, run, time.monotonic())
        flight.way.add(placement, attempt.began_at, len(flight.completion))
        if self._workers.sender.fits(run.payload):
            self._send(flight, attempt, run)
        return attempt

    def take_accept(self, flight: Flight, attempt: Attempt) -> bool:
        """Reads a worker's answer to a run; returns whether the worker has accepted it, and owns the request from now
        on. Otherwise the attempt is left for `finish`."""
        assert attempt.reply is not None
        card = attempt.placement.worker.card
        if attempt.reply.cancelled() or attempt.reply.exception() is not None:
            return False
        try:
            is_accepted = _RUN.replies.decode(attempt.reply.result().data).accepted
        except errors.RequestError:
            return False
        if not is_accepted or not self._flights.holds(flight) or self._fleet.is_lost(card):
            return False
        flight.awaiting_worker_id, flight.in_doubt = None, False
        self.accept(flight, card)
        if attempt.span is not flight.span:
            attempt.span.end()
        return True

    async def finish(self, flight: Flight, attempt: Attempt) -> errors.Error | None:
        """Waits for the answer to a run; returns None if the worker accepts, or if the request has ended meanwhile.

        Returns the error after which the request may be placed elsewhere; if it is `worker_lost`, the worker may have
        published text before. Raises RequestError(worker_lost) if the worker may hold the request and does not reply,
        and AlreadyStreamingError."""
        self._unanswered[flight] = attempt.placement.worker.card.address
        try:
            if attempt.span is flight.span:
                return await self._finish(flight, attempt)
            with attempt.span as span:
                refusal = await self._finish(flight, attempt)
                if refusal is not None:
                    span.set_error(str(refusal.code))
                return refusal
        finally:
            del self._unanswered[flight]

    def unanswered(self) -> set[subjects.WorkerAddress]:
        """Returns the workers that have not answered a run of this router yet."""
        return set(self._unanswered.values())

    async def revoke(self, flight: Flight, worker: Worker, *, takes: bool = False) -> Revocation:
        """Makes a worker drop a request that it may hold. With `takes`, makes a leaving worker give
        up one that it has accepted.

        Returns once the worker has replied, or its epoch is over: no responders may just mean that it is reconnecting.
        Raises RequestError(worker_lost) if the worker lives and does not reply: it may still hold the request."""
        flight.in_doubt, flight.last_words = True, None
        try:
            return await self._revoke(flight, worker, takes)
        finally:
            flight.in_doubt = False

    def move(self, flight: Flight, address: subjects.WorkerAddress, attempt: int) -> None:
        """Tells a worker that another one continues a request that it may still have, without waiting for an answer."""
        drop = internal.Control(op="drop", request_id=flight.key, attempt=attempt, moved=True)
        subject = self._names.worker(address.model, address.worker_id, _CONTROL.name)
        with contextlib.suppress(OutboundBufferLimitError, ConnectionError):
            self._bus.publish(subject, codec.encode(drop))

    def repeat_end(self, flight: Flight, card: messages.Card) -> None:
        """Asks a worker to publish the end of a request again, of which this router has not heard in time.

        Whatever kept the end from this router may have kept it from the client too, such as a link between brokers that
        lost what it had taken. Entries come before their chunks, so the client has no more tokens than were reported
        here; if that is not known, it gets the terminal alone."""
        is_known = flight.prompt_ids is not None and not flight.lacks_tokens
        offset = len(flight.completion) if is_known else limits.MAX_TOKENS
        tasks.background("repeat an end", self._repeat_end(card, flight.key, offset))

    async def _repeat_end(self, card: messages.Card, key: str, offset: int) -> None:
        """Asks until the worker's answer shows that the link has carried it all: what a worker answers, here to a drop
        of nothing, is sent behind what it has published. Text that may have arrived is not asked for again."""
        of_nothing = internal.Control(op="drop", request_id=key, attempt=0)
        until = time.monotonic() + limits.ENDED_STREAM_TTL_S
        while time.monotonic() < until:
            async with self._repeating:
                with contextlib.suppress(NoRespondersError, OutboundBufferLimitError, OSError, errors.RequestError):
                    await self._workers.call(card, _CONTROL, of_nothing, _MAX_TIMEOUT_S)
                    body = codec.encode(messages.ResyncRequest(offset=offset), codec.Encoding.JSON)
                    resync = internal.Control(op="resync", request_id=key, body=body)
                    self._workers.publish(card, _CONTROL.name, resync)
                    offset = limits.MAX_TOKENS
                    await self._workers.call(card, _CONTROL, of_nothing, _MAX_TIMEOUT_S)
                    return
            await asyncio.sleep(_RETRY_S)

    def to_run(self, flight: Flight, epoch: str, placement: Placement | None = None) -> internal.Run:
        """Returns the run of a request's current attempt; `placement` is missing while no worker has been chosen."""
        assert flight.prompt_ids is not None, flight
        now = time.monotonic()
        elapsed_s = 0.0 if flight.first_accepted_at is None else now - flight.first_accepted_at
        return internal.Run(
            request_id=flight.key,
            attempt=flight.attempt,
            epoch=epoch,
            router_id=self._router_id,
            router_network=self._bus.network,
            reply=flight.reply,
            key_id=flight.address.key_id,
            charged_tokens=flight.ticket.num_tokens,
            rate_limits=flight.rate_limits,
            encoding=flight.encoding,
            token_ids=flight.prompt_ids,
            params=_to_params(flight),
            adapters=[internal.RunAdapter(digest=digest, scale=scale) for digest, scale in flight.adapters],
            is_chat=flight.is_chat,
            remaining_ms=flight.remaining_ms(now),
            age_ms=(now - flight.received_at) * 1e3,
            resume_from=flight.completion.resume_from(elapsed_s * 1e3),
            routing=None if placement is None else placement.report,
            expected_cached_tokens=0 if placement is None else placement.expected_cached_tokens,
            fetch_from=None if placement is None else _to_source(placement),
            routing_options=flight.request.routing,
            copy_of=flight.request.copy_of or "",
            passes_on=True,
            wants_answer=flight.wants_answer and placement is not None and FEATURE in placement.worker.card.features,
            wants_reasoning=flight.wants_reasoning,
        )

    def _send(self, flight: Flight, attempt: Attempt, staged: Outgoing) -> None:
        attempt.sent_at = time.monotonic()
        attempt.reply = self._workers.send(staged, limits.ACCEPT_TIMEOUT_S + _FLUSH_TIMEOUT_S)
        flight.awaiting_worker_id, flight.in_doubt = attempt.placement.worker.card.worker_id, True

    async def _stage(self, flight: Flight, attempt: Attempt) -> errors.Error | None:
        """Sends a run in parts. Returns the error after which the request may be placed elsewhere."""
        card = attempt.placement.worker.card
        try:
            self._send(flight, attempt, await self._workers.sender.stage(attempt.run))
        except (TimeoutError, ConnectionError) as error:
            return errors.make_error(errors.Code.NO_WORKER, f"worker {card.worker_id} does not take the run: {error}")
        except NoRespondersError:
            return self._no_responders(card)
        except errors.RequestError as refusal:
            if refusal.error.code is not errors.Code.PAYLOAD_TOO_LARGE:
                return refusal.error
            # a worker of an earlier version; others may take it
            return errors.make_error(errors.Code.NO_WORKER, f"worker {card.worker_id}: {refusal.error.message}")
        return None

    async def _finish(self, flight: Flight, attempt: Attempt) -> errors.Error | None:
        worker = attempt.placement.worker
        card = worker.card
        if attempt.reply is None and (unsent := await self._stage(flight, attempt)) is not None:
            return unsent
        assert attempt.reply is not None
        try:
            timeout_s = max(0.0, attempt.sent_at + limits.ACCEPT_TIMEOUT_S - time.monotonic())
            reply = await self._workers.read(card, _RUN, await self._answer(card, attempt.reply, timeout_s))
        except NoRespondersError:
            return self._no_responders(card)
        except PayloadTooLargeError as error:
            return errors.make_error(errors.Code.PAYLOAD_TOO_LARGE, str(error))
        except (TimeoutError, ConnectionError):
            return await self._revoke_unanswered(flight, worker, None)
        except errors.RequestError as problem:  # an invalid reply, which may have been an accept
            return await self._revoke_unanswered(flight, worker, problem.error)
        finally:
            flight.awaiting_worker_id, flight.in_doubt = None, False
        if not self._flights.holds(flight):
            return None  # the worker's events ended it before this task read the accept
        if reply.same_reply:
            raise AlreadyStreamingError(flight.key)
        if not reply.accepted:
            flight.cancelled = flight.cancelled or reply.cancelled
            return reply.error or errors.make_error(errors.Code.INTERNAL)
        if self._fleet.is_lost(card):
            return await self._revoke_unanswered(flight, worker, None)
        self.accept(flight, card)
        return None

    def _no_responders(self, card: messages.Card) -> errors.Error:
        self._fleet.mark_no_responders(card)
        return errors.make_error(errors.Code.NO_WORKER, f"worker {card.worker_id} does not answer")

    async def _revoke_unanswered(
        self, flight: Flight, worker: Worker, problem: errors.Error | None
    ) -> errors.Error | None:
        """Takes back a run that a worker may or may not have accepted; `problem` says what was wrong with its reply."""
        flight.awaiting_worker_id = None
        if not self._flights.holds(flight):
            return None
        match await self.revoke(flight, worker):
            case Revocation.KEPT:
                return None
            case Revocation.LOST:
                return errors.make_error(errors.Code.WORKER_LOST)
            case Revocation.DROPPED:
                text = f"worker {worker.card.worker_id} did not accept in time"
                return problem or errors.make_error(errors.Code.NO_WORKER, text)

    async def _revoke(self, flight: Flight, worker: Worker, takes: bool) -> Revocation:
        card = worker.card
        timeout_s, unanswered_s = limits.ACCEPT_TIMEOUT_S, 0.0
        while unanswered_s < _GIVE_UP_S:
            signs = self._fleet.signs_of_life(card)
            waited_s = _RETRY_S
            if flight.has_new_tokens and flight.ended_by == card.worker_id:
                self.accept(flight, card)  # its terminal was sent: a drop would be refused
                return Revocation.KEPT
            try:
                reply = await self._ask(flight, card, takes, timeout_s)
            except ConnectionError:  # this router is disconnected, which says nothing about the worker
                await asyncio.sleep(_RETRY_S)
                continue
            except (NoRespondersError, errors.RequestError):
                await asyncio.sleep(_RETRY_S)
            except TimeoutError:  # perhaps the round trip is just slow
                waited_s, timeout_s = timeout_s, min(2 * timeout_s, _MAX_TIMEOUT_S)
            else:
                # Another epoch's answer says nothing of this one: neither what it has published nor that it lives. A
                # process that was started again answers while it loads, long before its card.
                is_of_epoch = reply.epoch in (None, card.epoch)
                if is_of_epoch:
                    self._fleet.renew_lease(card, time.monotonic())
                else:  # other requests are not sent to the dead worker
                    self._fleet.mark_no_responders(card)
                is_current = is_of_epoch and not self._fleet.is_lost(card)
                if is_current and reply.ok:
                    if isinstance(reply, internal.TakeReply):
                        self._restore(flight, reply)
                    return Revocation.DROPPED
                if is_current:
                    self._fleet.mark_behind(card)  # the event that ended the request may have been lost
                    self.accept(flight, card)
                    return Revocation.KEPT
                await asyncio.sleep(_RETRY_S)
            if self._fleet.is_lost(card):
                self._fleet.remove(card)
                return Revocation.LOST
            # Only time in which the worker was heard of counts: a partition must not end the request.
            if self._fleet.signs_of_life(card) != signs:
                unanswered_s += waited_s
        raise errors.request_error(errors.Code.WORKER_LOST, f"worker {card.worker_id} no longer answers")

    async def _ask(
        self, flight: Flight, card: messages.Card, takes: bool, timeout_s: float
    ) -> internal.ControlReply | internal.TakeReply:
        """Asks a worker once to drop a request, or to give it up."""
        if takes:
            known = len(flight.completion)
            take = internal.Take(
                request_id=flight.key, attempt=flight.attempt, known_tokens=known, router_id=self._router_id
            )
            call = self._workers.call(card, _TAKE, take, timeout_s + _FLUSH_TIMEOUT_S)
            return await self._answer(card, tasks.awaited(call), timeout_s)
        drop = internal.Control(op="drop", request_id=flight.key, attempt=flight.attempt)
        asked = self._workers.call(card, _CONTROL, drop, timeout_s + _FLUSH_TIMEOUT_S)
        return await self._answer(card, tasks.awaited(asked), timeout_s)

    def _restore(self, flight: Flight, taken: internal.TakeReply) -> None:
        """Adds the tokens of a request that a worker has given up. Raises RequestError(worker_lost) if they don't
        follow those that are known."""
        self._flights.unbind_stream(flight)  # entries read later would add them again
        if not flight.completion.restore(taken, flight.completion.last_seq):
            raise errors.request_error(errors.Code.WORKER_LOST)
        flight.keep_last_words(taken.last_words)

    async def _answer(self, card: messages.Card, call: "asyncio.Future[AnswerT]", timeout_s: float) -> AnswerT:
        """Waits for a worker's answer. On a timeout, first reads everything that this router has received: an answer
        that lies unread in a busy router must not count as silence."""
        try:
            done, _ = await asyncio.wait([call], timeout=timeout_s)
            if not done:
                try:
                    await self._bus.flush(_FLUSH_TIMEOUT_S)
                except TimeoutError as error:
                    raise ConnectionError("the broker does not answer") from error
                if not call.done():
                    raise TimeoutError(f"worker {card.worker_id} sent no reply within {timeout_s} s")
            return await call
        finally:
            call.cancel()

    def accept(self, flight: Flight, card: messages.Card) -> None:
        """Hands the request over to a worker that has accepted or kept it."""
        now = time.monotonic()
        self._flights.accept(flight, card.worker_id, now)
        flight.way.accepted(card.worker_id, now)
        flight.last_words = None
        flight.hash_scheme = flight.hash_scheme or card.hash_scheme
        self._log.debug(
            "request_placed",
            request_id=flight.key,
            router_id=self._router_id,
            worker_id=card.worker_id,
            attempt=flight.attempt,
        )
        if flight.cancelled:  # the worker has not seen the client's cancel, which came before the request did
            with contextlib.suppress(OutboundBufferLimitError, ConnectionError):
                self._workers.publish(card, "control", internal.Control(op="cancel", request_id=flight.key))


def _to_source(placement: Placement) -> internal.FetchSource | None:
    if placement.fetch_from is None:
        return None
    card = placement.fetch_from.card
    return internal.FetchSource(worker_id=card.worker_id, epoch=card.epoch, leg_ms=placement.remote_prefill_s * 1e3)


def _to_params(flight: Flight) -> params.GenerationParams:
    """Returns the parameters for a run. A completion keeps the limit that its first worker set."""
    asked, first = validation.to_params(flight.request), flight.completion.first_token
    return asked if first is None or first.max_tokens is None else codec.replace(asked, max_tokens=first.max_tokens)
