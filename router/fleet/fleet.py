"""What a router believes of its workers: pure, fed with cards and events and the time, all in seconds."""

import random
from collections.abc import Iterator

from tokenbus.protocol.recent import Recent
from tokenbus.protocol.wire import codec, internal, limits, messages
from tokenbus.protocol.wire.subjects import WorkerAddress, epoch_order
from tokenbus.router.fleet import shown
from tokenbus.router.fleet.heard import Heard, Lost
from tokenbus.router.fleet.holders import Holders
from tokenbus.router.fleet.seen import SeenModels
from tokenbus.router.fleet.tally import Tally
from tokenbus.router.fleet.worker import Worker
from tokenbus.router.placement.placement import Policy
from tokenbus.router.placement.scheme import Scheme
from tokenbus.router.placement.served import NoWorker, Placement, Prompt, Room, Served, Wish

MAX_WORKERS = 4_096
"""Workers beyond this are not taken in: a router's memory stays bounded whatever is published."""
_REFUSED_S = 30.0
"""A card that was refused is looked at again after this: the workers that it contradicts may be gone."""
_BOOKING_LAPSES_S = 5.0
"""A booking that no event has confirmed by then was lost on the way."""

_LEAST = {
    "context_length": 1,
    "max_num_seqs": 0,
    "max_num_batched_tokens": 0,
    "kv_block_size": 1,
    "total_kv_blocks": 0,
    "host_kv_blocks": 0,
}
"""Of the numbers in a card, those that are reckoned with here."""
_MOST = 2**31 - 1
_MAX_CARD_BYTES = 65_536
"""A card has one or two thousand; all of them are kept, and shown to whoever asks for `models`."""


class Fleet:
    """All workers of all models. Nothing here waits, reads a clock, or sends."""

    def __init__(self, began_at: float) -> None:
        self._workers: dict[WorkerAddress, Worker] = {}
        self._served: dict[str, Served] = {}
        self._holders = Holders()
        self._refused: Recent[messages.RefusedCard] = Recent(_REFUSED_S, MAX_WORKERS)
        """Why lives of workers are not believed."""
        self._seen = SeenModels(began_at, MAX_WORKERS)
        self.tally = Tally()
        self._lost_behind: Recent[bool] = Recent(limits.KEEP_ENDED_S, MAX_WORKERS)

    def __repr__(self) -> str:
        return f"<Fleet {len(self._workers)} workers, {len(self._seen)} models seen>"

    def take_card(self, card: messages.Card, now: float) -> Heard:
        """Notes a card: a new worker, a new life of one, or a change."""
        known = self._workers.get(card.address)
        self._seen.add(card.model)
        if card.state is messages.WorkerState.STOPPED:
            if known is not None and known.card.epoch == card.epoch:
                self._leave(known)
                return Heard(left=True)
            return Heard()
        if known is not None and known.card.epoch != card.epoch and not self._supersedes(card.epoch, known, now):
            return Heard()
        refusal = self._why_not(card)
        if refusal is not None:
            life = life_of(card.address, card.epoch)
            is_new = self._refused.get(life, now) is None
            self._refused.put(
                life, messages.RefusedCard(worker_id=card.worker_id, model=card.model, reason=refusal), now
            )
            return Heard(refused=refusal if is_new else None)
        if known is None:
            if len(self._workers) < MAX_WORKERS:
                self._join(Worker(card, now))
            return Heard()
        if known.card.epoch == card.epoch:
            self._change(known, card)
            return Heard()
        self._leave(known)
        self._join(Worker(card, now))
        if known.log.is_behind:
            self._lost_behind.put(life_of(known.card.address, known.card.epoch), True, now)
        return Heard(lost=Lost(known.card, known.log.is_behind))

    def take_events(self, model: str, events: internal.Events, now: float) -> Heard | None:
        """Notes an entry of the event log of a worker of that model; None where the worker or its life is unknown, and
        should be discovered.

        Who has spoken and who has ended is heard at once, also behind a gap: a client may use an id again by then."""
        address = WorkerAddress(model, events.worker_id)
        worker = self._workers.get(address)
        if self._refused.get(life_of(address, events.epoch), now) is not None:
            return Heard()
        if worker is None or worker.card.epoch != events.epoch:
            self.tally.refused_messages += 1
            return None
        if worker.log.seq is not None and events.seq <= worker.log.seq:
            self.tally.refused_messages += 1
            return Heard()
        worker.load, worker.state = events.load, events.state
        worker.heard_at, worker.has_lapsed, worker.is_unreached = now, False, False
        ready = worker.log.take(events)
        self._apply(worker, ready, now)
        if not ready:
            self._of(worker).refresh(worker)
        return Heard(spoken=tuple(events.spoken), finished=tuple(events.finished))

    def take_part(self, model: str, part: internal.SnapshotPart, now: float) -> Heard:
        """Notes a part of a snapshot of a worker of that model; the last one closes the gap."""
        worker = self._workers.get(WorkerAddress(model, part.worker_id))
        if worker is None or worker.card.epoch != part.epoch:
            return Heard()
        worker.heard_at, worker.has_lapsed = now, False
        caught = worker.log.take_part(part)
        if caught is None:
            self._of(worker).refresh(worker)
            return Heard()
        self._holders.replace(worker, caught.running)
        self._of(worker).replace_blocks(worker, caught.runs)
        self._apply(worker, caught.events, now)
        return Heard(caught=caught)

    def behind(self, now: float, every_s: float) -> list[Worker]:
        """The workers to ask for a snapshot now."""
        return [worker for worker in self._workers.values() if worker.log.ask(now, every_s)]

    def doubt_one(self, card: messages.Card) -> None:
        """Something may have been missed of that life of a worker."""
        worker = self._workers.get(card.address)
        if worker is not None and worker.card.epoch == card.epoch:
            worker.log.doubt()

    def doubt(self) -> None:
        """This router was away: something may have been missed of every worker."""
        for worker in self._workers.values():
            worker.log.doubt()

    def has_silent(self, now: float) -> bool:
        """Whether `lapse` would find any."""
        return any(_is_silent(worker, now) for worker in self._workers.values())

    def lapse(self, now: float) -> list[Lost]:
        """The workers that were silent for too long by then, and have not been heard since: they get nothing more."""
        lapsed = []
        for worker in self._workers.values():
            if _is_silent(worker, now):
                worker.has_lapsed = True
                lapsed.append(Lost(worker.card, worker.log.is_behind))
                self._of(worker).refresh(worker)
        return lapsed

    def sweep(self, now: float) -> None:
        """Forgets old bookings."""
        for worker in self._workers.values():
            old = [key for key, booking in worker.bookings.items() if now - booking.at >= _BOOKING_LAPSES_S]
            for key in old:
                del worker.bookings[key]
            if old:
                self._of(worker).refresh(worker)
        for served in self._served.values():
            served.sweep(now)

    def is_lost(self, card: messages.Card) -> bool:
        """Whether that life of a worker is over, or its lease has lapsed."""
        worker = self._workers.get(card.address)
        return worker is None or worker.card.epoch != card.epoch or worker.has_lapsed

    def last_event(self, card: messages.Card) -> int | None:
        """The number of the latest event of that life of a worker: as long as it grows, the worker lives."""
        worker = self._workers.get(card.address)
        return worker.log.seq if worker is not None and worker.card.epoch == card.epoch else None

    def was_behind(self, card: messages.Card, now: float) -> bool:
        """Whether that life of a worker may have said more than was heard."""
        worker = self._workers.get(card.address)
        if worker is None or worker.card.epoch != card.epoch:
            return bool(self._lost_behind.get(life_of(card.address, card.epoch), now))
        return worker.log.is_behind

    def hear(self, card: messages.Card, now: float) -> None:
        """That life of a worker has shown that it lives."""
        worker = self._workers.get(card.address)
        if worker is not None and worker.card.epoch == card.epoch:
            worker.heard_at, worker.has_lapsed = now, False
            self._of(worker).refresh(worker)

    def miss(self, card: messages.Card) -> None:
        """Nobody listens where that life of a worker is given requests: it gets none until its next event."""
        worker = self._workers.get(card.address)
        if worker is not None and worker.card.epoch == card.epoch:
            worker.is_unreached = True
            self._of(worker).refresh(worker)

    def remove(self, card: messages.Card, now: float) -> None:
        """Forgets a lapsed worker, unless it has shown that it lives."""
        worker = self._workers.get(card.address)
        if worker is not None and worker.card.epoch == card.epoch and worker.has_lapsed:
            self._leave(worker)
            if worker.log.is_behind:
                self._lost_behind.put(life_of(card.address, card.epoch), True, now)

    def forgive(self, now: float) -> None:
        """Starts counting silence anew: the router itself was away."""
        for worker in self._workers.values():
            worker.heard_at = now
            self._of(worker).refresh(worker)

    def place(
        self, model: str, prompt: Prompt, policy: Policy, rng: random.Random, now: float, wish: Wish
    ) -> Placement | NoWorker:
        """Chooses a worker of that model for a prompt and books it there, in one step."""
        served = self._served.get(model)
        placement = NoWorker() if served is None else served.place(prompt, policy, rng, now, wish)
        if isinstance(placement, Placement):
            size = placement.worker.card.kv_block_size or 0
            self.tally.placed(prompt.num_tokens, placement.overlap_blocks * size, now)
        return placement

    def room(self, model: str, now: float) -> Room:
        """What the workers of that model have for another request."""
        served = self._served.get(model)
        return Room.NOBODY if served is None else served.room(now)

    def book(self, address: WorkerAddress, prompt: Prompt, now: float) -> None:
        """Counts a request as being at a worker, until an event says so."""
        worker = self._workers[address]
        self._of(worker).book(worker, prompt, now)

    def unbook(self, address: WorkerAddress, key: str) -> None:
        worker = self._workers.get(address)
        if worker is not None and worker.bookings.pop(key, None) is not None:
            self._of(worker).refresh(worker)

    def scheme_of(self, model: str) -> Scheme | None:
        """How the blocks of that model are named; None where no worker has any."""
        served = self._served.get(model)
        return None if served is None else served.scheme

    def num_blocks(self, model: str) -> int:
        """Blocks of a model in the index."""
        return self._served[model].num_blocks if model in self._served else 0

    def find(self, address: WorkerAddress) -> Worker | None:
        return self._workers.get(address)

    def holder_of(self, key: str, model: str) -> Worker | None:
        """The worker of that model that says it holds a request, whoever has placed it there."""
        return self._holders.find(model, key)

    def of_model(self, model: str) -> list[Worker]:
        """All workers that serve a model, whatever their state."""
        served = self._served.get(model)
        return [] if served is None else list(served.workers)

    def some_of(self, model: str, now: float) -> list[Worker]:
        """A few workers that serve a model, such as can work now if there are any."""
        served = self._served.get(model)
        return [] if served is None else served.some(now)

    def able_of(self, model: str, now: float) -> list[Worker]:
        """The workers of a model that may be given a request now."""
        served = self._served.get(model)
        return [] if served is None else served.able(now)

    def longest_context(self, model: str) -> int:
        """Tokens of the longest sequence that a worker of that model can hold."""
        served = self._served.get(model)
        return 0 if served is None else served.longest_context

    def models(self) -> Iterator[tuple[str, list[Worker]]]:
        """Each model that is being served, with its workers."""
        for model in sorted(self._served):
            yield model, list(self._served[model].workers)

    def seen_models(self) -> Iterator[str]:
        """Each model that was ever served, as far as is known here."""
        return iter(self._seen)

    def held_by(self, worker: Worker) -> set[int]:
        """The blocks that a worker is known to hold, by a look at every block there is."""
        return self._of(worker).held_by(worker)

    def card_of(self, worker: Worker) -> messages.Card:
        """A worker's card as clients see it: with its load, and with what is known of it here."""
        return shown.card_of(worker, self._of(worker).num_held(worker))

    def view(self, router_id: str, waiting: int, now: float) -> messages.RouterView:
        """What this router knows and has done."""
        num_blocks = sum(served.num_blocks for served in self._served.values())
        refused = self._refused.values(now)
        return shown.view_of(router_id, self.tally, self._workers.values(), refused, num_blocks, waiting, now)

    def is_unknown(self, model: str, now: float) -> bool:
        """Whether this router is old enough to say that nobody has ever served the model."""
        return self._seen.is_unknown(model, now)

    def unserved(self, now: float) -> list[str] | None:
        """The models that were served and are not now; None where this router is too young to tell."""
        if not self._seen.is_old_enough(now):
            return None
        return [model for model in self._seen if model not in self._served]

    def check_integrity(self) -> None:
        assert len(self._workers) <= MAX_WORKERS
        assert all(address == worker.card.address for address, worker in self._workers.items())
        assert len(self._seen) <= MAX_WORKERS
        of_models = {worker.card.address for served in self._served.values() for worker in served.workers}
        assert of_models == self._workers.keys()
        for served in self._served.values():
            served.check_integrity()
        self._holders.check_integrity(self._workers)

    def _join(self, worker: Worker) -> None:
        self._workers[worker.card.address] = worker
        self._served.setdefault(worker.card.model, Served()).join(worker)

    def _change(self, worker: Worker, card: messages.Card) -> None:
        """The same life has another card, which does not prove that it lives: only its events do."""
        worker.card, worker.state = card, card.state
        self._of(worker).changed(worker)

    def _leave(self, worker: Worker) -> None:
        del self._workers[worker.card.address]
        self._holders.leave(worker)
        served = self._of(worker)
        served.leave(worker)
        if not served.workers:
            del self._served[worker.card.model]

    def _of(self, worker: Worker) -> Served:
        return self._served[worker.card.model]

    def _why_not(self, card: messages.Card) -> str | None:
        """Why a card can't be true beside those of the other workers of its model; None if it may be."""
        served = self._served.get(card.model)
        return _impossible(card) or (None if served is None else served.why_not(card))

    def _apply(self, worker: Worker, ready: tuple[internal.Events, ...], now: float) -> None:
        """Applies what an event log has ready."""
        for events in ready:
            for started in events.started:
                self._holders.start(worker, started.id)
            for key in events.finished:
                self._holders.finish(worker, key)
            self._of(worker).apply(worker, events, now)

    def _supersedes(self, epoch: str, known: Worker, now: float) -> bool:
        """A later life always, any other once the known one has been silent long enough to be lost."""
        return epoch_order(epoch) > epoch_order(known.card.epoch) or now - known.heard_at >= limits.LOST_S


def _is_silent(worker: Worker, now: float) -> bool:
    return not worker.has_lapsed and now - worker.heard_at >= limits.LOST_S


def life_of(address: WorkerAddress, epoch: str) -> str:
    """What one life of one worker is called in tables: others may use its epoch for theirs."""
    return f"{address.model} {address.worker_id} {epoch}"


def _impossible(card: messages.Card) -> str | None:
    """Why a card can't be true whatever the others say; None if it can."""
    if (size := len(codec.encode(card))) > _MAX_CARD_BYTES:
        return f"it has {size} bytes"
    for name, least in _LEAST.items():
        number = getattr(card, name)
        if number is not None and not least <= number <= _MOST:
            return f"its {name} is {number}"
    return None
