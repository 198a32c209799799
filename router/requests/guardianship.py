"""Makes a router the guardian of requests received by others, and tells workers which requests it does not guard.

A worker offers a stream whose guardian is gone; a stopping router offers a request that no worker has. Each offer
reaches one router. If a router accepts a stream, the worker's log names it as the guardian; until then it does not act
on that stream."""

import contextlib
import functools
import time
from collections.abc import Sequence

import structlog
from nats.aio.msg import Msg

from tokenbus.protocol.bus.bus import (
    Bus,
    NoRespondersError,
    OutboundBufferLimitError,
    Outgoing,
    PayloadTooLargeError,
    Subscription,
)
from tokenbus.protocol.bus.reply_sender import ReplySender
from tokenbus.protocol.parts import assembly
from tokenbus.protocol.wire import codec, errors, internal, messages, subjects
from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.protocol.wire.checks import validation
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.fleet.model_part import ModelPart
from tokenbus.router.requests.attempts import Attempts
from tokenbus.router.requests.flights.flight import Flight, Flights
from tokenbus.router.requests.flights.worker_client import WorkerClient
from tokenbus.router.requests.lifecycle import RequestLifecycle
from tokenbus.router.workers.worker import Worker

_guards = codec.Decoder(internal.Guard)
_checks = codec.Decoder(internal.GuardCheck)
_replies = codec.Decoder(internal.GuardReply)
_OFFER_TIMEOUT_S = 2.0


class Guardianship:
    """Takes over other routers' requests, and hands over its own."""

    def __init__(
        self,
        bus: Bus,
        replies: ReplySender,
        names: subjects.Subjects,
        inbox_prefixes: tuple[str, ...],
        fleet: Fleet,
        flights: Flights,
        lifecycle: RequestLifecycle,
        attempts: Attempts,
        workers: WorkerClient,
        router_id: str,
        part: ModelPart,
    ) -> None:
        self._part = part
        self._bus = bus
        self._workers = workers
        self._replies = replies
        self._names = names
        self._inbox_prefixes = inbox_prefixes
        self._fleet = fleet
        self._flights = flights
        self._lifecycle = lifecycle
        self._attempts = attempts
        self._router_id = router_id
        self._subscriptions: list[Subscription] = []
        self._is_open = False
        self._log = structlog.get_logger()

    async def open(self) -> None:
        """Subscribes. Each offer goes to one router of the queue group."""
        self._subscriptions.append(await self._bus.subscribe(self._names.router(self._router_id), self._on_check))
        self._is_open = True
        if self._part.is_whole:
            await self._take_offers(self._names.all_guards)

    async def hear(self, model: str) -> None:
        """Takes requests of one model over, too."""
        if self._is_open:
            await self._take_offers(self._names.guards_of(model))

    async def _take_offers(self, subjects_: Sequence[str]) -> None:
        on_guard = functools.partial(self._on_guard, in_parts=False)
        for subject in subjects_:
            self._subscriptions.append(await self._bus.subscribe(subject, on_guard, queue="router"))

    async def close(self) -> None:
        """Stops taking requests over. Workers notice that no one listens any more, and look for other guardians."""
        self._is_open = False
        while self._subscriptions:
            await self._bus.unsubscribe(self._subscriptions.pop())

    async def offer(self, flight: Flight) -> bool:
        """Asks another router, once, to take over a request that no worker has; returns whether it does."""
        if flight.prompt_ids is None:
            return False
        guard = internal.Guard(
            run=self._attempts.to_run(flight, ""), hash_scheme=flight.hash_scheme, last_words=flight.last_words
        )
        try:
            offer = await self._workers.sender.stage(Outgoing(self._names.guard(flight.model), codec.encode(guard)))
            reply = await self._workers.request(offer, _OFFER_TIMEOUT_S)
            is_accepted = _replies.decode(reply.data).accepted
            if is_accepted and flight.cancelled:  # the other router may have read the cancel before the offer
                with contextlib.suppress(OutboundBufferLimitError):
                    self._bus.publish(self._names.cancel(flight.request_id, flight.tenant, flight.model), b"")
            return is_accepted
        except (NoRespondersError, PayloadTooLargeError, TimeoutError, ConnectionError, errors.RequestError):
            return False

    def _on_check(self, message: Msg) -> None:
        try:
            check = _checks.decode(message.data)
        except errors.RequestError as error:
            self._log.error("guard_check_refused", error=str(error))
            return
        if not self._names.is_unguarded(message.reply, self._router_id):
            return
        unknown = [key for key in check.request_ids if self._flights.find_flight(key) is None]
        answer = internal.Unguarded(router_id=self._router_id, request_ids=unknown, passes_on=True)
        if check.number:
            address = self._names.parse_unguarded(message.reply)
            worker = self._fleet.find_worker(address)
            if worker is None or worker.card.epoch != check.epoch:
                return  # this worker is lost, or not known yet: nothing can be confirmed
            # the answer lets it publish for a while, in which this router must not give it up
            self._fleet.renew_lease(worker.card, time.monotonic())
            moved, doubtful = self._not_confirmed(check, address)
            unknown = [key for key in unknown if key not in moved]
            answer = codec.replace(
                answer,
                request_ids=unknown,
                moved=moved,
                doubtful=doubtful,
                number=check.number,
                network=self._bus.network,
            )
        self._replies.send(message.reply, codec.encode(answer))

    def _not_confirmed(
        self, check: internal.GuardCheck, address: subjects.WorkerAddress
    ) -> tuple[dict[str, int], list[str]]:
        """Returns the requests that the asking worker should not have any more, and those that it may or may not."""
        moved: dict[str, int] = {}
        doubtful, now = [], time.monotonic()
        for key, attempt in zip(check.request_ids, check.attempts, strict=False):
            if (flight := self._flights.find_flight(key)) is None:
                holder = self._fleet.holder_of(key, address.model, now)
                if holder is not None and holder.card.address != address:  # it has ended there
                    moved[key] = attempt
                continue
            if attempt != flight.attempt or flight.worker_id not in (None, address.worker_id):
                moved[key] = attempt
            elif flight.in_doubt or flight.worker_id is None:  # it may get the request back
                doubtful.append(key)
        return moved, doubtful

    def _on_guard(self, message: Msg, *, in_parts: bool) -> None:
        try:
            model, worker_id = self._names.parse_guard(message.subject)
            if self._is_announced(message, model, worker_id):
                return
            guard = _guards.decode(message.data)
            validation.check_run(guard.run)
            if not self._may_answer(message.reply, model, worker_id):
                raise errors.invalid_field("the reply subject", "is not that of a worker or router")
            if (guard.stream_no is None) is not (worker_id is None):
                raise errors.invalid_field("stream_no", "is for a stream at a worker")
            worker = None if worker_id is None else self._find_worker(guard.run, model, worker_id, in_parts=in_parts)
            flight = self._to_flight(guard, model, worker)
            is_accepted = (worker is None) == (worker_id is None) and self._adopt(
                flight, worker, guard, in_parts=in_parts
            )
        except (errors.RequestError, ValueError) as error:
            self._log.error("guard_refused", subject=message.subject, error=str(error))
            return
        answer = internal.GuardReply(
            request_id=flight.key,
            attempt=guard.run.attempt,
            accepted=is_accepted,
            router_id=self._router_id,
            passes_on=True,
        )
        self._replies.send(message.reply, codec.encode(answer))

    def _is_announced(self, message: Msg, model: str, worker_id: str | None) -> bool:
        """Answers the announcement of an offer that comes in parts; returns False for any other message."""
        if not assembly.is_announcement(message.headers):
            return False
        number = message.reply.rpartition(".")[2]
        if worker_id is None and not self._workers.is_router(message.reply):
            raise errors.invalid_field("the reply subject", "is not that of a router")
        if worker_id is not None and message.reply != self._names.received(model, worker_id, number):
            raise errors.invalid_field("the reply subject", "is not that of the worker")
        return self._workers.receiver.announced(
            message, worker_id or "router", functools.partial(self._on_guard, in_parts=True)
        )

    def _may_answer(self, reply: str, model: str, worker_id: str | None) -> bool:
        """Whether a reply subject belongs to the worker that an offer names, or to a router if it names none."""
        if worker_id is None:
            return self._workers.is_router(reply)
        return reply == self._names.worker(model, worker_id, "guarded")

    def _adopt(self, flight: Flight, worker: Worker | None, guard: internal.Guard, *, in_parts: bool) -> bool:
        if not self._lifecycle.adopt(flight, worker):
            return False
        if worker is not None and in_parts:
            # the log may have grown while the parts arrived: a snapshot has the tokens that the offer lacks
            self._fleet.mark_behind(worker.card)
        elif worker is not None and guard.stream_no is not None and self._flights.holds(flight):
            self._flights.bind_stream(flight, worker.incarnation, guard.stream_no)
        return True

    def _find_worker(self, run: internal.Run, model: str, worker_id: str, *, in_parts: bool) -> Worker | None:
        """Returns the worker that offers a stream, or None if this router does not follow that worker's log without a
        gap: the offer's tokens end with the log's entry before it, unless it came in parts."""
        worker = self._fleet.find_worker(subjects.WorkerAddress(model, worker_id))
        if worker is None or worker.card.epoch != run.epoch or worker.lease_expired:
            return None
        if worker.log.is_behind and not in_parts:
            return None
        return worker

    def _to_flight(self, guard: internal.Guard, model: str, worker: Worker | None) -> Flight:
        """Raises RequestError if the run's reply subject is not an inbox of its tenant, and ValueError if its packed
        tokens are malformed."""
        run, now = guard.run, time.monotonic()
        tenant = subjects.key_to_tenant(run.request_id)
        if not subjects.is_inbox(run.reply, self._inbox_prefixes, run.request_id.partition(":")[0]):
            raise errors.invalid_field("reply", "is not an inbox")
        age_ms = run.age_ms or 0.0
        request = messages.GenerateRequest(
            **{name: getattr(run.params, name) for name in run.params.__struct_fields__},
            id=subjects.key_to_request_id(run.request_id),
            timeout_ms=None if run.remaining_ms is None else age_ms + run.remaining_ms,
            routing=run.routing_options,
            copy_of=run.copy_of or None,
        )
        address = subjects.ModelAddress(model, tenant, run.key_id)
        flight = Flight(request, address, run.reply, run.encoding, now - age_ms / 1e3, is_chat=run.is_chat)
        flight.prompt_ids, flight.rate_limits = run.token_ids, run.rate_limits
        flight.num_charged = run.charged_tokens
        flight.adapters = tuple(Adapter(one.digest, one.scale) for one in run.adapters)
        flight.params_bytes = validation.params_bytes(run.params)
        if len(run.token_ids) % 4:
            raise errors.invalid_field("token_ids", "have a length that is not a multiple of four")
        flight.num_prompt_tokens = len(run.token_ids) // 4
        flight.attempt, flight.hash_scheme = run.attempt, guard.hash_scheme
        flight.keep_last_words(guard.last_words)
        if run.resume_from is not None:
            flight.completion.resume(run.resume_from)
        if worker is not None:
            flight.attempt_worker_id, flight.is_named = worker.card.worker_id, False
        if guard.hash_scheme:
            elapsed_ms = 0.0 if run.resume_from is None else run.resume_from.elapsed_ms
            flight.first_accepted_at = now - elapsed_ms / 1e3
        return flight
