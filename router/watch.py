"""Listens to the workers: feeds the fleet with what they say, and ends the streams of those that are lost."""

import asyncio
import time

import structlog
from nats.aio.msg import Msg

from protocol import codec, errors, internal, limits, messages, subjects
from protocol.bus import Bus
from router.answer import Answers
from router.fleet import Fleet, Heard
from router.flight import Flight, Flights

_cards = codec.Decoder(messages.Card)
_events = codec.Decoder(internal.Events)

_TICK_S = 0.1
_LONGEST_GAP_S = 0.25
"""A loop that stood still for longer has heard nothing meanwhile, so that silence proves nothing."""
_DISCOVER_EVERY_S = 0.5
"""Unknown workers are asked for their cards at most this often."""
_SETTLED_S = 5.0
"""A request received longer ago than this must show in its worker's load, if it still runs."""


class FleetWatch:
    """Feeds the fleet with cards and events, and ends the streams of workers that are lost."""

    def __init__(
        self, connection: Bus, names: subjects.Subjects, fleet: Fleet, flights: Flights, answers: Answers
    ) -> None:
        self._connection = connection
        self._names = names
        self._fleet = fleet
        self._flights = flights
        self._answers = answers
        self._discovered_at = 0.0
        self._forgive_until = 0.0
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<FleetWatch {self._fleet!r}>"

    async def open(self) -> None:
        """Subscribes, asks every worker for its card, and returns when they have had time to answer."""
        await self._connection.subscribe(self._names.all_cards, self._card)
        await self._connection.subscribe(self._names.all_events, self._event)
        self._connection.on_reconnect = self.discover
        self.discover()
        await asyncio.sleep(limits.DISCOVERY_S)

    def discover(self) -> None:
        """Asks all workers for their cards; silence from before now does not count."""
        now = time.monotonic()
        self._discovered_at = now
        self._forgive_until = now + limits.LOST_S
        self._connection.publish(self._names.discover, b"")

    async def watch(self) -> None:
        """Notices silence; runs until cancelled."""
        ticked_at = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            if now - ticked_at > _LONGEST_GAP_S or now < self._forgive_until or not self._connection.is_connected:
                self._fleet.forgive(now)
            ticked_at = now
            for worker_id in self._fleet.lapse(now):
                self._log.error("worker_lost", worker_id=worker_id)
                self._lose(worker_id)

    def _card(self, message: Msg) -> None:
        try:
            card = _cards.decode(message.data)
            address = self._names.parse_worker(message.subject)
        except (errors.RequestError, ValueError) as error:
            self._log.error("card_refused", subject=message.subject, error=str(error))
            return
        if address != (card.model, card.worker_id):
            self._log.error("card_refused", subject=message.subject, error="it speaks for another worker")
            return
        known = self._fleet.find(card.worker_id)
        heard = self._fleet.take_card(card, time.monotonic())
        if known is None or known.state is not card.state:
            self._log.info("worker_seen", worker_id=card.worker_id, model=card.model, state=card.state)
        self._act(heard, card.worker_id)

    def _event(self, message: Msg) -> None:
        try:
            events = _events.decode(message.data)
        except errors.RequestError as error:
            self._log.error("events_refused", subject=message.subject, error=str(error))
            return
        now = time.monotonic()
        heard = self._fleet.take_events(events, now)
        if heard is not None:
            self._act(heard, events.worker_id)
            if not (events.load.running or events.load.waiting):
                self._clear_up(events.worker_id, now)
        elif now - self._discovered_at > _DISCOVER_EVERY_S:
            self._discovered_at = now
            self._connection.publish(self._names.discover, b"")

    def _act(self, heard: Heard, worker_id: str) -> None:
        for key in heard.spoken:
            flight = self._flights.find(key)
            if flight is not None:
                flight.spoken = True
        for key in heard.finished:
            flight = self._flights.find(key)
            if flight is not None:
                self._finished(flight, worker_id)
        for lost in heard.lost:
            self._lose(lost)

    def _finished(self, flight: Flight, worker_id: str) -> None:
        flight.ended_at = worker_id
        if flight.worker_id == worker_id:
            self._flights.remove(flight)
            self._answers.handed_over(flight)

    def _clear_up(self, worker_id: str, now: float) -> None:
        """Lets go of flights whose end was said in an event that never came: the worker holds nothing any more."""
        for flight in self._flights.at(worker_id):
            if now - flight.received_at > _SETTLED_S:
                self._finished(flight, worker_id)

    def _lose(self, worker_id: str) -> None:
        for flight in self._flights.at(worker_id):
            self._flights.remove(flight)
            self._answers.fail(flight, errors.make_error(errors.Code.WORKER_LOST))
