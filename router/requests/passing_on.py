"""Passes clients' cancels and resyncs on to the workers that have the streams.

Clients name requests, not workers, so what they publish reaches every router, and each router that knows which worker
has the stream tells that one: the worker answers the client, once. All of them do, and not just the stream's guardian,
since a router that is frozen or gone tells nobody. Workers hear cancels and resyncs themselves only while that may not
reach them: while a stream's guardian is gone, or does not answer."""

import contextlib
import time
from collections.abc import Iterable
from typing import Literal

from nats.aio.msg import Msg

from tokenbus.protocol.bus.bus import Bus, OutboundBufferLimitError
from tokenbus.protocol.wire import codec, internal, limits, subjects
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.requests.flights.flight import Flights
from tokenbus.router.telemetry.metrics import RouterMetrics
from tokenbus.router.workers.worker import Worker

VIA = "Tokenbus-Via"
"""Header with the id of the router that passed a message on; other routers have already received it from the client."""
_MAX_BYTES = 1_024
"""A message is passed on up to this length. A longer one is invalid, whole or cut, and the request's holder says so."""


def is_passed_on(message: Msg) -> bool:
    """Whether a router has sent it, so that other routers already have it."""
    return VIA in (message.headers or {})


class PassingOn:
    """Passes on what one router receives."""

    def __init__(
        self,
        bus: Bus,
        names: subjects.Subjects,
        fleet: Fleet,
        flights: Flights,
        metrics: RouterMetrics,
        router_id: str,
    ) -> None:
        self._bus = bus
        self._names = names
        self._fleet = fleet
        self._flights = flights
        self._metrics = metrics
        self._via = {VIA: router_id}

    def to_holder(
        self,
        op: Literal["cancel", "resync"],
        message: Msg,
        address: subjects.RequestAddress,
        *,
        is_answered: bool = False,
    ) -> None:
        """Passes a client's message on to the worker that has the stream, if this router knows it, to be answered
        unless it `is_answered`."""
        worker = self._holder(address)
        if worker is None:
            return
        control = internal.Control(
            op=op,
            request_id=address.key,
            body=message.data[:_MAX_BYTES],
            content_type=_content_type(message),
        )
        subject = self._names.worker(worker.card.model, worker.card.worker_id, "control")
        with contextlib.suppress(OutboundBufferLimitError, ConnectionError):
            self._bus.publish(subject, codec.encode(control), "" if is_answered else message.reply)
            self._metrics.passed_on.labels(op).inc()
            self._fleet.stats.passed_on += 1

    def to_workers(self, message: Msg) -> None:
        """Passes on a message that names no model, unless this router knows its stream's worker, which gets it anyway:
        publishes it again with the model in its subject, that of the request if this router guards it, otherwise every
        model that the fleet serves, one after the other. Workers that hear clients hear those of their own model."""
        try:
            address = self._names.parse_request(message.subject)
        except ValueError:
            return
        if self._holder(address) is not None:
            return
        content_type = _content_type(message)
        headers = self._via if content_type is None else {**self._via, codec.CONTENT_TYPE: content_type}
        with contextlib.suppress(OutboundBufferLimitError, ConnectionError):
            for model in self._models(address.key):
                subject = self._names.with_model(message.subject, address, model)
                self._bus.publish(subject, message.data[:_MAX_BYTES], message.reply, headers=headers)

    def _holder(self, address: subjects.RequestAddress) -> Worker | None:
        """Returns the worker that has a request's stream, unless that worker has fallen silent."""
        now, flight = time.monotonic(), self._flights.find_flight(address.key)
        if flight is not None and flight.worker_id is not None and address.model in (None, flight.model):
            worker = self._fleet.find_worker(subjects.WorkerAddress(flight.model, flight.worker_id))
        else:
            worker = self._fleet.holder_of(address.key, address.model, now)
        if worker is None or now - worker.last_seen_at >= limits.WORKER_LOST_AFTER_S:
            return None
        return worker

    def _models(self, key: str) -> Iterable[str]:
        flight = self._flights.find_flight(key)
        return (model for model, _ in self._fleet.models()) if flight is None else (flight.model,)


def _content_type(message: Msg) -> str | None:
    return (message.headers or {}).get(codec.CONTENT_TYPE)
