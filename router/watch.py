"""Listens to the workers: feeds the fleet with what they say, and has the requests of lost ones recovered."""

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import time

import structlog
from nats.aio.msg import Msg

from tokenbus.protocol.bus.bus import Bus, OutboundBufferLimitError
from tokenbus.protocol.wire import codec, errors, internal, limits, messages, subjects
from tokenbus.router.fleet.event_log import AppliedSnapshot
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.fleet.updates import FleetUpdate, LostWorker
from tokenbus.router.metrics import RouterMetrics
from tokenbus.router.requests.flight import Flight, Flights
from tokenbus.router.requests.lifecycle import RequestLifecycle

_cards = codec.Decoder(messages.Card)
_events = codec.Decoder(internal.Events)
_parts = codec.Decoder(internal.SnapshotPart)

_TICK_S = 0.1
_OLDEST_SIGN_S = 1.0
"""A broker that has said nothing for so long has passed on nothing either, so that silence proves nothing."""
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
        lifecycle: RequestLifecycle,
        metrics: RouterMetrics,
    ) -> None:
        self._bus = bus
        self._names = names
        self._fleet = fleet
        self._flights = flights
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._inbox = bus.new_inbox()
        self._secret = secrets.token_bytes(16)
        self._discovered_at = 0.0
        self._forgive_until = 0.0
        self._lapsing: asyncio.Task[None] | None = None
        """Makes sure that workers which seem silent are, while there are some."""
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<FleetWatch {self._fleet!r}>"

    async def open(self) -> None:
        """Subscribes, asks every worker for its card, and returns when they have had time to answer."""
        await self._bus.subscribe(self._names.all_cards, self._card)
        await self._bus.subscribe(self._names.all_events, self._event)
        await self._bus.subscribe(f"{self._inbox}.*.*.*", self._part)
        self._bus.on_reconnect = self._reconnected
        self._discover_anew()
        await asyncio.sleep(limits.DISCOVERY_WAIT_S)

    async def watch(self) -> None:
        """Notices silence and gaps; runs until cancelled."""
        try:
            while True:
                self._bus.ping()
                await asyncio.sleep(_TICK_S)
                self._tick(time.monotonic())
        finally:
            if self._lapsing is not None:
                self._lapsing.cancel()

    def _reconnected(self) -> None:
        self._fleet.mark_all_behind()
        self._discover_anew()

    def _discover_anew(self) -> None:
        """Asks all workers for their cards; silence from before now does not count."""
        self._forgive_until = time.monotonic() + limits.WORKER_LOST_AFTER_S
        self._discover()

    def _discover(self) -> None:
        self._discovered_at = time.monotonic()
        self._ask(self._names.discover)

    def _ask(self, subject: str, reply: str = "") -> None:
        """Has workers say something. While the broker has too much to take nothing is asked: soon it is asked again."""
        with contextlib.suppress(OutboundBufferLimitError):
            self._bus.publish(subject, b"", reply=reply)

    def _tick(self, now: float) -> None:
        if now < self._forgive_until or not self._hears(now):
            self._fleet.renew_all_leases(now)
        self._fleet.sweep(now)
        if self._lapsing is None and self._fleet.has_expired_leases(now):
            self._lapsing = asyncio.create_task(self._lapse(now))
        for worker in self._fleet.snapshots_due(now, _SNAPSHOT_EVERY_S):
            subject = self._names.worker(worker.card.model, worker.card.worker_id, "snapshot")
            self._ask(subject, self._reply_of(worker.card.address))
        self._lifecycle.tick(now)

    async def _lapse(self, now: float) -> None:
        """Gives up the workers that were silent for too long by `now`, once everything that had come from them by then
        has been read: what lies unread in this router's own connection is no silence."""
        try:
            await self._bus.flush()
        except (TimeoutError, ConnectionError):
            return  # nothing is known of anybody
        finally:
            self._lapsing = None
        for lost in self._fleet.expire_leases(now):
            self._metrics.lost_workers.labels(lost.card.model).inc()
            self._log.error("worker_lost", worker_id=lost.card.worker_id)
            self._recover(lost, is_certain=False)

    def _hears(self, now: float) -> bool:
        return self._bus.is_connected and now - self._bus.last_received_at < _OLDEST_SIGN_S

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
        known = self._fleet.find(address)
        update = self._fleet.apply_card(card, time.monotonic())
        if update.refused is not None:
            self._log.error("card_refused", worker_id=card.worker_id, model=card.model, error=update.refused)
            return
        if known is None or known.state is not card.state or update.lost:
            self._log.info("worker_state_changed", worker_id=card.worker_id, model=card.model, state=card.state)
        self._act(update, address)

    def _event(self, message: Msg) -> None:
        try:
            events = _events.decode(message.data)
            address = self._names.parse_worker(message.subject)
        except (errors.RequestError, ValueError) as error:
            self._log.error("events_refused", subject=message.subject, error=str(error))
            return
        if address.worker_id != events.worker_id:
            self._log.error("events_refused", subject=message.subject, error="they speak for another worker")
            return
        now = time.monotonic()
        known = self._fleet.find(address)
        before = known.log.num_lost if known is not None else 0
        update = self._fleet.apply_events(address.model, events, now)
        if known is not None and known.log.num_lost > before:
            self._metrics.lost_events.inc(known.log.num_lost - before)
        if update is not None:
            self._act(update, address)
            self._lifecycle.work_off()
        elif now - self._discovered_at > _DISCOVER_EVERY_S:
            self._discover()

    def _part(self, message: Msg) -> None:
        if not message.data:  # a notice that nobody is there
            return
        try:
            part = _parts.decode(message.data)
            address = self._asked_at(message.subject)
        except (errors.RequestError, ValueError) as error:
            self._log.error("snapshot_refused", error=str(error))
            return
        if address.worker_id != part.worker_id:
            self._log.error("snapshot_refused", error=f"{address.worker_id} speaks for another worker")
            return
        self._act(self._fleet.apply_snapshot_part(address.model, part, time.monotonic()), address)

    def _reply_of(self, address: subjects.WorkerAddress) -> str:
        """Where one worker is to send its snapshots: nobody else can know it."""
        place = subjects.encode_worker(address)
        return f"{self._inbox}.{place}.{self._seal(place)}"

    def _asked_at(self, subject: str) -> subjects.WorkerAddress:
        """The reverse. Raises ValueError for a subject that was never given out."""
        place, _, seal = subject.removeprefix(self._inbox + ".").rpartition(".")
        if not hmac.compare_digest(seal, self._seal(place)):
            raise ValueError("nobody was asked there")
        return subjects.decode_worker(place)

    def _seal(self, place: str) -> str:
        return hashlib.blake2b(place.encode(), digest_size=12, key=self._secret).hexdigest()

    def _act(self, update: FleetUpdate, address: subjects.WorkerAddress) -> None:
        worker_id = address.worker_id
        if update.snapshot is not None:
            self._catch_up(update.snapshot, address)
        for flight in self._flights.told_of(update.first_token_sent, address.model):
            self._flights.spoke(flight)
        for flight in self._flights.told_of(update.finished, address.model):
            self._finished(flight, worker_id)
        if update.lost is not None:
            self._log.error("worker_epoch_changed", worker_id=worker_id, epoch=update.lost.card.epoch)
            self._recover(update.lost, is_certain=True)
        if update.left:
            for flight in self._flights.at(address):
                self._finished(flight, worker_id)

    def _catch_up(self, caught: AppliedSnapshot, address: subjects.WorkerAddress) -> None:
        """Sets right what is believed of the requests that the worker had when it was asked for the snapshot."""
        worker, worker_id = self._fleet.find(address), address.worker_id
        assert worker is not None, address
        self._metrics.snapshots.inc()
        self._log.info("snapshot_applied", worker_id=worker_id, running=len(caught.running))
        for flight in self._flights.at(address):
            running = caught.running.get(flight.key)
            if running is not None and running.first_token_sent:
                self._flights.spoke(flight)
            elif running is None and flight.accepted_at < caught.requested_at:
                self._finished(flight, worker_id)
            elif running is None:  # accepted since, or before and ended: the next snapshot tells
                self._fleet.mark_behind(worker.card)

    def _finished(self, flight: Flight, worker_id: str) -> None:
        flight.ended_at = worker_id
        if worker_id in (flight.worker_id, flight.awaiting):
            self._lifecycle.finish(flight)

    def _recover(self, lost: LostWorker, *, is_certain: bool) -> None:
        flights = self._flights.at(lost.card.address)
        for flight in flights:
            if is_certain and lost.was_behind:
                self._flights.spoke(flight)
            self._lifecycle.recover(flight, lost.card, is_certain=is_certain)
        if not flights:
            self._fleet.remove(lost.card, time.monotonic())
