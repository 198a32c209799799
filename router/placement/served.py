"""The workers of one model: what they hold, how busy they are, and which of them a prompt should go to; pure."""

import enum
import itertools
import random
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from tokenbus.protocol.recent import Recent
from tokenbus.protocol.wire import internal, limits, messages
from tokenbus.router.fleet.worker import Booking, Worker
from tokenbus.router.placement.columns import Columns, Floats, Numbers, Rows, is_dense
from tokenbus.router.placement.explain import explain
from tokenbus.router.placement.index import PrefixIndex
from tokenbus.router.placement.overlap import overlaps
from tokenbus.router.placement.placement import Policy, View, draw
from tokenbus.router.placement.predictions import Predictions
from tokenbus.router.placement.scheme import Scheme, scheme_of

_OLDEST_STEP_MS = 2_000.0
"""An engine whose step is older than this gets no new work."""
_SOME = 8
_BLOCK_SIZE = Numbers._fields.index("block_size")
"""From this one on policies may know all that is in the columns."""
_SESSION_S = 600.0
_MOST_SESSIONS = 65_536
_MOST_BLOCKS = 1 << 22
"""A card may say what it likes."""


class Prompt(NamedTuple):
    """What placement has to know of a request."""

    key: str
    num_tokens: int
    hashes: Sequence[int] = ()
    """Of its full blocks; none for a request that neither uses nor leaves cache."""
    session: str = ""
    """What it is a part of, by its client's word."""


class Wish(NamedTuple):
    """Which workers may be chosen, and how."""

    only: str | None = None
    """No other than this one."""
    without: Collection[str] = ()
    """None of these."""
    temperature: float = 0.0
    """0 takes the lowest cost; above it others are drawn too."""
    explain: bool = False
    """Whether to say why."""

    def allows(self, worker_id: str) -> bool:
        return worker_id not in self.without and (self.only is None or worker_id == self.only)


class Placement(NamedTuple):
    """The chosen worker, and why."""

    worker: Worker
    policy: str
    overlap_blocks: int = 0
    """Leading blocks that it is known to hold, or expected to."""
    report: messages.RoutingReport | None = None


class Room(enum.Enum):
    """What a model's workers have for another request."""

    SOME = enum.auto()
    NONE = enum.auto()
    """None of them can take it now: they have as many as they can run, or are about to come back."""
    NOBODY = enum.auto()
    """None of them will be able to."""


class NoWorker(NamedTuple):
    """There is nobody to choose."""


_ANYONE = Wish()


class Served:
    """One model's workers. Choosing and booking are one call."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._of_row: list[Worker | None] = []
        self._columns = Columns(limits.SUSPECT_S, _OLDEST_STEP_MS)
        self._index = PrefixIndex()
        self._predictions = Predictions()
        self._turn = 0
        self._sessions: Recent[str] = Recent(_SESSION_S, _MOST_SESSIONS)
        """Which worker has had the last request of each."""

    def __repr__(self) -> str:
        return f"<Served {len(self._workers)} workers, {self._index!r}>"

    @property
    def workers(self) -> Collection[Worker]:
        return self._workers.values()

    def join(self, worker: Worker) -> None:
        """A worker, in a new life, holds nothing."""
        card = worker.card
        worker.row = self._index.join(_most_blocks(card))
        while worker.row >= len(self._of_row):
            self._of_row.append(None)
        self._of_row[worker.row] = worker
        self._columns.join(worker.row)
        self._workers[card.worker_id] = worker
        self.refresh(worker)

    def leave(self, worker: Worker) -> None:
        """A life of a worker is over."""
        del self._workers[worker.card.worker_id]
        self._leave_row(worker)

    def changed(self, worker: Worker) -> None:
        """A worker has published another card in the same life."""
        self._index.allow(worker.row, _most_blocks(worker.card))
        self.refresh(worker)

    def why_not(self, card: messages.Card) -> str | None:
        """Why a card can't belong to this model, beside the others; None if it can."""
        mine, scheme = scheme_of(card), self._scheme_but_of(card.worker_id)
        if scheme is not None and mine is not None and mine != scheme:
            return f"its blocks are {mine}, those of the model's other workers {scheme}"
        return None

    @property
    def scheme(self) -> Scheme | None:
        """How blocks are named here; None where no worker has any."""
        return self._scheme_but_of(None)

    def refresh(self, worker: Worker) -> None:
        """Something that is known of a worker has changed."""
        self._columns.set(worker.row, worker.numbers())

    def apply(self, worker: Worker, events: internal.Events, now: float) -> None:
        """What a worker says that it holds and has done."""
        if events.cleared:
            self._begin_anew(worker)
        if events.removed:
            self._index.remove(worker.row, events.removed)
        for run in events.stored:
            self._index.store(worker.row, run.hashes)
        worker.speed.observe(worker.load_before, events.load, now - worker.applied_at)
        worker.load_before, worker.applied_at = events.load, now
        if events.stored:
            worker.num_unheard = 0
        done = events.load.computed_tokens + events.load.generated_tokens
        if done > worker.done_tokens:
            self._columns.worked(worker.row, done - worker.done_tokens, now)
        worker.done_tokens = done
        self.refresh(worker)

    def replace_blocks(self, worker: Worker, runs: Sequence[internal.BlockRun]) -> None:
        """A snapshot says all that a worker holds; what else is known of it is looked at anew as well."""
        self._begin_anew(worker)
        for run in runs:
            self._index.store(worker.row, run.hashes)

    def place(
        self, prompt: Prompt, policy: Policy, rng: random.Random, now: float, wish: Wish = _ANYONE
    ) -> Placement | NoWorker:
        """Chooses a worker and books the request there."""
        rows = self._columns.eligible(now, prompt.num_tokens)
        if wish.only is not None or wish.without:
            rows = np.array([one.row for one in self._at(rows) if wish.allows(one.card.worker_id)], dtype=np.intp)
        if not len(rows):
            return NoWorker()
        overlap = overlaps(self._index, self._predictions, prompt.hashes, len(self._of_row), now)
        view = self._view(prompt, rows, overlap, now)
        costs = policy.costs(view)
        at = draw(costs, rng, wish.temperature)
        worker = self._of_row[int(rows[at])]
        assert worker is not None
        report = explain(worker, policy.name, self._at(rows), view, costs.tolist()) if wish.explain else None
        overlap_blocks = int(overlap[worker.row])
        self._book(worker, prompt, overlap_blocks, now)
        return Placement(worker, policy.name, overlap_blocks, report)

    def room(self, now: float) -> Room:
        """Whether a request would begin soon if it was placed now."""
        rows = self._columns.eligible(now)
        if not len(rows):
            return Room.NONE if any(worker.may_return for worker in self._workers.values()) else Room.NOBODY
        return Room.SOME if self._columns.has_room(rows) else Room.NONE

    def some(self, now: float) -> list[Worker]:
        """A few workers, such as may be given a request now if there are any."""
        return self.able(now)[:_SOME] or list(itertools.islice(self._workers.values(), _SOME))

    def able(self, now: float) -> list[Worker]:
        """The workers that may be given a request now."""
        return self._at(self._columns.eligible(now))

    @property
    def longest_context(self) -> int:
        """Tokens of the longest sequence that one of the workers can hold."""
        return int(self._columns.column("context_length").max())

    def book(self, worker: Worker, prompt: Prompt, now: float) -> None:
        """Counts a request as being at a worker that was not chosen here."""
        self._book(worker, prompt, 0, now)

    def sweep(self, now: float) -> None:
        """Forgets a part of what is out of date; to be called a few times a second."""
        self._predictions.tick(now)
        self._index.sweep()
        self._sessions.expire(now)
        self._compare()

    @property
    def num_blocks(self) -> int:
        """Blocks in the index."""
        return len(self._index)

    def num_held(self, worker: Worker) -> int:
        """How many blocks a worker is known to hold."""
        return self._index.num_blocks(worker.row)

    def held_by(self, worker: Worker) -> set[int]:
        """The blocks that a worker is known to hold."""
        return set(self._index.held_by(worker.row))

    def check_integrity(self) -> None:
        self._index.check_integrity()
        self._predictions.check_integrity()
        for worker_id, worker in self._workers.items():
            assert worker.card.worker_id == worker_id
            assert self._of_row[worker.row] is worker
            assert self._columns.says(worker.row, worker.numbers()), worker
        assert sum(worker is not None for worker in self._of_row) == len(self._workers)

    def _compare(self) -> None:
        prefill_s, gap_s = np.zeros(len(self._of_row)), np.zeros(len(self._of_row))
        for worker in self._workers.values():
            prefill_s[worker.row] = worker.speed.prefill_s
            gap_s[worker.row] = worker.speed.gap_s
        self._columns.compare(prefill_s, gap_s)

    def _scheme_but_of(self, worker_id: str | None) -> Scheme | None:
        for worker in self._workers.values():
            if worker.card.worker_id != worker_id and (scheme := scheme_of(worker.card)) is not None:
                return scheme
        return None

    def _begin_anew(self, worker: Worker) -> None:
        """Whatever a worker held is forgotten: another row is quicker than a look at every block."""
        self._leave_row(worker)
        self.join(worker)

    def _leave_row(self, worker: Worker) -> None:
        self._of_row[worker.row] = None
        self._columns.clear(worker.row)
        self._index.leave(worker.row)
        self._predictions.leave(worker.row)

    def _at(self, rows: Rows) -> list[Worker]:
        workers = [worker for row in rows.tolist() if (worker := self._of_row[row]) is not None]
        assert len(workers) == len(rows), rows
        return workers

    def _view(self, prompt: Prompt, rows: Rows, overlap: Floats, now: float) -> View:
        known = self._columns.of(rows, now)
        overlap_tokens = overlap[: len(rows)] if is_dense(rows) else overlap[rows]
        overlap_tokens = overlap_tokens * known[_BLOCK_SIZE]
        session = self._session(prompt, rows, now) if prompt.session else None
        return View(prompt.num_tokens, overlap_tokens, session, *known[_BLOCK_SIZE:])

    def _session(self, prompt: Prompt, rows: Rows, now: float) -> Floats | None:
        """1 for the worker that has had the session's last request; None where there is no such one."""
        worker = self._workers.get(self._sessions.get(prompt.session, now) or "")
        return None if worker is None else (rows == worker.row).astype(np.float64)

    def _book(self, worker: Worker, prompt: Prompt, overlap_blocks: int, now: float) -> None:
        size = worker.card.kv_block_size or 0
        booking = Booking(
            now,
            prefill_tokens=max(0, prompt.num_tokens - overlap_blocks * size),
            blocks=-(-prompt.num_tokens // size) if size else 0,
            leaves_blocks=len(prompt.hashes) > 0,
        )
        worker.bookings[prompt.key] = booking
        self._turn += 1
        self._columns.choose(worker.row, self._turn)
        if prompt.session:
            self._sessions.put(prompt.session, worker.card.worker_id, now)
        if not worker.is_silent:
            self._predictions.put(worker.row, prompt.hashes, overlap_blocks, now)
        self.refresh(worker)


def _most_blocks(card: messages.Card) -> int:
    return min(_MOST_BLOCKS, (card.total_kv_blocks or 0) + (card.host_kv_blocks or 0))
