"""Tracks all workers of all models by their messages and the time, and places requests on them.

A worker is named by its model and its id. When it restarts it returns with a later epoch: a new incarnation, which
replaces the earlier one. An earlier epoch is believed only once the known incarnation has been silent long enough to be
lost. A card that is implausible, or contradicts the model's other workers, is refused, and so are its events
(decision 0039). Beside its incarnation, each worker has three state machines:

- Event logs: events are applied in order. After a gap a snapshot is requested (event_log.py).
- Leases: a worker that is silent for a second gets no new requests. After two its lease expires, and it is lost.
- Bookings: a placed request counts as load until the worker's own events count it.

Nothing here waits, reads a clock or sends anything. All times are in seconds of the caller's clock."""

import random
from collections.abc import Iterator
from typing import NamedTuple

from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import codec, internal, limits, messages
from tokenbus.protocol.wire.subjects import WorkerAddress
from tokenbus.router.fleet import beats
from tokenbus.router.fleet.beats import BeatUpdate
from tokenbus.router.fleet.lost_workers import LostWorkers
from tokenbus.router.fleet.plausibility import implausibility
from tokenbus.router.fleet.stats import DecisionStats
from tokenbus.router.placement.model_workers import ModelWorkers
from tokenbus.router.placement.placement import NoWorker, Placement, PlacementOptions, PlacementRequest
from tokenbus.router.placement.policies import Policy
from tokenbus.router.placement.sites import HeardSites, OwnSite
from tokenbus.router.workers.event_log import AppliedSnapshot
from tokenbus.router.workers.request_owners import RequestOwners
from tokenbus.router.workers.worker import SETTLE_S, Worker, incarnation_key

MAX_WORKERS = 4_096
"""Workers and model names that are kept: bounds a router's memory whatever is published."""
MAX_SNAPSHOTS = 32
"""Snapshots that a router awaits at a time. After its reconnect it needs those of all workers: 2,000 that hold
4,096 blocks each are some 70 MB."""
_REFUSAL_TTL_S = 30.0
"""A refused card is rechecked after this time: the workers that it contradicts may be gone."""
_BOOKING_TTL_S = 5.0
"""A booking not confirmed by an event within this time is dropped: its request was lost in transit."""
_MAX_DEVICES = 64
"""A worker that says it has more is not believed."""


class FleetUpdate(NamedTuple):
    """The effects of one message; empty for most."""

    worker: Worker | None = None
    """The incarnation that sent the message, unless it is unknown or refused."""
    entries: tuple[internal.Events, ...] = ()
    """Entries of its event log that are now in order, with nothing missing before them."""
    finished: tuple[str, ...] = ()
    """Keys of requests that have ended."""
    ends: tuple[internal.StreamEnd, ...] = ()
    """Their ends, if the worker says how they have ended."""
    lost: Worker | None = None
    """The incarnation superseded by a newer one: it gave up its streams."""
    left: bool = False
    """The worker has stopped, and has ended all its streams itself."""
    snapshot: AppliedSnapshot | None = None
    """The snapshot that has just closed a gap."""
    refused: str | None = None
    """Why the card was refused; None if the same incarnation was refused before."""


class Fleet:
    """Everything that one router knows about its workers."""

    def __init__(self, began_at: float, expected_models: tuple[str, ...] = (), own_site: OwnSite | None = None) -> None:
        """`expected_models` count as known before any worker has served them."""
        self._began_at = began_at
        self._own_site = own_site or OwnSite()
        self._sites = HeardSites()
        self._workers: dict[WorkerAddress, Worker] = {}
        self._models: dict[str, ModelWorkers] = {}
        """The workers of each model that has any."""
        self.stats = DecisionStats()
        self._unserved = ModelWorkers()
        """Stands in for every other model."""
        self._known_models: dict[str, None] = dict.fromkeys(expected_models)
        """Models served by some worker since `began_at`, in order of their first card."""
        self._owners = RequestOwners()
        self._refused: TTLCache[messages.RefusedCard] = TTLCache(_REFUSAL_TTL_S, MAX_WORKERS)
        """Refused cards by incarnation."""
        self.lost = LostWorkers()
        self._superseded: TTLCache[Worker] = TTLCache(SETTLE_S, MAX_WORKERS)
        """Incarnations recently replaced by a later one: their last messages may still be in transit."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self._workers)} workers, {len(self._known_models)} known models>"

    def apply_card(self, card: messages.Card, now: float) -> FleetUpdate:
        """Applies a card, which announces a new worker, a new incarnation of a known one, or a change."""
        self._known_models[card.model] = None
        if len(self._known_models) > MAX_WORKERS:  # evicts the one added first
            del self._known_models[next(iter(self._known_models))]
        known, current = self._workers.get(card.address), self._current(card)
        if card.state is messages.WorkerState.STOPPED:
            if current is not None:
                self._remove(current)
            return FleetUpdate(left=current is not None)
        if known is not None and current is None and not known.is_replaced_by(card.epoch, now):
            return FleetUpdate()
        if refusal := implausibility(card) or self.model(card.model).incompatibility(card):
            key = incarnation_key(card.address, card.epoch)
            is_new = self._refused.get(key, now) is None  # logged once, though workers repeat their cards
            refused = messages.RefusedCard(worker_id=card.worker_id, model=card.model, reason=refusal)
            self._refused.put(key, refused, now)
            return FleetUpdate(refused=refusal if is_new else None)
        if current is not None:  # a card is not a sign of life: only events are
            current.card, current.state = card, card.state
            self.model(card.model).update_card(current)
            return FleetUpdate()
        if known is None:
            if len(self._workers) < MAX_WORKERS:
                self._add(Worker(card, now))
            return FleetUpdate()
        self._remove(known)
        known.supersede(card, now)
        self._superseded.put(known.incarnation, known, now)
        self._add(Worker(card, now))
        return FleetUpdate(lost=known)

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
        worker.renew_lease(now)
        ready = worker.log.receive(events)
        self._apply(worker, ready, now)
        if not ready:
            self._refresh(worker)
        return FleetUpdate(worker, ready, tuple(events.finished), tuple(events.ends))

    def apply_beat(self, model: str, process: str, beat: internal.Beat, now: float) -> BeatUpdate:
        """Applies a process's sign of life for its idle workers. Those that are strange should be discovered."""
        update = beats.apply(self._workers, model, process, beat, now)
        for worker in update.heard:
            self._models[model].mark_heard(worker)
        for worker in update.back:
            self._refresh(worker)
        self.stats.refused_messages += bool(update.refused)
        keys = {name: incarnation_key(WorkerAddress(model, name), beat.epoch) for name in update.strange}
        expected = (self._refused, self._superseded)
        strange = [name for name, key in keys.items() if all(one.get(key, now) is None for one in expected)]
        return update._replace(strange=strange)

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
        self._owners.replace_running(worker, snapshot.running, now)
        self.model(model).replace_blocks(worker, snapshot.runs)
        self._apply(worker, snapshot.events, now)
        return FleetUpdate(worker, snapshot.events, snapshot=snapshot)

    # Event logs

    def snapshots_due(self, now: float, interval_s: float) -> list[Worker]:
        """Returns the workers from which to request a snapshot now, each at most once every `interval_s`.

        At most `MAX_SNAPSHOTS` are outstanding. The busiest workers come first, but those that were asked before last:
        workers that do not answer hold up no others."""
        behind = [worker for worker in self._workers.values() if worker.log.is_behind]
        due = [worker for worker in behind if now - worker.log.requested_at >= interval_s]
        due.sort(key=lambda worker: (worker.log.requested_at, -worker.num_requests))
        room = max(0, MAX_SNAPSHOTS - len(behind) + len(due))
        return [worker for worker in due[:room] if worker.log.request_snapshot(now, interval_s)]

    def mark_behind(self, card: messages.Card) -> None:
        """Records that this incarnation's events may have been missed."""
        if (worker := self._current(card)) is not None:
            worker.log.mark_behind()

    def mark_all_behind(self) -> None:
        """Records that this router was disconnected and may have missed events of every worker."""
        for worker in self._workers.values():
            worker.log.mark_behind()

    def signs_of_life(self, card: messages.Card) -> int | None:
        """Returns how often this incarnation was heard of. As long as that grows, the worker is alive."""
        worker = self._current(card)
        return None if worker is None else worker.num_signs

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

    def give_up(self, worker: Worker) -> None:
        """Removes a worker whose process is known to be gone."""
        worker.lease_expired = True
        self.remove(worker.card)

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
            self.lost.add(worker)

    # Placement and bookings

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
        placement = self.model(model).place(request, policy, rng, now, options)
        if isinstance(placement, Placement):
            self.stats.record_placement(request.num_tokens, placement, now)
        return placement

    def book(self, address: WorkerAddress, request: PlacementRequest, now: float) -> None:
        """Books a request at a worker that `place` did not choose, until the worker's events count it."""
        worker = self._workers[address]
        self.model(address.model).book(worker, request, now)

    def unbook(self, address: WorkerAddress, key: str) -> None:
        """Removes a booking, if there is one."""
        worker = self._workers.get(address)
        if worker is not None:
            self._models[address.model].unbook(worker, key)

    def sweep(self, now: float) -> None:
        """Discards outdated bookings, incarnations and some state of each model. Must be called a few times a
        second."""
        self._superseded.expire(now)
        self._owners.expire(now)
        self._refused.expire(now)
        for worker in self._workers.values():
            old = [key for key, booking in worker.bookings.items() if now - booking.at >= _BOOKING_TTL_S]
            for key in old:
                del worker.bookings[key]
            if old:
                self._refresh(worker)
        for model in self._models.values():
            model.sweep(now)

    # Lookups

    def is_distant(self, worker: Worker) -> bool:
        """Whether a worker says that it runs at another site than this router."""
        return self._own_site.is_other(worker.card)

    def is_cut_off(self, lost: Worker, now: float) -> bool:
        """Whether a lost worker may be well behind a link that is down: it runs at another site, of which nothing has
        been heard since."""
        return self.is_distant(lost) and not self._sites.is_heard_after(lost, self._workers.values(), now)

    def find_worker(self, address: WorkerAddress) -> Worker | None:
        return self._workers.get(address)

    def models(self) -> Iterator[tuple[str, list[Worker]]]:
        """Yields each served model with its workers, by name."""
        for model in sorted(self._models):
            yield model, list(self._models[model].workers)

    def model(self, model: str) -> ModelWorkers:
        """Returns the workers of a model, of which there may be none."""
        return self._models.get(model, self._unserved)

    def workers_of(self, model: str) -> list[Worker]:
        """Returns all workers of the model, in any state."""
        return list(self.model(model).workers)

    def known_models(self) -> Iterator[str]:
        """Yields each model served by some worker since the router started."""
        return iter(self._known_models)

    def unserved(self, now: float) -> list[str] | None:
        """Returns the known models that no worker serves now; None if the router has not been up long enough to
        know."""
        if not self._is_old_enough(now):
            return None
        return [model for model in self._known_models if model not in self._models]

    def has_known(self, model: str) -> bool:
        """Whether some worker has served the model since the router started."""
        return model in self._known_models

    def is_unknown(self, model: str, now: float) -> bool:
        """Whether no worker has ever served the model, as far as a router that has been up long enough knows."""
        return model not in self._known_models and self._is_old_enough(now)

    def owner_of(self, key: str, model: str) -> Worker | None:
        """Returns the model's worker that reports running a request, whichever router placed it there."""
        return self._owners.owner_of(model, key)

    def holder_of(self, key: str, model: str | None, now: float) -> Worker | None:
        """Returns the worker that has a request's stream, open or ended, whichever router placed it there: a worker of
        the model, or of any model if None is named."""
        for name in self._models if model is None else (model,):
            if (address := self._owners.holder_of(name, key, now)) is not None:
                return self._workers.get(address)
        return None

    # Reports to clients

    def card_view(self, worker: Worker, now: float) -> messages.Card:
        """Returns a worker's card as clients see it."""
        return worker.tracked_card(self.num_indexed(worker), now)

    def num_indexed(self, worker: Worker) -> int:
        """Returns how many blocks a worker is known to hold."""
        return self.model(worker.card.model).num_blocks_of(worker)

    def router_view(self, router_id: str, waiting: int, now: float) -> messages.RouterStats:
        """Returns this router's state as clients see it; `waiting` requests are in its queue."""
        num_blocks = sum(model.num_blocks for model in self._models.values())
        workers, refused = self._workers.values(), self._refused.values(now)
        stats = self.stats.report(router_id, workers, refused, num_blocks, waiting, now)
        return codec.replace(stats, site=self._own_site.name)

    def check_integrity(self) -> None:
        assert len(self._workers) <= MAX_WORKERS
        assert all(address == worker.card.address for address, worker in self._workers.items())
        assert len(self._known_models) <= MAX_WORKERS
        by_model = {worker.card.address for model in self._models.values() for worker in model.workers}
        assert by_model == self._workers.keys()
        assert not self._unserved.workers
        for model in self._models.values():
            assert model.workers
            model.check_integrity()
        self._owners.check_integrity(self._workers)

    def _apply_late(self, address: WorkerAddress, events: internal.Events, now: float) -> FleetUpdate | None:
        """Applies an entry of an ended incarnation: only what it says about requests still counts."""
        worker = self._superseded.get(incarnation_key(address, events.epoch), now)
        if worker is None:
            self.stats.refused_messages += 1
            return None
        return FleetUpdate(worker, worker.log.receive(events), tuple(events.finished), tuple(events.ends))

    def _apply(self, worker: Worker, events: tuple[internal.Events, ...], now: float) -> None:
        for one in events:
            for started in one.started:
                self._owners.record_started(worker, started.id)
            for key in one.finished:
                self._owners.record_finished(worker, key, now)
            for key in one.legs:
                worker.bookings.pop(key, None)
            for key in one.taken:
                self._owners.record_taken(worker, key)
            self._models[worker.card.model].apply(worker, one, now)

    def _refresh(self, worker: Worker) -> None:
        self._models[worker.card.model].refresh(worker)

    def _add(self, worker: Worker) -> None:
        self.lost.is_back(worker.card.address)
        self._workers[worker.card.address] = worker
        self._models.setdefault(worker.card.model, ModelWorkers(self._own_site)).add_worker(worker)

    def _remove(self, worker: Worker) -> None:
        del self._workers[worker.card.address]
        self._owners.remove_worker(worker)
        model = self._models[worker.card.model]
        model.remove_worker(worker)
        if not model.workers:
            del self._models[worker.card.model]

    def _current(self, card: messages.Card) -> Worker | None:
        """Returns the worker described by a card, if its incarnation is the current one."""
        worker = self._workers.get(card.address)
        return worker if worker is not None and worker.card.epoch == card.epoch else None

    def _is_old_enough(self, now: float) -> bool:
        """Whether every worker has had time to announce its model."""
        return now - self._began_at > limits.MODEL_NOT_FOUND_AFTER_S
