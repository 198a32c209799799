"""What a router believes of its workers: pure, fed with cards and events and the time, all in seconds."""

from collections.abc import Iterator
from typing import NamedTuple

from protocol import internal, limits, messages
from protocol.recent import Recent
from protocol.subjects import epoch_order
from router.eventlog import Caught, EventLog

MAX_WORKERS = 4_096
"""Workers beyond this are not taken in: a router's memory stays bounded whatever is published."""
MAX_RUNNING = 65_536
"""Requests of one worker that are remembered by their ids."""
_BOOKING_LAPSES_S = 5.0
"""A booking that no event has confirmed by then was lost on the way."""


class Worker:
    """One worker as the last card and events describe it, and what was placed there since."""

    def __init__(self, card: messages.Card, now: float) -> None:
        self.card = card
        self.state = card.state
        self.load = messages.Load()
        self.heard_at = now
        self.has_lapsed = False
        """Its lease has lapsed; what was placed there is being cleared up."""
        self.log = EventLog()
        self.bookings: dict[str, float] = {}
        self.running: set[str] = set()
        """Requests that it holds, by its own word, whoever has placed them."""

    def __repr__(self) -> str:
        return f"<Worker {self.card.worker_id} {self.state} {self.num_requests} requests>"

    @property
    def num_requests(self) -> int:
        """Requests there: those it reports, and those placed that its reports can't know of yet."""
        return self.load.running + self.load.waiting + len(self.bookings)


class Lost(NamedTuple):
    """One life of a worker that is over, or seems to be."""

    card: messages.Card
    was_behind: bool
    """What its streams had said is not known for certain."""


class Heard(NamedTuple):
    """What a message of a worker changed for requests placed earlier."""

    spoken: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    lost: Lost | None = None
    """A new life has begun: the streams of this one were given up."""
    left: bool = False
    """The worker has withdrawn, and has ended all its streams itself."""
    caught: Caught | None = None
    """What the worker holds, after a gap in what was known."""


class Fleet:
    """All workers of all models. Nothing here waits, reads a clock, or sends."""

    def __init__(self, began_at: float) -> None:
        self._began_at = began_at
        self._workers: dict[str, Worker] = {}
        self._seen_models: dict[str, None] = {}
        self._lost_behind: Recent[bool] = Recent(limits.KEEP_ENDED_S, MAX_WORKERS)

    def __repr__(self) -> str:
        return f"<Fleet {len(self._workers)} workers, {len(self._seen_models)} models seen>"

    def take_card(self, card: messages.Card, now: float) -> Heard:
        """Notes a card: a new worker, a new life of one, or a change."""
        known = self._workers.get(card.worker_id)
        self._remember(card.model)
        if card.state is messages.WorkerState.STOPPED:
            if known is not None and known.card.epoch == card.epoch:
                del self._workers[card.worker_id]
                return Heard(left=True)
            return Heard()
        if known is None:
            if len(self._workers) < MAX_WORKERS:
                self._workers[card.worker_id] = Worker(card, now)
            return Heard()
        if known.card.epoch == card.epoch:
            known.card, known.state = card, card.state
            known.heard_at, known.has_lapsed = now, False
            return Heard()
        if not self._supersedes(card.epoch, known, now):
            return Heard()
        self._workers[card.worker_id] = Worker(card, now)
        if known.log.is_behind:
            self._lost_behind.put(known.card.epoch, True, now)
        return Heard(lost=Lost(known.card, known.log.is_behind))

    def take_events(self, events: internal.Events, now: float) -> Heard | None:
        """Notes an entry of an event log; None where the worker or its life is unknown, and should be discovered."""
        worker = self._workers.get(events.worker_id)
        if worker is None or worker.card.epoch != events.epoch:
            return None
        if worker.log.seq is not None and events.seq <= worker.log.seq:
            return Heard()
        worker.load, worker.state = events.load, events.state
        worker.heard_at, worker.has_lapsed = now, False
        return _apply(worker, worker.log.take(events))

    def take_part(self, part: internal.SnapshotPart, now: float) -> Heard:
        """Notes a part of a snapshot; the last one closes the gap."""
        worker = self._workers.get(part.worker_id)
        if worker is None or worker.card.epoch != part.epoch:
            return Heard()
        worker.heard_at, worker.has_lapsed = now, False
        caught = worker.log.take_part(part)
        if caught is None:
            return Heard()
        for key in caught.running:
            worker.bookings.pop(key, None)
        worker.running = set(list(caught.running)[:MAX_RUNNING])
        return _apply(worker, caught.events)._replace(caught=caught)

    def behind(self, now: float, every_s: float) -> list[Worker]:
        """The workers to ask for a snapshot now."""
        return [worker for worker in self._workers.values() if worker.log.ask(now, every_s)]

    def doubt_one(self, card: messages.Card) -> None:
        """Something may have been missed of that life of a worker."""
        worker = self._workers.get(card.worker_id)
        if worker is not None and worker.card.epoch == card.epoch:
            worker.log.doubt()

    def doubt(self) -> None:
        """This router was away: something may have been missed of every worker."""
        for worker in self._workers.values():
            worker.log.doubt()

    def lapse(self, now: float) -> list[Lost]:
        """The workers that have just been silent for too long: they get nothing more. Forgets old bookings."""
        lapsed = []
        for worker in self._workers.values():
            if not worker.has_lapsed and now - worker.heard_at >= limits.LOST_S:
                worker.has_lapsed = True
                lapsed.append(Lost(worker.card, worker.log.is_behind))
            for key in [key for key, at in worker.bookings.items() if now - at >= _BOOKING_LAPSES_S]:
                del worker.bookings[key]
        return lapsed

    def is_lost(self, card: messages.Card) -> bool:
        """Whether that life of a worker is over, or its lease has lapsed."""
        worker = self._workers.get(card.worker_id)
        return worker is None or worker.card.epoch != card.epoch or worker.has_lapsed

    def was_behind(self, card: messages.Card, now: float) -> bool:
        """Whether that life of a worker may have said more than was heard."""
        worker = self._workers.get(card.worker_id)
        if worker is None or worker.card.epoch != card.epoch:
            return bool(self._lost_behind.get(card.epoch, now))
        return worker.log.is_behind

    def hear(self, card: messages.Card, now: float) -> None:
        """That life of a worker has shown that it lives."""
        worker = self._workers.get(card.worker_id)
        if worker is not None and worker.card.epoch == card.epoch:
            worker.heard_at, worker.has_lapsed = now, False

    def remove(self, card: messages.Card, now: float) -> None:
        """Forgets a lapsed worker, unless it has shown that it lives."""
        worker = self._workers.get(card.worker_id)
        if worker is not None and worker.card.epoch == card.epoch and worker.has_lapsed:
            del self._workers[card.worker_id]
            if worker.log.is_behind:
                self._lost_behind.put(card.epoch, True, now)

    def forgive(self, now: float) -> None:
        """Starts counting silence anew: the router itself was away."""
        for worker in self._workers.values():
            worker.heard_at = now

    def book(self, worker_id: str, key: str, now: float) -> None:
        """Counts a request as being there, until an event says so."""
        self._workers[worker_id].bookings[key] = now

    def unbook(self, worker_id: str, key: str) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.bookings.pop(key, None)

    def find(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def holder_of(self, key: str, model: str) -> Worker | None:
        """The worker of that model that says it holds a request, whoever has placed it there."""
        for worker in self._workers.values():
            if key in worker.running and worker.card.model == model:
                return worker
        return None

    def of_model(self, model: str) -> list[Worker]:
        """All workers that serve a model, whatever their state."""
        return [worker for worker in self._workers.values() if worker.card.model == model]

    def candidates(self, model: str, now: float) -> list[Worker]:
        """The workers that may be given a request for that model now."""
        return [
            worker
            for worker in self.of_model(model)
            if worker.state is messages.WorkerState.READY
            and not worker.has_lapsed
            and worker.card.max_num_seqs > 0
            and now - worker.heard_at < limits.SUSPECT_S
            and worker.load.step_age_ms <= _OLDEST_STEP_MS
        ]

    def models(self) -> Iterator[tuple[str, list[Worker]]]:
        """Each model that is being served, with its workers."""
        by_model: dict[str, list[Worker]] = {}
        for worker in self._workers.values():
            by_model.setdefault(worker.card.model, []).append(worker)
        yield from sorted(by_model.items())

    def is_unknown(self, model: str, now: float) -> bool:
        """Whether this router is old enough to say that nobody has ever served the model."""
        return model not in self._seen_models and now - self._began_at > limits.MODEL_NOT_FOUND_AFTER_S

    def check_integrity(self) -> None:
        assert len(self._workers) <= MAX_WORKERS
        assert all(name == worker.card.worker_id for name, worker in self._workers.items())
        assert len(self._seen_models) <= MAX_WORKERS

    def _remember(self, model: str) -> None:
        self._seen_models[model] = None
        if len(self._seen_models) > MAX_WORKERS:
            del self._seen_models[next(iter(self._seen_models))]

    def _supersedes(self, epoch: str, known: Worker, now: float) -> bool:
        """A later life always, any other once the known one has been silent long enough to be lost."""
        return epoch_order(epoch) > epoch_order(known.card.epoch) or now - known.heard_at >= limits.LOST_S


def _apply(worker: Worker, ready: tuple[internal.Events, ...]) -> Heard:
    """Applies what an event log has ready."""
    spoken: list[str] = []
    finished: list[str] = []
    for events in ready:
        for started in events.started:
            worker.bookings.pop(started.id, None)
            if len(worker.running) < MAX_RUNNING:
                worker.running.add(started.id)
        for key in events.finished:
            worker.bookings.pop(key, None)
            worker.running.discard(key)
        spoken += events.spoken
        finished += events.finished
    return Heard(spoken=tuple(spoken), finished=tuple(finished))


_OLDEST_STEP_MS = 2_000.0
"""An engine whose step is older than this gets no new work."""
