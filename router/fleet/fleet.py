"""Tracks all workers of all models by their messages and the time, and places requests on them.

Besides its incarnation (registry.py), each worker has three state machines:

- Event logs: events are applied in order. After a gap a snapshot is requested (event_log.py).
- Leases: a worker that is silent for a second gets no new requests. After two its lease expires, and it is lost.
- Bookings: a placed request counts as load until the worker's own events count it.

Nothing here waits, reads a clock or sends anything. All times are in seconds of the caller's clock."""

import random

from tokenbus.protocol.wire import internal, messages
from tokenbus.protocol.wire.subjects import WorkerAddress
from tokenbus.router.fleet.registry import WorkerRegistry
from tokenbus.router.fleet.stats import DecisionStats
from tokenbus.router.placement.placement import NoWorker, Placement, PlacementOptions, PlacementRequest
from tokenbus.router.placement.policies import Policy
from tokenbus.router.workers.updates import FleetUpdate
from tokenbus.router.workers.worker import Worker, incarnation_key

_BOOKING_TTL_S = 5.0
"""A booking not confirmed by an event within this time is dropped: its request was lost in transit."""

_MAX_DEVICES = 64
"""A worker that says it has more is not believed."""


class Fleet(WorkerRegistry):
    """Everything that one router knows about its workers."""

    def __init__(self, began_at: float, expected_models: tuple[str, ...] = ()) -> None:
        super().__init__(began_at, expected_models)
        self.stats = DecisionStats()

    def apply_events(self, model: str, events: internal.Events, now: float) -> FleetUpdate | None:
        """Applies an entry of a worker's event log. Returns None if the worker or its incarnation is unknown and should
        be discovered.

        Ends of requests are reported at once, even after a gap: by the time the gap is closed a client may have reused
        the id."""
        address = WorkerAddress(model, events.worker_id)
        worker = self._workers.get(address)
        if self._refused and self._refused.get(incarnation_key(address, events.epoch), now) is not None:
            return FleetUpdate()
        if worker is None or worker.card.epoch != events.epoch:
            return self._apply_late(address, events, now)
        if worker.log.seq is not None and events.seq <= worker.log.seq:
            self.stats.refused_messages += 1
            return FleetUpdate()
        worker.load, worker.state, worker.has_no_responders = events.load, events.state, False
        if events.health is not None and len(events.health.devices) <= _MAX_DEVICES:
            worker.health = events.health
        worker.last_seen_at, worker.lease_expired = now, False  # inlined: this is the hottest path
        ready = worker.log.receive(events)
        self._apply(worker, ready, now)
        if not ready:
            self._refresh(worker)
        return FleetUpdate(worker, ready, tuple(events.finished))

    def apply_seal(self, address: WorkerAddress, seal: internal.Seal, now: float) -> None:
        """Records that everything that belongs to an entry of a worker's event log has reached the broker."""
        worker = self._workers.get(address)
        if worker is None or worker.card.epoch != seal.epoch:
            worker = self._superseded.get(incarnation_key(address, seal.epoch), now)
        if worker is not None:
            worker.log.seal(seal.seq)

    def apply_snapshot_part(self, model: str, part: internal.SnapshotPart, now: float) -> FleetUpdate:
        """Applies a part of a worker's snapshot. The last one closes the gap."""
        worker = self._workers.get(WorkerAddress(model, part.worker_id))
        if worker is None or worker.card.epoch != part.epoch:
            return FleetUpdate()
        worker.renew_lease(now)
        snapshot = worker.log.receive_part(part)
        if snapshot is None:
            self._refresh(worker)
            return FleetUpdate()
        self._owners.replace(worker, snapshot.running)
        self._model(model).replace_blocks(worker, snapshot.runs)
        self._apply(worker, snapshot.events, now)
        return FleetUpdate(worker, snapshot.events, snapshot=snapshot)

    # Event logs

    def snapshots_due(self, now: float, interval_s: float) -> list[Worker]:
        """Returns the workers from which to request a snapshot now, each at most once every `interval_s`."""
        return [worker for worker in self._workers.values() if worker.log.request_snapshot(now, interval_s)]

    def mark_behind(self, card: messages.Card) -> None:
        """Records that this incarnation's events may have been missed."""
        if (worker := self._current(card)) is not None:
            worker.log.mark_behind()

    def mark_all_behind(self) -> None:
        """Records that this router was disconnected and may have missed events of every worker."""
        for worker in self._workers.values():
            worker.log.mark_behind()

    def last_event_seq(self, card: messages.Card) -> int | None:
        """Returns the number of this incarnation's latest event. As long as it grows, the worker is alive."""
        worker = self._current(card)
        return None if worker is None else worker.log.seq

    # Leases

    def has_expired_leases(self, now: float) -> bool:
        """Whether `expire_leases` would return any worker."""
        return any(worker.is_overdue(now) for worker in self._workers.values())

    def expire_leases(self, now: float) -> list[Worker]:
        """Ends the leases of workers that were silent for too long; they get no requests until they are heard from
        again."""
        overdue = [worker for worker in self._workers.values() if worker.is_overdue(now)]
        for worker in overdue:
            worker.lease_expired = True
            self._refresh(worker)
        return overdue

    def is_lost(self, card: messages.Card) -> bool:
        """Whether this incarnation is over, or its lease has expired."""
        worker = self._current(card)
        return worker is None or worker.lease_expired

    def renew_lease(self, card: messages.Card, now: float) -> None:
        """Records a sign of life from this incarnation."""
        if (worker := self._current(card)) is not None:
            worker.renew_lease(now)
            self._refresh(worker)

    def renew_all_leases(self, now: float) -> None:
        """Counts silence from now on, since the router itself could not receive anything."""
        for worker in self._workers.values():
            worker.last_seen_at = now  # an expired lease stays expired: only the worker itself can renew it
            self._refresh(worker)

    def mark_no_responders(self, card: messages.Card) -> None:
        """Records that this incarnation's subjects have no subscriber. It gets no requests until its next event."""
        if (worker := self._current(card)) is not None:
            worker.has_no_responders = True
            self._refresh(worker)

    def remove(self, card: messages.Card) -> None:
        """Removes a worker whose lease has expired, unless it was renewed meanwhile."""
        if (worker := self._current(card)) is not None and worker.lease_expired:
            self._remove(worker)

    # Placement and bookings

    def expected_answer_tokens(self, model: str, max_tokens: int | None) -> int:
        """Returns the expected tokens of a completion with that limit."""
        return self._model(model).expected_answer_tokens(max_tokens)

    def place(
        self,
        model: str,
        request: PlacementRequest,
        policy: Policy,
        rng: random.Random,
        now: float,
        options: PlacementOptions,
    ) -> Placement | NoWorker:
        """Chooses a worker of the model for a request and books it there, in one step."""
        placement = self._model(model).place(request, policy, rng, now, options)
        if isinstance(placement, Placement):
            self.stats.record_placement(request.num_tokens, placement, now)
        return placement

    def book(self, address: WorkerAddress, request: PlacementRequest, now: float) -> None:
        """Books a request at a worker that `place` did not choose, until the worker's events count it."""
        worker = self._workers[address]
        self._model(address.model).book(worker, request, now)

    def unbook(self, address: WorkerAddress, key: str) -> None:
        """Removes a booking, if there is one."""
        worker = self._workers.get(address)
        if worker is not None:
            self._models[address.model].unbook(worker, key)

    def sweep(self, now: float) -> None:
        """Discards outdated bookings, incarnations and some state of each model. Must be called a few times a
        second."""
        self._superseded.expire(now)
        self._refused.expire(now)
        for worker in self._workers.values():
            old = [key for key, booking in worker.bookings.items() if now - booking.at >= _BOOKING_TTL_S]
            for key in old:
                del worker.bookings[key]
            if old:
                self._refresh(worker)
        for model in self._models.values():
            model.sweep(now)

    # Reports to clients

    def card_view(self, worker: Worker, now: float) -> messages.Card:
        """Returns a worker's card as clients see it."""
        return worker.tracked_card(self._model(worker.card.model).num_blocks_of(worker), now)

    def router_view(self, router_id: str, waiting: int, now: float) -> messages.RouterStats:
        """Returns this router's state as clients see it; `waiting` requests are in its queue."""
        num_blocks = sum(model.num_blocks for model in self._models.values())
        return self.stats.report(router_id, self._workers.values(), self._refused.values(now), num_blocks, waiting, now)

    def _apply_late(self, address: WorkerAddress, events: internal.Events, now: float) -> FleetUpdate | None:
        """Applies an entry of an ended incarnation: only what it says about requests still counts."""
        worker = self._superseded.get(incarnation_key(address, events.epoch), now)
        if worker is None:
            self.stats.refused_messages += 1
            return None
        return FleetUpdate(worker, worker.log.receive(events), tuple(events.finished))

    def _apply(self, worker: Worker, events: tuple[internal.Events, ...], now: float) -> None:
        for one in events:
            for started in one.started:
                self._owners.start(worker, started.id)
            for key in one.finished:
                self._owners.finish(worker, key)
            for key in one.legs:
                worker.bookings.pop(key, None)
            for key in one.taken:
                self._owners.forget(worker, key)
            self._models[worker.card.model].apply(worker, one, now)

    def _refresh(self, worker: Worker) -> None:
        self._models[worker.card.model].refresh(worker)
