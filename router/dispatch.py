"""Brings a request to a worker that accepts it, or ends it with the reason why none did."""

import random
import time

import structlog

from protocol import blocks, codec, errors, internal, limits, messages, subjects
from protocol import request as checks
from protocol.bus import Bus, NoRespondersError, PayloadTooLargeError
from router.fleet import Fleet, Worker
from router.flight import Flight, Flights
from router.placement import NoWorker, Placement, Policy, place

_run_replies = codec.Decoder(internal.RunReply)
_control_replies = codec.Decoder(internal.ControlReply)
MAX_ATTEMPTS = 8
"""Workers that are tried for one request before it ends with the last one's refusal."""


class AlreadyLiveError(Exception):
    """The request is in flight, by a stream that speaks to the same inbox: nothing may be said there."""


class Dispatch:
    """Places requests and waits for their accept. Choosing and booking are one step without a pause."""

    def __init__(
        self,
        connection: Bus,
        names: subjects.Subjects,
        fleet: Fleet,
        flights: Flights,
        router_id: str,
        policies: dict[str, Policy],
        default_policy: str,
        rng: random.Random,
    ) -> None:
        self._connection = connection
        self._names = names
        self._fleet = fleet
        self._flights = flights
        self._router_id = router_id
        self._policies = policies
        self._default_policy = default_policy
        self._rng = rng
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<Dispatch of {self._router_id} by {self._default_policy}>"

    def check(self, wish: messages.RoutingWish | None) -> None:
        """Raises RequestError for a policy that there is not."""
        if wish is not None and wish.policy and wish.policy not in self._policies:
            known = ", ".join(self._policies)
            raise errors.request_error(
                errors.Code.INVALID_REQUEST, f"routing.policy: must be one of {known}", param="routing.policy"
            )

    async def bring(self, flight: Flight, token_ids: list[int]) -> None:
        """Returns when a worker has accepted the request. Raises RequestError when none will.

        Raises AlreadyLiveError when one has it already."""
        prompt_ids = blocks.to_bytes(token_ids)
        refused: dict[str, errors.Error] = {}
        while len(refused) < MAX_ATTEMPTS and not flight.cancelled:
            remaining_ms = flight.remaining_ms(time.monotonic())
            if remaining_ms is not None and remaining_ms <= 0:
                raise errors.request_error(errors.Code.DEADLINE_EXCEEDED)
            match self._place(flight, refused):
                case NoWorker():
                    break
                case Placement(worker):
                    refusal = await self._try(flight, worker, prompt_ids)
                    if refusal is None:
                        return
                    self._fleet.unbook(worker.card.worker_id, flight.key)
                    if not refusal.retryable:
                        raise errors.RequestError(refusal)
                    refused[worker.card.worker_id] = refusal
        if not flight.cancelled:
            raise errors.RequestError(self._why_nobody(flight, refused))

    def _place(self, flight: Flight, refused: dict[str, errors.Error]) -> Placement | NoWorker:
        now = time.monotonic()
        wish = flight.request.routing
        candidates = [w for w in self._fleet.candidates(flight.model, now) if w.card.worker_id not in refused]
        if wish is not None and wish.worker_id:
            candidates = [worker for worker in candidates if worker.card.worker_id == wish.worker_id]
        policy = self._policies[(wish.policy if wish else None) or self._default_policy]
        placement = place(candidates, policy, self._rng)
        if isinstance(placement, Placement):
            self._fleet.book(placement.worker.card.worker_id, flight.key, now)
        return placement

    async def _try(self, flight: Flight, worker: Worker, prompt_ids: bytes) -> errors.Error | None:
        """Sends a run to one worker; None when it accepts. An answer that fails to come is cleared up first."""
        flight.attempt += 1
        card = worker.card
        run = internal.Run(
            request_id=flight.key,
            attempt=flight.attempt,
            epoch=card.epoch,
            router_id=self._router_id,
            reply=flight.reply,
            encoding=flight.encoding,
            token_ids=prompt_ids,
            params=checks.params_of(flight.request),
            remaining_ms=flight.remaining_ms(time.monotonic()),
        )
        subject = self._names.worker(card.model, card.worker_id, "run")
        try:
            headers = {"traceparent": flight.traceparent} if flight.traceparent else None
            answer = await self._connection.request(subject, codec.encode(run), limits.ACCEPT_S, headers)
        except NoRespondersError:
            return errors.make_error(errors.Code.NO_WORKER, f"worker {card.worker_id} does not answer")
        except PayloadTooLargeError as error:
            return errors.make_error(errors.Code.PAYLOAD_TOO_LARGE, str(error))
        except ConnectionError as error:
            return errors.make_error(errors.Code.NO_WORKER, str(error))
        except TimeoutError:
            return await self._take_back(flight, card)
        reply = _run_replies.decode(answer.data)
        if reply.same_reply:
            raise AlreadyLiveError(flight.key)
        if not reply.accepted:
            return reply.error or errors.make_error(errors.Code.INTERNAL)
        self._accepted(flight, card)
        return None

    def _accepted(self, flight: Flight, card: messages.Card) -> None:
        self._flights.accept(flight, card.worker_id)
        self._log.info(
            "request_placed",
            request_id=flight.key,
            router_id=self._router_id,
            worker_id=card.worker_id,
            attempt=flight.attempt,
        )
        if flight.cancelled:
            self._connection.publish(self._names.cancel(flight.request_id, flight.tenant), b"")

    async def _take_back(self, flight: Flight, card: messages.Card) -> errors.Error | None:
        """After an accept that did not come: another may have the run once the worker has dropped it, or is lost."""
        subject = self._names.worker(card.model, card.worker_id, "control")
        drop = codec.encode(internal.Control(op="drop", request_id=flight.key, attempt=flight.attempt))
        while True:
            try:
                answer = await self._connection.request(subject, drop, limits.ACCEPT_S)
            except NoRespondersError:
                break
            except (TimeoutError, ConnectionError):
                known = self._fleet.find(card.worker_id)
                if known is None or known.card.epoch != card.epoch:
                    break
                continue
            if not _control_replies.decode(answer.data).ok:
                self._accepted(flight, card)
                return None
            break
        return errors.make_error(errors.Code.NO_WORKER, f"worker {card.worker_id} did not accept in time")

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
