"""The workers of one model: what they hold, how busy they are, and which of them a prompt should go to; pure."""

import enum
import itertools
import random
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import internal, limits, messages
from tokenbus.router.fleet.worker import Booking, Worker
from tokenbus.router.placement.explain import explain
from tokenbus.router.placement.hash_scheme import HashScheme, hash_scheme_of
from tokenbus.router.placement.overlap import overlaps
from tokenbus.router.placement.policies import Policy, View, draw
from tokenbus.router.placement.predictions import Predictions
from tokenbus.router.placement.prefix_index import PrefixIndex
from tokenbus.router.placement.worker_table import Floats, Rows, WorkerRow, WorkerTable, is_contiguous

_MAX_STEP_AGE_MS = 2_000.0
"""An engine whose step is older than this gets no new work."""
_SAMPLE_SIZE = 8
_BLOCK_SIZE = WorkerRow._fields.index("block_size")
"""From this one on policies may know all that is in the columns."""
_SESSION_TTL_S = 600.0
_MAX_SESSIONS = 65_536
_MAX_BLOCKS = 1 << 22
"""A card may say what it likes."""


class PlacementRequest(NamedTuple):
    """What placement has to know of a request."""

    key: str
    num_tokens: int
    hashes: Sequence[int] = ()
    """Of its full blocks; none for a request that neither uses nor leaves cache."""
    session: str = ""
    """What it is a part of, by its client's word."""


class PlacementOptions(NamedTuple):
    """Which workers may be chosen, and how."""

    only: str | None = None
    """No other than this one."""
    exclude: Collection[str] = ()
    """None of these."""
    temperature: float = 0.0
    """0 takes the lowest cost; above it others are drawn too."""
    explain: bool = False
    """Whether to say why."""

    def allows(self, worker_id: str) -> bool:
        return worker_id not in self.exclude and (self.only is None or worker_id == self.only)


class Placement(NamedTuple):
    """The chosen worker, and why."""

    worker: Worker
    policy: str
    overlap_blocks: int = 0
    """Leading blocks that it is known to hold, or expected to."""
    report: messages.RoutingReport | None = None


class Capacity(enum.Enum):
    """What a model's workers have for another request."""

    AVAILABLE = enum.auto()
    BUSY = enum.auto()
    """None of them can take it now: they have as many as they can run, or are about to come back."""
    NO_WORKERS = enum.auto()
    """None of them will be able to."""


class NoWorker(NamedTuple):
    """There is nobody to choose."""


_ANYONE = PlacementOptions()


class ModelWorkers:
    """One model's workers. Choosing and booking are one call."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._by_row: list[Worker | None] = []
        self._table = WorkerTable(limits.WORKER_SUSPECT_AFTER_S, _MAX_STEP_AGE_MS)
        self._index = PrefixIndex()
        self._predictions = Predictions()
        self._num_chosen = 0
        self._sessions: TTLCache[str] = TTLCache(_SESSION_TTL_S, _MAX_SESSIONS)
        """Which worker has had the last request of each."""

    def __repr__(self) -> str:
        return f"<ModelWorkers {len(self._workers)} workers, {self._index!r}>"

    @property
    def workers(self) -> Collection[Worker]:
        return self._workers.values()

    def add_worker(self, worker: Worker) -> None:
        """A worker, in a new life, holds nothing."""
        card = worker.card
        worker.row = self._index.add_worker(_max_blocks(card))
        while worker.row >= len(self._by_row):
            self._by_row.append(None)
        self._by_row[worker.row] = worker
        self._table.add_worker(worker.row)
        self._workers[card.worker_id] = worker
        self.refresh(worker)

    def remove_worker(self, worker: Worker) -> None:
        """A life of a worker is over."""
        del self._workers[worker.card.worker_id]
        self._drop_row(worker)

    def update_card(self, worker: Worker) -> None:
        """A worker has published another card in the same life."""
        self._index.set_max_blocks(worker.row, _max_blocks(worker.card))
        self.refresh(worker)

    def incompatibility(self, card: messages.Card) -> str | None:
        """Why a card can't belong to this model, beside the others; None if it can."""
        mine, scheme = hash_scheme_of(card), self._hash_scheme_without(card.worker_id)
        if scheme is not None and mine is not None and mine != scheme:
            return f"its blocks are {mine}, those of the model's other workers {scheme}"
        return None

    @property
    def hash_scheme(self) -> HashScheme | None:
        """How blocks are named here; None where no worker has any."""
        return self._hash_scheme_without(None)

    def refresh(self, worker: Worker) -> None:
        """Something that is known of a worker has changed."""
        self._table.update(worker.row, worker.row_values())

    def apply(self, worker: Worker, events: internal.Events, now: float) -> None:
        """What a worker says that it holds and has done."""
        if events.cleared:
            self._reset_row(worker)
        if events.removed:
            self._index.remove(worker.row, events.removed)
        for run in events.stored:
            self._index.store(worker.row, run.hashes)
        worker.speed.observe(worker.applied_load, events.load, now - worker.applied_at)
        worker.applied_load, worker.applied_at = events.load, now
        if events.stored:
            worker.num_unreported = 0
        done = events.load.computed_tokens + events.load.generated_tokens
        if done > worker.processed_tokens:
            self._table.record_work(worker.row, done - worker.processed_tokens, now)
        worker.processed_tokens = done
        self.refresh(worker)

    def replace_blocks(self, worker: Worker, runs: Sequence[internal.BlockRun]) -> None:
        """A snapshot says all that a worker holds; what else is known of it is looked at anew as well."""
        self._reset_row(worker)
        for run in runs:
            self._index.store(worker.row, run.hashes)

    def place(
        self,
        prompt: PlacementRequest,
        policy: Policy,
        rng: random.Random,
        now: float,
        options: PlacementOptions = _ANYONE,
    ) -> Placement | NoWorker:
        """Chooses a worker and books the request there."""
        rows = self._table.eligible(now, prompt.num_tokens)
        if options.only is not None or options.exclude:
            rows = np.array(
                [one.row for one in self._workers_at(rows) if options.allows(one.card.worker_id)], dtype=np.intp
            )
        if not len(rows):
            return NoWorker()
        overlap = overlaps(self._index, self._predictions, prompt.hashes, len(self._by_row), now)
        view = self._view(prompt, rows, overlap, now)
        costs = policy.costs(view)
        at = draw(costs, rng, options.temperature)
        worker = self._by_row[int(rows[at])]
        assert worker is not None
        report = explain(worker, policy.name, self._workers_at(rows), view, costs.tolist()) if options.explain else None
        overlap_blocks = int(overlap[worker.row])
        self._book(worker, prompt, overlap_blocks, now)
        return Placement(worker, policy.name, overlap_blocks, report)

    def capacity(self, now: float) -> Capacity:
        """Whether a request would begin soon if it was placed now."""
        rows = self._table.eligible(now)
        if not len(rows):
            return (
                Capacity.BUSY if any(worker.may_recover for worker in self._workers.values()) else Capacity.NO_WORKERS
            )
        return Capacity.AVAILABLE if self._table.has_capacity(rows) else Capacity.BUSY

    def sample(self, now: float) -> list[Worker]:
        """A few workers, such as may be given a request now if there are any."""
        return self.eligible(now)[:_SAMPLE_SIZE] or list(itertools.islice(self._workers.values(), _SAMPLE_SIZE))

    def eligible(self, now: float) -> list[Worker]:
        """The workers that may be given a request now."""
        return self._workers_at(self._table.eligible(now))

    @property
    def max_context_length(self) -> int:
        """Tokens of the longest sequence that one of the workers can hold."""
        return int(self._table.column("context_length").max())

    def book(self, worker: Worker, prompt: PlacementRequest, now: float) -> None:
        """Counts a request as being at a worker that was not chosen here."""
        self._book(worker, prompt, 0, now)

    def sweep(self, now: float) -> None:
        """Forgets a part of what is out of date; to be called a few times a second."""
        self._predictions.expire(now)
        self._index.sweep()
        self._sessions.expire(now)
        self._update_slowdowns()

    @property
    def num_blocks(self) -> int:
        """Blocks in the index."""
        return len(self._index)

    def num_blocks_of(self, worker: Worker) -> int:
        """How many blocks a worker is known to hold."""
        return self._index.num_blocks_of(worker.row)

    def blocks_of(self, worker: Worker) -> set[int]:
        """The blocks that a worker is known to hold."""
        return set(self._index.blocks_of(worker.row))

    def check_integrity(self) -> None:
        self._index.check_integrity()
        self._predictions.check_integrity()
        for worker_id, worker in self._workers.items():
            assert worker.card.worker_id == worker_id
            assert self._by_row[worker.row] is worker
            assert self._table.matches(worker.row, worker.row_values()), worker
        assert sum(worker is not None for worker in self._by_row) == len(self._workers)

    def _update_slowdowns(self) -> None:
        prefill_s_per_token, itl_s = np.zeros(len(self._by_row)), np.zeros(len(self._by_row))
        for worker in self._workers.values():
            prefill_s_per_token[worker.row] = worker.speed.prefill_s_per_token
            itl_s[worker.row] = worker.speed.itl_s
        self._table.update_slowdowns(prefill_s_per_token, itl_s)

    def _hash_scheme_without(self, worker_id: str | None) -> HashScheme | None:
        for worker in self._workers.values():
            if worker.card.worker_id != worker_id and (scheme := hash_scheme_of(worker.card)) is not None:
                return scheme
        return None

    def _reset_row(self, worker: Worker) -> None:
        """Whatever a worker held is forgotten: another row is quicker than a look at every block."""
        self._drop_row(worker)
        self.add_worker(worker)

    def _drop_row(self, worker: Worker) -> None:
        self._by_row[worker.row] = None
        self._table.clear(worker.row)
        self._index.remove_worker(worker.row)
        self._predictions.remove_worker(worker.row)

    def _workers_at(self, rows: Rows) -> list[Worker]:
        workers = [worker for row in rows.tolist() if (worker := self._by_row[row]) is not None]
        assert len(workers) == len(rows), rows
        return workers

    def _view(self, prompt: PlacementRequest, rows: Rows, overlap: Floats, now: float) -> View:
        known = self._table.columns_of(rows, now)
        overlap_tokens = overlap[: len(rows)] if is_contiguous(rows) else overlap[rows]
        overlap_tokens = overlap_tokens * known[_BLOCK_SIZE]
        session = self._session(prompt, rows, now) if prompt.session else None
        return View(prompt.num_tokens, overlap_tokens, session, *known[_BLOCK_SIZE:])

    def _session(self, prompt: PlacementRequest, rows: Rows, now: float) -> Floats | None:
        """1 for the worker that has had the session's last request; None where there is no such one."""
        worker = self._workers.get(self._sessions.get(prompt.session, now) or "")
        return None if worker is None else (rows == worker.row).astype(np.float64)

    def _book(self, worker: Worker, prompt: PlacementRequest, overlap_blocks: int, now: float) -> None:
        size = worker.card.kv_block_size or 0
        booking = Booking(
            now,
            prefill_tokens=max(0, prompt.num_tokens - overlap_blocks * size),
            blocks=-(-prompt.num_tokens // size) if size else 0,
            will_cache_blocks=len(prompt.hashes) > 0,
        )
        worker.bookings[prompt.key] = booking
        self._num_chosen += 1
        self._table.mark_chosen(worker.row, self._num_chosen)
        if prompt.session:
            self._sessions.put(prompt.session, worker.card.worker_id, now)
        if not worker.reports_no_blocks:
            self._predictions.add(worker.row, prompt.hashes, overlap_blocks, now)
        self.refresh(worker)


def _max_blocks(card: messages.Card) -> int:
    return min(_MAX_BLOCKS, (card.total_kv_blocks or 0) + (card.host_kv_blocks or 0))
