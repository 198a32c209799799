"""What a router believes of its workers: pure, fed with cards and events and the time, all in seconds."""

import random
from collections.abc import Iterator

from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import codec, internal, limits, messages
from tokenbus.protocol.wire.subjects import WorkerAddress, epoch_sort_key
from tokenbus.router.fleet import views
from tokenbus.router.fleet.known_models import KnownModels
from tokenbus.router.fleet.request_owners import RequestOwners
from tokenbus.router.fleet.stats import DecisionStats
from tokenbus.router.fleet.updates import FleetUpdate, LostWorker
from tokenbus.router.fleet.worker import Worker
from tokenbus.router.placement.hash_scheme import HashScheme
from tokenbus.router.placement.model_workers import (
    Capacity,
    ModelWorkers,
    NoWorker,
    Placement,
    PlacementOptions,
    PlacementRequest,
)
from tokenbus.router.placement.policies import Policy

MAX_WORKERS = 4_096
"""Workers beyond this are not taken in: a router's memory stays bounded whatever is published."""
_REFUSAL_TTL_S = 30.0
"""A card that was refused is looked at again after this: the workers that it contradicts may be gone."""
_BOOKING_TTL_S = 5.0
"""A booking that no event has confirmed by then was lost on the way."""

_MIN_VALUES = {
    "context_length": 1,
    "max_num_seqs": 0,
    "max_num_batched_tokens": 0,
    "kv_block_size": 1,
    "total_kv_blocks": 0,
    "host_kv_blocks": 0,
}
"""Of the numbers in a card, those that are reckoned with here."""
_MAX_VALUE = 2**31 - 1
_MAX_CARD_BYTES = 65_536
"""A card has one or two thousand; all of them are kept, and shown to whoever asks for `models`."""


class Fleet:
    """All workers of all models. Nothing here waits, reads a clock, or sends."""

    def __init__(self, began_at: float) -> None:
        self._workers: dict[WorkerAddress, Worker] = {}
        self._models: dict[str, ModelWorkers] = {}
        self._owners = RequestOwners()
        self._refused: TTLCache[messages.RefusedCard] = TTLCache(_REFUSAL_TTL_S, MAX_WORKERS)
        """Why lives of workers are not believed."""
        self._known_models = KnownModels(began_at, MAX_WORKERS)
        self.stats = DecisionStats()
        self._lost_behind: TTLCache[bool] = TTLCache(limits.ENDED_STREAM_TTL_S, MAX_WORKERS)

    def __repr__(self) -> str:
        return f"<Fleet {len(self._workers)} workers, {len(self._known_models)} models seen>"

    def apply_card(self, card: messages.Card, now: float) -> FleetUpdate:
        """Notes a card: a new worker, a new life of one, or a change."""
        known = self._workers.get(card.address)
        self._known_models.add(card.model)
        if card.state is messages.WorkerState.STOPPED:
            if known is not None and known.card.epoch == card.epoch:
                self._remove_worker(known)
                return FleetUpdate(left=True)
            return FleetUpdate()
        if known is not None and known.card.epoch != card.epoch and not self._is_newer(card.epoch, known, now):
            return FleetUpdate()
        refusal = self._refusal_reason(card)
        if refusal is not None:
            life = incarnation_key(card.address, card.epoch)
            is_new = self._refused.get(life, now) is None
            self._refused.put(
                life, messages.RefusedCard(worker_id=card.worker_id, model=card.model, reason=refusal), now
            )
            return FleetUpdate(refused=refusal if is_new else None)
        if known is None:
            if len(self._workers) < MAX_WORKERS:
                self._add_worker(Worker(card, now))
            return FleetUpdate()
        if known.card.epoch == card.epoch:
            self._update_card(known, card)
            return FleetUpdate()
        self._remove_worker(known)
        self._add_worker(Worker(card, now))
        if known.log.is_behind:
            self._lost_behind.put(incarnation_key(known.card.address, known.card.epoch), True, now)
        return FleetUpdate(lost=LostWorker(known.card, known.log.is_behind))

    def apply_events(self, model: str, events: internal.Events, now: float) -> FleetUpdate | None:
        """Notes an entry of the event log of a worker of that model; None where the worker or its life is unknown, and
        should be discovered.

        Who has spoken and who has ended is heard at once, also behind a gap: a client may use an id again by then."""
        address = WorkerAddress(model, events.worker_id)
        worker = self._workers.get(address)
        if self._refused.get(incarnation_key(address, events.epoch), now) is not None:
            return FleetUpdate()
        if worker is None or worker.card.epoch != events.epoch:
            self.stats.refused_messages += 1
            return None
        if worker.log.seq is not None and events.seq <= worker.log.seq:
            self.stats.refused_messages += 1
            return FleetUpdate()
        worker.load, worker.state = events.load, events.state
        worker.last_seen_at, worker.lease_expired, worker.has_no_responders = now, False, False
        ready = worker.log.receive(events)
        self._apply(worker, ready, now)
        if not ready:
            self._of(worker).refresh(worker)
        return FleetUpdate(first_token_sent=tuple(events.first_token_sent), finished=tuple(events.finished))

    def apply_snapshot_part(self, model: str, part: internal.SnapshotPart, now: float) -> FleetUpdate:
        """Notes a part of a snapshot of a worker of that model; the last one closes the gap."""
        worker = self._workers.get(WorkerAddress(model, part.worker_id))
        if worker is None or worker.card.epoch != part.epoch:
            return FleetUpdate()
        worker.last_seen_at, worker.lease_expired = now, False
        caught = worker.log.receive_part(part)
        if caught is None:
            self._of(worker).refresh(worker)
            return FleetUpdate()
        self._owners.replace(worker, caught.running)
        self._of(worker).replace_blocks(worker, caught.runs)
        self._apply(worker, caught.events, now)
        return FleetUpdate(snapshot=caught)

    def snapshots_due(self, now: float, interval_s: float) -> list[Worker]:
        """The workers to ask for a snapshot now."""
        return [worker for worker in self._workers.values() if worker.log.request_snapshot(now, interval_s)]

    def mark_behind(self, card: messages.Card) -> None:
        """Something may have been missed of that life of a worker."""
        worker = self._workers.get(card.address)
        if worker is not None and worker.card.epoch == card.epoch:
            worker.log.mark_behind()

    def mark_all_behind(self) -> None:
        """This router was away: something may have been missed of every worker."""
        for worker in self._workers.values():
            worker.log.mark_behind()

    def has_expired_leases(self, now: float) -> bool:
        """Whether `expire_leases` would find any."""
        return any(_must_expire(worker, now) for worker in self._workers.values())

    def expire_leases(self, now: float) -> list[LostWorker]:
        """The workers that were silent for too long by then, and have not been heard since: they get nothing more."""
        lapsed = []
        for worker in self._workers.values():
            if _must_expire(worker, now):
                worker.lease_expired = True
                lapsed.append(LostWorker(worker.card, worker.log.is_behind))
                self._of(worker).refresh(worker)
        return lapsed

    def sweep(self, now: float) -> None:
        """Forgets old bookings."""
        for worker in self._workers.values():
            old = [key for key, booking in worker.bookings.items() if now - booking.at >= _BOOKING_TTL_S]
            for key in old:
                del worker.bookings[key]
            if old:
                self._of(worker).refresh(worker)
        for served in self._models.values():
            served.sweep(now)

    def is_lost(self, card: messages.Card) -> bool:
        """Whether that life of a worker is over, or its lease has lapsed."""
        worker = self._workers.get(card.address)
        return worker is None or worker.card.epoch != card.epoch or worker.lease_expired

    def last_event_seq(self, card: messages.Card) -> int | None:
        """The number of the latest event of that life of a worker: as long as it grows, the worker lives."""
        worker = self._workers.get(card.address)
        return worker.log.seq if worker is not None and worker.card.epoch == card.epoch else None

    def was_behind(self, card: messages.Card, now: float) -> bool:
        """Whether that life of a worker may have said more than was heard."""
        worker = self._workers.get(card.address)
        if worker is None or worker.card.epoch != card.epoch:
            return bool(self._lost_behind.get(incarnation_key(card.address, card.epoch), now))
        return worker.log.is_behind

    def renew_lease(self, card: messages.Card, now: float) -> None:
        """That life of a worker has shown that it lives."""
        worker = self._workers.get(card.address)
        if worker is not None and worker.card.epoch == card.epoch:
            worker.last_seen_at, worker.lease_expired = now, False
            self._of(worker).refresh(worker)

    def mark_no_responders(self, card: messages.Card) -> None:
        """Nobody listens where that life of a worker is given requests: it gets none until its next event."""
        worker = self._workers.get(card.address)
        if worker is not None and worker.card.epoch == card.epoch:
            worker.has_no_responders = True
            self._of(worker).refresh(worker)

    def remove(self, card: messages.Card, now: float) -> None:
        """Forgets a lapsed worker, unless it has shown that it lives."""
        worker = self._workers.get(card.address)
        if worker is not None and worker.card.epoch == card.epoch and worker.lease_expired:
            self._remove_worker(worker)
            if worker.log.is_behind:
                self._lost_behind.put(incarnation_key(card.address, card.epoch), True, now)

    def renew_all_leases(self, now: float) -> None:
        """Starts counting silence anew: the router itself was away."""
        for worker in self._workers.values():
            worker.last_seen_at = now
            self._of(worker).refresh(worker)

    def place(
        self,
        model: str,
        prompt: PlacementRequest,
        policy: Policy,
        rng: random.Random,
        now: float,
        options: PlacementOptions,
    ) -> Placement | NoWorker:
        """Chooses a worker of that model for a prompt and books it there, in one step."""
        served = self._models.get(model)
        placement = NoWorker() if served is None else served.place(prompt, policy, rng, now, options)
        if isinstance(placement, Placement):
            size = placement.worker.card.kv_block_size or 0
            self.stats.record_placement(prompt.num_tokens, placement.overlap_blocks * size, now)
        return placement

    def capacity(self, model: str, now: float) -> Capacity:
        """What the workers of that model have for another request."""
        served = self._models.get(model)
        return Capacity.NO_WORKERS if served is None else served.capacity(now)

    def book(self, address: WorkerAddress, prompt: PlacementRequest, now: float) -> None:
        """Counts a request as being at a worker, until an event says so."""
        worker = self._workers[address]
        self._of(worker).book(worker, prompt, now)

    def unbook(self, address: WorkerAddress, key: str) -> None:
        worker = self._workers.get(address)
        if worker is not None and worker.bookings.pop(key, None) is not None:
            self._of(worker).refresh(worker)

    def hash_scheme_of(self, model: str) -> HashScheme | None:
        """How the blocks of that model are named; None where no worker has any."""
        served = self._models.get(model)
        return None if served is None else served.hash_scheme

    def num_blocks(self, model: str) -> int:
        """Blocks of a model in the index."""
        return self._models[model].num_blocks if model in self._models else 0

    def find(self, address: WorkerAddress) -> Worker | None:
        return self._workers.get(address)

    def owner_of(self, key: str, model: str) -> Worker | None:
        """The worker of that model that says it holds a request, whoever has placed it there."""
        return self._owners.find(model, key)

    def workers_of(self, model: str) -> list[Worker]:
        """All workers that serve a model, whatever their state."""
        served = self._models.get(model)
        return [] if served is None else list(served.workers)

    def sample_workers(self, model: str, now: float) -> list[Worker]:
        """A few workers that serve a model, such as can work now if there are any."""
        served = self._models.get(model)
        return [] if served is None else served.sample(now)

    def eligible_workers(self, model: str, now: float) -> list[Worker]:
        """The workers of a model that may be given a request now."""
        served = self._models.get(model)
        return [] if served is None else served.eligible(now)

    def max_context_length(self, model: str) -> int:
        """Tokens of the longest sequence that a worker of that model can hold."""
        served = self._models.get(model)
        return 0 if served is None else served.max_context_length

    def models(self) -> Iterator[tuple[str, list[Worker]]]:
        """Each model that is being served, with its workers."""
        for model in sorted(self._models):
            yield model, list(self._models[model].workers)

    def known_models(self) -> Iterator[str]:
        """Each model that was ever served, as far as is known here."""
        return iter(self._known_models)

    def blocks_of(self, worker: Worker) -> set[int]:
        """The blocks that a worker is known to hold, by a look at every block there is."""
        return self._of(worker).blocks_of(worker)

    def card_view(self, worker: Worker) -> messages.Card:
        """A worker's card as clients see it: with its load, and with what is known of it here."""
        return views.card_view(worker, self._of(worker).num_blocks_of(worker))

    def router_view(self, router_id: str, waiting: int, now: float) -> messages.RouterStats:
        """What this router knows and has done."""
        num_blocks = sum(served.num_blocks for served in self._models.values())
        refused = self._refused.values(now)
        return views.router_view(router_id, self.stats, self._workers.values(), refused, num_blocks, waiting, now)

    def is_unknown(self, model: str, now: float) -> bool:
        """Whether this router is old enough to say that nobody has ever served the model."""
        return self._known_models.is_unknown(model, now)

    def unserved(self, now: float) -> list[str] | None:
        """The models that were served and are not now; None where this router is too young to tell."""
        if not self._known_models.is_old_enough(now):
            return None
        return [model for model in self._known_models if model not in self._models]

    def check_integrity(self) -> None:
        assert len(self._workers) <= MAX_WORKERS
        assert all(address == worker.card.address for address, worker in self._workers.items())
        assert len(self._known_models) <= MAX_WORKERS
        of_models = {worker.card.address for served in self._models.values() for worker in served.workers}
        assert of_models == self._workers.keys()
        for served in self._models.values():
            served.check_integrity()
        self._owners.check_integrity(self._workers)

    def _add_worker(self, worker: Worker) -> None:
        self._workers[worker.card.address] = worker
        self._models.setdefault(worker.card.model, ModelWorkers()).add_worker(worker)

    def _update_card(self, worker: Worker, card: messages.Card) -> None:
        """The same life has another card, which does not prove that it lives: only its events do."""
        worker.card, worker.state = card, card.state
        self._of(worker).update_card(worker)

    def _remove_worker(self, worker: Worker) -> None:
        del self._workers[worker.card.address]
        self._owners.remove_worker(worker)
        served = self._of(worker)
        served.remove_worker(worker)
        if not served.workers:
            del self._models[worker.card.model]

    def _of(self, worker: Worker) -> ModelWorkers:
        return self._models[worker.card.model]

    def _refusal_reason(self, card: messages.Card) -> str | None:
        """Why a card can't be true beside those of the other workers of its model; None if it may be."""
        served = self._models.get(card.model)
        return _implausible_field(card) or (None if served is None else served.incompatibility(card))

    def _apply(self, worker: Worker, ready: tuple[internal.Events, ...], now: float) -> None:
        """Applies what an event log has ready."""
        for events in ready:
            for started in events.started:
                self._owners.start(worker, started.id)
            for key in events.finished:
                self._owners.finish(worker, key)
            self._of(worker).apply(worker, events, now)

    def _is_newer(self, epoch: str, known: Worker, now: float) -> bool:
        """A later life always, any other once the known one has been silent long enough to be lost."""
        return (
            epoch_sort_key(epoch) > epoch_sort_key(known.card.epoch)
            or now - known.last_seen_at >= limits.WORKER_LOST_AFTER_S
        )


def _must_expire(worker: Worker, now: float) -> bool:
    return not worker.lease_expired and now - worker.last_seen_at >= limits.WORKER_LOST_AFTER_S


def incarnation_key(address: WorkerAddress, epoch: str) -> str:
    """What one life of one worker is called in tables: others may use its epoch for theirs."""
    return f"{address.model} {address.worker_id} {epoch}"


def _implausible_field(card: messages.Card) -> str | None:
    """Why a card can't be true whatever the others say; None if it can."""
    if (size := len(codec.encode(card))) > _MAX_CARD_BYTES:
        return f"it has {size} bytes"
    for name, least in _MIN_VALUES.items():
        number = getattr(card, name)
        if number is not None and not least <= number <= _MAX_VALUE:
            return f"its {name} is {number}"
    return None
