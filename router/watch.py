"""Listens to the workers: feeds the fleet with what they say, and has the requests of lost ones recovered."""

import asyncio
import contextlib
import time

import structlog
from nats.aio.msg import Msg

from protocol import codec, errors, internal, limits, messages, subjects
from protocol.bus import Bus, BusyError
from protocol.signs import ask_for_signs
from router.eventlog import Caught
from router.fleet import Fleet
from router.flight import Flight, Flights
from router.heard import Heard, Lost
from router.journey import Journeys
from router.metrics import RouterMetrics

_cards = codec.Decoder(messages.Card)
_events = codec.Decoder(internal.Events)
_parts = codec.Decoder(internal.SnapshotPart)

_TICK_S = 0.1
_LONGEST_GAP_S = 0.25
"""A loop that stood still for longer has heard nothing meanwhile, so that silence proves nothing."""
_OLDEST_SIGN_S = 1.0
"""Nor does it without a sign of the broker for so long."""
_DISCOVER_EVERY_S = 0.5
"""Unknown workers are asked for their cards at most this often."""
_SNAPSHOT_EVERY_S = 1.0
"""A snapshot that does not come is asked for again."""


class FleetWatch:
    """Feeds the fleet with cards, events and snapshots, and tells the journeys what became of their requests."""

    def __init__(
        self,
        bus: Bus,
        names: subjects.Subjects,
        fleet: Fleet,
        flights: Flights,
        journeys: Journeys,
        metrics: RouterMetrics,
    ) -> None:
        self._bus = bus
        self._names = names
        self._fleet = fleet
        self._flights = flights
        self._journeys = journeys
        self._metrics = metrics
        self._inbox = bus.new_inbox()
        self._discovered_at = 0.0
        self._forgive_until = 0.0
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<FleetWatch {self._fleet!r}>"

    async def open(self) -> None:
        """Subscribes, asks every worker for its card, and returns when they have had time to answer."""
        await self._bus.subscribe(self._names.all_cards, self._card)
        await self._bus.subscribe(self._names.all_events, self._event)
        await self._bus.subscribe(self._inbox, self._part)
        self._bus.on_reconnect = self._reconnected
        self._discover_anew()
        await asyncio.sleep(limits.DISCOVERY_S)

    async def watch(self) -> None:
        """Notices silence and gaps; runs until cancelled."""
        tasks = [asyncio.create_task(life) for life in (self._tick(), ask_for_signs(self._bus, _OLDEST_SIGN_S))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _reconnected(self) -> None:
        self._fleet.doubt()
        self._discover_anew()

    def _discover_anew(self) -> None:
        """Asks all workers for their cards; silence from before now does not count."""
        self._forgive_until = time.monotonic() + limits.LOST_S
        self._discover()

    def _discover(self) -> None:
        self._discovered_at = time.monotonic()
        self._ask(self._names.discover)

    def _ask(self, subject: str, reply: str = "") -> None:
        """Has workers say something. While the broker has too much to take nothing is asked: soon it is asked again."""
        with contextlib.suppress(BusyError):
            self._bus.publish(subject, b"", reply=reply)

    async def _tick(self) -> None:
        ticked_at = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            if now - ticked_at > _LONGEST_GAP_S or now < self._forgive_until or not self._hears(now):
                self._fleet.forgive(now)
            ticked_at = now
            for lost in self._fleet.lapse(now):
                self._metrics.lost_workers.of(lost.card.model).add()
                self._log.error("worker_silent", worker_id=lost.card.worker_id)
                self._recover(lost, is_certain=False)
            for worker in self._fleet.behind(now, _SNAPSHOT_EVERY_S):
                subject = self._names.worker(worker.card.model, worker.card.worker_id, "snapshot")
                self._ask(subject, self._inbox)
            self._journeys.tick(now)

    def _hears(self, now: float) -> bool:
        return self._bus.is_connected and now - self._bus.heard_at < _OLDEST_SIGN_S

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
        if heard.refused is not None:
            self._log.error("card_refused", worker_id=card.worker_id, model=card.model, error=heard.refused)
            return
        if known is None or known.state is not card.state or heard.lost:
            self._log.info("worker_seen", worker_id=card.worker_id, model=card.model, state=card.state)
        self._act(heard, card.worker_id)

    def _event(self, message: Msg) -> None:
        try:
            events = _events.decode(message.data)
        except errors.RequestError as error:
            self._log.error("events_refused", subject=message.subject, error=str(error))
            return
        now = time.monotonic()
        known = self._fleet.find(events.worker_id)
        before = known.log.num_lost if known is not None else 0
        heard = self._fleet.take_events(events, now)
        if known is not None and known.log.num_lost > before:
            self._metrics.lost_events.of().add(known.log.num_lost - before)
        if heard is not None:
            self._act(heard, events.worker_id)
            self._journeys.work_off()
        elif now - self._discovered_at > _DISCOVER_EVERY_S:
            self._discover()

    def _part(self, message: Msg) -> None:
        if not message.data:  # a notice that nobody is there
            return
        try:
            part = _parts.decode(message.data)
        except errors.RequestError as error:
            self._log.error("snapshot_refused", error=str(error))
            return
        self._act(self._fleet.take_part(part, time.monotonic()), part.worker_id)

    def _act(self, heard: Heard, worker_id: str) -> None:
        if heard.caught is not None:
            self._catch_up(heard.caught, worker_id)
        for key in heard.spoken:
            flight = self._flights.find(key)
            if flight is not None:
                self._flights.spoke(flight)
        for key in heard.finished:
            flight = self._flights.find(key)
            if flight is not None:
                self._finished(flight, worker_id)
        if heard.lost is not None:
            self._log.error("worker_lost", worker_id=worker_id, epoch=heard.lost.card.epoch)
            self._recover(heard.lost, is_certain=True)
        if heard.left:
            for flight in self._flights.at(worker_id):
                self._finished(flight, worker_id)

    def _catch_up(self, caught: Caught, worker_id: str) -> None:
        """Sets right what is believed of the requests that the worker had when it was asked for the snapshot."""
        worker = self._fleet.find(worker_id)
        assert worker is not None, worker_id
        self._metrics.snapshots.of().add()
        self._log.info("worker_caught_up", worker_id=worker_id, running=len(caught.running))
        for flight in self._flights.at(worker_id):
            running = caught.running.get(flight.key)
            if running is not None and running.spoken:
                self._flights.spoke(flight)
            elif running is None and flight.accepted_at < caught.asked_at:
                self._finished(flight, worker_id)
            elif running is None:  # accepted since, or before and ended: the next snapshot tells
                self._fleet.doubt_one(worker.card)

    def _finished(self, flight: Flight, worker_id: str) -> None:
        flight.ended_at = worker_id
        if worker_id in (flight.worker_id, flight.awaiting):
            self._journeys.finish(flight)

    def _recover(self, lost: Lost, *, is_certain: bool) -> None:
        flights = self._flights.at(lost.card.worker_id)
        for flight in flights:
            if is_certain and lost.was_behind:
                self._flights.spoke(flight)
            self._journeys.recover(flight, lost.card, is_certain=is_certain)
        if not flights:
            self._fleet.remove(lost.card, time.monotonic())
