"""Passes on the cancels and resyncs that do not name their model: workers receive only those of their own model."""

import contextlib
from collections.abc import Iterable

from nats.aio.msg import Msg

from tokenbus.protocol.bus.bus import Bus, OutboundBufferLimitError
from tokenbus.protocol.wire import codec, subjects
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.requests.flights.flight import Flights

VIA = "Tokenbus-Via"
"""Header with the id of the router that passed a message on; other routers have already received it from the client."""
_MAX_BYTES = 1_024
"""A message is passed on up to this length. A longer one is invalid, whole or cut, and the request's holder says so."""


class PassingOn:
    """Publishes such a message again with the model in its subject: that of the request if this router guards it,
    otherwise every model that the fleet serves, one after the other."""

    def __init__(self, bus: Bus, names: subjects.Subjects, fleet: Fleet, flights: Flights, router_id: str) -> None:
        self._bus = bus
        self._names = names
        self._fleet = fleet
        self._flights = flights
        self._via = {VIA: router_id}

    def take(self, message: Msg) -> None:
        """Takes a cancel or resync as a client has sent it."""
        try:
            address = self._names.parse_request(message.subject)
        except ValueError:
            return
        media_type = (message.headers or {}).get(codec.CONTENT_TYPE)
        headers = self._via if media_type is None else {**self._via, codec.CONTENT_TYPE: media_type}
        with contextlib.suppress(OutboundBufferLimitError, ConnectionError):
            for model in self._models(address.key):
                subject = self._names.with_model(message.subject, address, model)
                self._bus.publish(subject, message.data[:_MAX_BYTES], message.reply, headers=headers)

    def _models(self, key: str) -> Iterable[str]:
        flight = self._flights.find_flight(key)
        return (model for model, _ in self._fleet.models()) if flight is None else (flight.model,)


def is_passed_on(message: Msg) -> bool:
    """Whether a router has sent it, so that other routers already have it."""
    return VIA in (message.headers or {})
