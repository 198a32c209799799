"""Listens to the workers: feeds the fleet with their cards, events and snapshots, and notices when they fall silent.

A worker is lost when it was silent for `limits.WORKER_LOST_AFTER_S` and this router could have heard it. Silence proves
nothing while this router's own connection is down or its messages lie unread. So it is measured from the moment the
connection is back, and confirmed with a flush."""

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from typing import Protocol

import structlog
from nats.aio.msg import Msg

from tokenbus.protocol import tasks
from tokenbus.protocol.bus.bus import OutboundBufferLimitError, OwnedBus
from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import codec, errors, internal, limits, messages, subjects
from tokenbus.protocol.wire.checks import validation
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.fleet.model_part import ModelPart
from tokenbus.router.requests.lifecycle import RequestLifecycle
from tokenbus.router.requests.recovery import Recovery
from tokenbus.router.telemetry.metrics import RouterMetrics
from tokenbus.router.witness import BrokerWitness
from tokenbus.router.workers.worker import Worker

_cards = codec.Decoder(messages.Card)
_events = codec.Decoder(internal.Events)
_seals = codec.Decoder(internal.Seal)
_beats = codec.Decoder(internal.Beat)
_parts = codec.Decoder(internal.SnapshotPart)

_TICK_S = 0.1
_BROKER_SILENT_S = 1.0
"""A broker that has sent nothing for this long has not delivered workers' events either."""
_DISCOVERY_INTERVAL_S = 0.5
"""Unknown workers are asked for their cards at most this often."""
_REFUSED_TTL_S = 30.0
_MAX_REFUSED = 1_024
_SNAPSHOT_RETRY_S = 1.0
"""A missing snapshot is requested again after this."""


class OnName(Protocol):
    def __call__(self, name: str, *, is_model: bool) -> None:
        """Takes a new name of a model of a router's part (`is_model`), or of such a model with an adapter."""
        ...


class FleetWatch:
    """Keeps the fleet up to date and passes its updates on to the requests."""

    def __init__(
        self,
        bus: OwnedBus,
        names: subjects.Subjects,
        fleet: Fleet,
        recovery: Recovery,
        lifecycle: RequestLifecycle,
        metrics: RouterMetrics,
        part: ModelPart,
        on_name: OnName,
        busy: Callable[[], set[subjects.WorkerAddress]],
    ) -> None:
        """`busy` returns the workers that have requests of this router."""
        self._part = part
        self._on_name = on_name
        self._bus = bus
        self._names = names
        self._fleet = fleet
        self._recovery = recovery
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._inbox = bus.new_inbox()
        self._witness = BrokerWitness(bus, names, fleet, busy, self._give_up)
        self._secret = secrets.token_bytes(16)
        self._discovered_at = 0.0
        self._refused_beats: TTLCache[bool] = TTLCache(_REFUSED_TTL_S, _MAX_REFUSED)
        """The subjects of refused beats, each logged now and then."""
        self._ignore_silence_until = 0.0
        self._confirming: asyncio.Task[None] | None = None
        """Confirms that silent workers are lost, while there are any."""
        self._log = structlog.get_logger()

    async def open(self) -> None:
        """Subscribes, asks every worker for its card, and returns once they have had time to answer. Their snapshots
        are asked for before the router takes anything: until one has come, no stream could outlive its worker."""
        await self._witness.open()
        await self._bus.subscribe(self._names.all_cards, self._on_card)
        self._bus.on_permissions_violation = self._on_permissions_violation
        if self._part.is_whole:
            await self._bus.subscribe(self._names.all_events, self._on_events)
            await self._bus.subscribe(self._names.all_seals, self._on_seal)
            await self._bus.subscribe(self._names.all_beats, self._on_beat)
        for model in self._part.first_names():
            self._on_name(model, is_model=True)
        await self._bus.subscribe(f"{self._inbox}.*.*.*", self._on_snapshot_part)
        self._bus.on_reconnect = self._on_reconnect
        self._restart_discovery()
        await asyncio.sleep(limits.DISCOVERY_WAIT_S)
        self._ask_for_snapshots(time.monotonic())

    async def hear(self, model: str) -> None:
        """Subscribes to what the workers of one model publish."""
        events, seals = self._names.events_of(model)
        await self._bus.subscribe(events, self._on_events)
        await self._bus.subscribe(seals, self._on_seal)
        await self._bus.subscribe(self._names.beats_of(model), self._on_beat)

    async def watch(self) -> None:
        """Watches for silence and for gaps in event logs, until cancelled."""
        try:
            while True:
                self._bus.ping()
                await asyncio.sleep(_TICK_S)
                self._tick(time.monotonic())
        finally:
            self._witness.close()
            if self._confirming is not None:
                self._confirming.cancel()

    def _on_reconnect(self) -> None:
        self._fleet.mark_all_behind()
        self._restart_discovery()

    def _restart_discovery(self) -> None:
        """Asks all workers for their cards; silence before now no longer counts."""
        self._ignore_silence_until = time.monotonic() + limits.WORKER_LOST_AFTER_S
        self._discover()

    def _discover(self) -> None:
        self._discovered_at = time.monotonic()
        self._ask(self._names.discover)

    def _ask(self, subject: str, reply: str = "", body: bytes = b"") -> None:
        with contextlib.suppress(OutboundBufferLimitError):  # everything asked here is soon asked again
            self._bus.publish(subject, body, reply=reply)

    def _tick(self, now: float) -> None:
        hears_broker = self._bus.is_connected and now - self._bus.last_received_at < _BROKER_SILENT_S
        if now < self._ignore_silence_until or not hears_broker:
            self._fleet.renew_all_leases(now)
        else:
            self._witness.tick(now)
        self._fleet.sweep(now)
        if self._confirming is None and self._fleet.has_expired_leases(now):
            self._confirming = tasks.background("confirm lost workers", self._confirm_lost(now))
        self._ask_for_snapshots(now)
        self._lifecycle.tick(now)

    def _ask_for_snapshots(self, now: float) -> None:
        room_bytes = self._bus.max_payload - limits.MESSAGE_RESERVE_BYTES
        for worker in self._fleet.snapshots_due(now, _SNAPSHOT_RETRY_S):
            subject = self._names.worker(worker.card.model, worker.card.worker_id, "snapshot")
            request = self._recovery.snapshot_request(worker, room_bytes)
            request = codec.replace(request, follows_beats=True)
            self._ask(subject, self._snapshot_inbox(worker.card.address), codec.encode(request))

    async def _confirm_lost(self, now: float) -> None:
        """Gives up the workers that were silent at `now`, once all that was received by then has been read."""
        try:
            await self._bus.flush()
        except (TimeoutError, ConnectionError):
            return  # this router is disconnected: nothing is known about the workers
        finally:
            self._confirming = None
        for lost in self._fleet.expire_leases(now):
            self._note_lost(lost, "silent")
            try:
                self._recovery.recover(lost, is_certain=False)
            except Exception:  # a bug of ours with one worker must not keep the streams of the others waiting
                self._log.exception("task_failed", task="recover a lost worker")

    def _give_up(self, gone: Worker) -> None:
        """Gives up a worker whose process is gone, after everything that it has sent was read."""
        self._note_lost(gone, "disconnected")
        self._fleet.give_up(gone)
        self._recovery.recover(gone, is_certain=True)

    def _note_lost(self, worker: Worker, reason: str) -> None:
        card, silent_s = worker.card, time.monotonic() - worker.last_seen_at
        self._metrics.lost_workers.labels(card.model, reason).inc()
        self._log.error(
            "worker_lost", worker_id=card.worker_id, model=card.model, reason=reason, silent_s=round(silent_s, 2)
        )

    def _on_card(self, message: Msg) -> None:
        try:
            card = _cards.decode(message.data)
            address = self._names.parse_worker(message.subject)
        except (errors.RequestError, ValueError) as error:
            self._log.error("card_refused", subject=message.subject, error=str(error))
            return
        if address != (card.model, card.worker_id):
            self._log.error("card_refused", subject=message.subject, error="its subject belongs to another worker")
            return
        if not self._part.has(card.model):
            self._part.note_other(card)
            return
        for name in self._part.new_names(card):
            self._on_name(name, is_model=name == card.model)
        known = self._fleet.find_worker(address)
        update = self._fleet.apply_card(card, time.monotonic())
        if update.refused is not None:
            self._log.error("card_refused", worker_id=card.worker_id, model=card.model, error=update.refused)
            return
        if known is None or known.card.epoch != card.epoch:
            self._recovery.note_fences(card)
            if (announced := self._fleet.find_worker(address)) is not None:
                self._witness.meet(announced)
        if known is None or known.state is not card.state or update.lost:
            self._log.info("worker_state_changed", worker_id=card.worker_id, model=card.model, state=card.state)
        self._recovery.apply(update, address)

    def _on_events(self, message: Msg) -> None:
        try:
            events = _events.decode(message.data)
            address = self._names.parse_worker(message.subject)
        except (errors.RequestError, ValueError) as error:
            self._log.error("events_refused", subject=message.subject, error=str(error))
            return
        if address.worker_id != events.worker_id:
            self._log.error("events_refused", subject=message.subject, error="their subject belongs to another worker")
            return
        if len(events.token_ids) != len(events.stream_nos) or len(events.token_ids) % 4:
            self._log.error("events_refused", subject=message.subject, error="its tokens can't be told apart")
            return
        now = time.monotonic()
        known = self._fleet.find_worker(address)
        before = known.log.num_lost if known is not None else 0
        ejected_until = known.ejection.until if known is not None else 0.0
        update = self._fleet.apply_events(address.model, events, now)
        if known is not None and known.log.num_lost > before:
            self._metrics.lost_events.inc(known.log.num_lost - before)
        if known is not None and known.ejection.until != ejected_until:
            self._log_ejection(known, now)
        if update is not None:
            self._recovery.apply(update, address)
            self._lifecycle.place_waiting()
        elif now - self._discovered_at > _DISCOVERY_INTERVAL_S:
            self._discover()

    def _log_ejection(self, worker: Worker, now: float) -> None:
        worker_id, pause_s = worker.card.worker_id, worker.ejection.until - now
        if pause_s > 0:
            self._log.warning("worker_ejected", worker_id=worker_id, model=worker.card.model, pause_s=round(pause_s, 1))
        else:
            self._log.info("worker_readmitted", worker_id=worker_id, model=worker.card.model)

    def _on_beat(self, message: Msg) -> None:
        try:
            beat = _beats.decode(message.data)
            model, process = self._names.parse_beat(message.subject)
            validation.check_beat(beat)
        except (errors.RequestError, ValueError) as error:
            self._log.error("beat_refused", subject=message.subject, error=str(error))
            return
        now = time.monotonic()
        update = self._fleet.apply_beat(model, process, beat, now)
        self._metrics.beats.inc()
        self._metrics.lost_events.inc(update.num_lost)
        if update.refused and self._refused_beats.get(message.subject, now) is None:
            self._refused_beats.put(message.subject, True, now)
            problem = "it speaks for workers of another process, or contradicts their event logs"
            self._log.error("beat_refused", subject=message.subject, worker_ids=update.refused[:8], error=problem)
        if update.back:
            self._lifecycle.place_waiting()
        if update.strange and now - self._discovered_at > _DISCOVERY_INTERVAL_S:
            self._discover()

    def _on_permissions_violation(self, words: str) -> None:
        """Says what the broker's permissions forbid: to hear beats, without which idle workers soon count as lost, or
        to tell workers that they were given up, without which they are given up later."""
        if f"{self._names.prefix}.beat.".lower() in words.lower():
            self._log.error("beats_not_permitted", subject=self._names.all_beats)
        if f"{self._names.prefix}.router.given_up:".lower() in words.lower():
            self._witness.forbid()
            self._log.error("given_up_not_permitted", subject=f"{self._names.prefix}.router.>")

    def _on_seal(self, message: Msg) -> None:
        try:
            seal = _seals.decode(message.data)
            address = self._names.parse_worker(message.subject)
        except (errors.RequestError, ValueError) as error:
            self._log.error("seal_refused", subject=message.subject, error=str(error))
            return
        self._fleet.apply_seal(address, seal, time.monotonic())

    def _on_snapshot_part(self, message: Msg) -> None:
        if not message.data:  # the broker's notice that there are no responders
            return
        try:
            part = _parts.decode(message.data)
            address = self._parse_snapshot_inbox(message.subject)
        except (errors.RequestError, ValueError) as error:
            self._log.error("snapshot_refused", error=str(error))
            return
        if address.worker_id != part.worker_id:
            self._log.error("snapshot_refused", error=f"{address.worker_id} sent another worker's snapshot")
            return
        now = time.monotonic()
        update = self._fleet.apply_snapshot_part(address.model, part, now)
        self._recovery.apply(update, address)
        if update.snapshot is not None:  # the next worker's turn
            self._ask_for_snapshots(now)

    def _snapshot_inbox(self, address: subjects.WorkerAddress) -> str:
        """The reply subject for one worker's snapshots. Its keyed hash proves that this router has asked that worker:
        no one else can guess it."""
        tokens = subjects.encode_worker(address)
        return f"{self._inbox}.{tokens}.{self._sign(tokens)}"

    def _parse_snapshot_inbox(self, subject: str) -> subjects.WorkerAddress:
        """Returns the worker that was asked to reply there. Raises ValueError if this router has not asked any."""
        tokens, _, signature = subject.removeprefix(self._inbox + ".").rpartition(".")
        if not hmac.compare_digest(signature, self._sign(tokens)):
            raise ValueError("no worker was asked to reply on this subject")
        return subjects.decode_worker(tokens)

    def _sign(self, tokens: str) -> str:
        return hashlib.blake2b(tokens.encode(), digest_size=12, key=self._secret).hexdigest()
