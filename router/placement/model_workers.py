"""The workers of one model: what they hold, how busy they are, and the choice among them.

Each worker has a row: a bit of that number in the prefix index and a column entry in the worker table. A choice is a
few operations over whole columns: which rows are eligible, how many leading blocks of the prompt each holds or will
soon hold, the policy's costs, the lowest cost. The request is booked in the same step, so that requests that arrive
together see each other."""

import itertools
import random
from collections.abc import Collection, Sequence

import numpy as np

from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import internal, messages
from tokenbus.router.placement import remote_prefills
from tokenbus.router.placement.adapters import has_all
from tokenbus.router.placement.kv_exchange import FetchPlanner, HolderCandidate
from tokenbus.router.placement.placement import (
    NO_SOURCE,
    BlockSource,
    Capacity,
    NoWorker,
    Placement,
    PlacementOptions,
    PlacementRequest,
    explain,
)
from tokenbus.router.placement.policies import Policy, View, draw
from tokenbus.router.placement.predictions import Predictions
from tokenbus.router.placement.prefix_index import HashScheme, MatchLevel, PrefixIndex, hash_scheme_of
from tokenbus.router.placement.prefix_waits import PrefixWaits
from tokenbus.router.placement.sites import Distances, OwnSite
from tokenbus.router.placement.worker_table import Floats, Rows, WorkerTable, is_contiguous
from tokenbus.router.workers.speed import StepTimesFit, TransferRate
from tokenbus.router.workers.worker import MAX_STEP_AGE_MS, Booking, Worker, WorkerRow

_ANY_WORKER = PlacementOptions()
_NO_SITE = OwnSite()
_SAMPLE_SIZE = 8
_DEFAULT_ANSWER_TOKENS = 256
"""The expected tokens of a completion if no worker reports any."""
_BLOCK_SIZE = WorkerRow._fields.index("block_size")
"""The first column that policies see; those before it only decide which workers are eligible."""
_SESSION_TTL_S = 600.0
_MAX_SESSIONS = 65_536
_MAX_BLOCKS = 1 << 22
"""The most blocks believed of one worker, whatever its card says."""


class ModelWorkers:
    """Decides for one model which worker should get a request, and maintains the state this requires."""

    def __init__(self, own_site: OwnSite = _NO_SITE) -> None:
        self._distances = Distances(own_site)
        self._workers: dict[str, Worker] = {}
        self._by_row: list[Worker | None] = []
        self._table = WorkerTable(MAX_STEP_AGE_MS)
        self._index = PrefixIndex()
        self._predictions = Predictions()
        self._waits = PrefixWaits()
        self._exchange = FetchPlanner()
        self._transfer_rate = TransferRate()
        self._step_times = StepTimesFit()
        self._prefill_s = np.zeros(0)
        """Seconds that each row takes to compute a prompt token; the fastest row's where unknown, 0 if all are
        unknown."""
        self._num_chosen = 0
        self._ejected_until = 0.0
        """From this time on no worker is ejected."""
        self._sessions: TTLCache[str] = TTLCache(_SESSION_TTL_S, _MAX_SESSIONS)
        """The worker that got each session's last request."""

    def __repr__(self) -> str:
        return f"<ModelWorkers {len(self._workers)} workers, {self._index!r}>"

    @property
    def workers(self) -> Collection[Worker]:
        return self._workers.values()

    def add_worker(self, worker: Worker) -> None:
        """Adds a worker that holds no blocks yet."""
        worker.row = self._index.add_worker(_max_blocks(worker.card), has_checkpoints=worker.card.kv_checkpoints)
        while worker.row >= len(self._by_row):
            self._by_row.append(None)
            self._prefill_s = np.append(self._prefill_s, 0.0)
        self._by_row[worker.row] = worker
        self._table.add_worker(worker.row)
        self._workers[worker.card.worker_id] = worker
        self._locate(worker)
        self.refresh(worker)

    def remove_worker(self, worker: Worker) -> None:
        del self._workers[worker.card.worker_id]
        self._drop_row(worker)

    def update_card(self, worker: Worker) -> None:
        """Applies the changes in a worker's card."""
        card = worker.card
        self._index.update_worker(worker.row, _max_blocks(card), has_checkpoints=card.kv_checkpoints)
        self._locate(worker)
        self.refresh(worker)

    def incompatibility(self, card: messages.Card) -> str | None:
        """Returns why a card's blocks do not fit those of the model's other workers, or None if they do."""
        scheme, others = hash_scheme_of(card), self._hash_scheme_without(card.worker_id)
        if scheme is not None and others is not None and scheme != others:
            return f"it has {scheme}, but the model's other workers have {others}"
        return None

    @property
    def hash_scheme(self) -> HashScheme | None:
        """The hash scheme of the workers' blocks; None if none has any."""
        return self._hash_scheme_without(None)

    def refresh(self, worker: Worker) -> None:
        """Updates a worker's row of the table; call it whenever its state, load or bookings have changed."""
        self._table.update(worker.row, worker.row_values())

    def mark_heard(self, worker: Worker) -> None:
        """Records that a worker was heard of, and that nothing else has changed."""
        self._table.mark_heard(worker.row, worker.last_seen_at + worker.suspect_after_s)

    def apply(self, worker: Worker, events: internal.Events, now: float) -> None:
        """Applies an entry of a worker's event log: its blocks, load and speed."""
        if events.cleared:
            self._reset_row(worker)
        if events.removed:  # before `stored`: a worker evicts blocks to make room for new ones
            self._index.remove(worker.row, events.removed)
        for run in events.stored:
            self._index.store(worker.row, run.hashes)
        step = worker.speed.observe_loads(worker.applied_load, events.load, now - worker.applied_at)
        if step is not None:
            self._step_times.observe(step, self._table.slowdown(worker.row, of_prompts=step.prompt_tokens > 0))
        worker.applied_load, worker.applied_at = events.load, now
        if events.stored:
            worker.num_unreported = 0
        if events.finished:
            self._judge(worker, events, now)
        processed = events.load.computed_tokens + events.load.generated_tokens
        if worker.processed_tokens is not None and processed > worker.processed_tokens:
            self._table.record_work(worker.row, processed - worker.processed_tokens, now)
        worker.processed_tokens = processed
        for fetched in events.fetches:
            if fetched.was_leg:
                continue
            self._transfer_rate.observe_fetch(fetched)
            if (holder := self._workers.get(fetched.worker_id)) is not None:
                self._exchange.end(holder.row, worker.row)
        self.refresh(worker)

    def replace_blocks(self, worker: Worker, runs: Sequence[internal.BlockRun]) -> None:
        """Replaces all blocks of a worker with a snapshot's, and discards its predictions and recent work."""
        self._reset_row(worker)
        for run in runs:
            self._index.store(worker.row, run.hashes)

    def place(
        self, request: PlacementRequest, policy: Policy, rng: random.Random, now: float, options: PlacementOptions
    ) -> Placement | NoWorker:
        """Chooses a worker and books the request there."""
        usable = self._table.eligible(now, request.num_tokens)
        allowed = self._allowed(usable, options)
        if not len(allowed):
            return NoWorker()
        rows = self._preferred(allowed, now)
        levels = self._index.match(request.hashes)
        overlap = self._overlap_blocks(request.hashes, levels, now)
        held_blocks = overlap[: len(rows)] if is_contiguous(rows) else overlap[rows]
        most_held = int(held_blocks[held_blocks.argmax()]) if request.hashes else 0
        prefix = request.hashes[most_held - 1] if most_held else None
        view = self._view(request, rows, held_blocks, 0.0 if prefix is None else self._waits.get(prefix), now)
        room_wait_s = self._room_wait_s(request, view)
        if room_wait_s is not None:
            view = view._replace(wait_s=view.wait_s + room_wait_s)
        offer = None
        if levels and self._exchange.is_possible:
            mb_per_s = self._transfer_rate.mb_per_s
            offer = self._exchange.offer(levels, rows, view, self._prefill_s, mb_per_s, self._can_give, now)
            view = view if offer is None else view._replace(fetchable=offer.fetchable)
        costs = policy.costs(view)
        at = draw(costs, rng, options.temperature)
        worker = self._by_row[int(rows[at])]
        assert worker is not None
        holder = None if offer is None else offer.holder_for(at)
        helpers = usable if request.hashes and len(rows) < len(usable) else None
        source = self._arrange_source(request, worker, holder, helpers, overlap, now, options)
        report = None
        if options.explain:
            ejected = {one.card.worker_id for one in self._workers_at(allowed) if one.ejection.is_ejected(now)}
            fetched = np.zeros(len(rows)) if offer is None else offer.tokens
            report = explain(
                worker, policy.name, self._workers_at(rows), view, costs.tolist(), fetched, source, ejected
            )
        overlap_blocks = int(overlap[worker.row])
        if prefix is not None:
            self._count_wait(prefix, view, at, most_held - overlap_blocks)
        wait_s = float(view.wait_s[at])
        self.book(worker, request, now, overlap_blocks, source)  # changes the columns of the view
        return Placement(worker, policy.name, overlap_blocks, report, *source, len(rows), most_held, wait_s)

    def book(
        self,
        worker: Worker,
        request: PlacementRequest,
        now: float,
        overlap_blocks: int = 0,
        source: BlockSource = NO_SOURCE,
    ) -> None:
        """Counts a request towards a worker's load, and predicts that the worker will hold its blocks."""
        size = worker.card.kv_block_size or 0
        prefill_tokens = max(0, request.num_tokens - overlap_blocks * size)
        worker.bookings[request.key] = Booking(
            now,
            prefill_tokens=max(0, prefill_tokens - source.blocks * size),
            blocks=-(-request.num_tokens // size) if size else 0,
            expected_blocks=-(-(prefill_tokens + request.answer_tokens) // size) if size else 0,
            will_cache_blocks=len(request.hashes) > 0,
            remote_prefill_worker_id=source.prefill_worker_id,
        )
        self._num_chosen += 1
        self._table.mark_chosen(worker.row, self._num_chosen)
        if request.session:
            self._sessions.put(request.session, worker.card.worker_id, now)
        if not worker.reports_no_blocks:  # otherwise no event would ever confirm it
            self._predictions.add(worker.row, request.hashes, overlap_blocks, now)
        self.refresh(worker)

    def unbook(self, worker: Worker, key: str) -> None:
        """Removes a booking, if there is one, and that of its remote prefill."""
        booking = worker.bookings.pop(key, None)
        if booking is None:
            return
        self.refresh(worker)
        if (remote_prefill_worker := self._workers.get(booking.remote_prefill_worker_id)) is not None:
            remote_prefill_worker.bookings.pop(key, None)
            self.refresh(remote_prefill_worker)

    def capacity(self, now: float, options: PlacementOptions | None = None) -> Capacity:
        """Returns whether a request placed now would start soon."""
        options = options or _ANY_WORKER
        rows = self._preferred(self._allowed(self._table.eligible(now), options), now)
        if not len(rows):
            may_recover = any(one.may_recover and options.allows(one.card) for one in self._workers.values())
            return Capacity.BUSY if may_recover else Capacity.NO_WORKERS
        return Capacity.AVAILABLE if self._table.has_capacity(rows) else Capacity.BUSY

    def expected_answer_tokens(self, max_tokens: int | None) -> int:
        """Returns the expected tokens of a completion with that limit, judging by recent ones."""
        expected = int(self._table.column("expected_answer_tokens").max()) or _DEFAULT_ANSWER_TOKENS
        return expected if max_tokens is None else min(max_tokens, expected)

    def sample(self, now: float) -> list[Worker]:
        """Returns a few workers, eligible ones if there are any."""
        return self.eligible(now)[:_SAMPLE_SIZE] or list(itertools.islice(self._workers.values(), _SAMPLE_SIZE))

    def eligible(self, now: float) -> list[Worker]:
        """Returns the workers that may be given a request now."""
        return self._workers_at(self._table.eligible(now))

    @property
    def is_served(self) -> bool:
        """Whether some worker has the model loaded."""
        return any(worker.has_loaded for worker in self._workers.values())

    def loaders(self) -> list[Worker]:
        """Returns the workers that can load the model, those already doing so first. The order is the same for all
        routers, and differs between models."""
        return sorted((one for one in self._workers.values() if one.is_loadable), key=lambda one: one.load_order)

    @property
    def max_context_length(self) -> int:
        """Tokens of the longest sequence that one of the workers can hold."""
        return int(self._table.column("context_length").max())

    def sweep(self, now: float) -> None:
        """Discards some outdated state, and compares the workers' speeds. Must be called a few times a second."""
        self._predictions.expire(now)
        self._index.sweep()
        self._sessions.expire(now)
        prefill_s_per_token, itl_s, first_s = (np.zeros(len(self._by_row)) for _ in range(3))
        for worker in self._workers.values():
            prefill_s_per_token[worker.row] = worker.speed.prefill_s_per_token
            itl_s[worker.row] = worker.speed.itl_s
            first_s[worker.row] = worker.speed.first_prefill_s_per_token
        self._step_times.update()
        self._table.update_speeds(prefill_s_per_token, itl_s, self._step_times.times)
        known = first_s > 0
        if known.any():
            self._prefill_s = np.where(known, first_s, first_s[known].min())

    @property
    def transfer_mb_per_s(self) -> float:
        """The rate at which blocks move from one worker to another."""
        return self._transfer_rate.mb_per_s

    @property
    def num_blocks(self) -> int:
        """The number of blocks in the prefix index."""
        return len(self._index)

    def num_blocks_of(self, worker: Worker) -> int:
        """Returns how many blocks a worker is known to hold."""
        return self._index.num_blocks_of(worker.row)

    def blocks_of(self, worker: Worker) -> set[int]:
        """Returns the hashes of the blocks that a worker is known to hold."""
        return set(self._index.blocks_of(worker.row))

    def check_integrity(self) -> None:
        self._index.check_integrity()
        self._predictions.check_integrity()
        self._exchange.check_integrity()
        for worker_id, worker in self._workers.items():
            assert worker.card.worker_id == worker_id
            assert self._by_row[worker.row] is worker
            assert self._table.matches(worker.row, worker.row_values()), worker
        assert sum(worker is not None for worker in self._by_row) == len(self._workers)

    def _judge(self, worker: Worker, events: internal.Events, now: float) -> None:
        """Ejects a worker whose requests keep failing, but never more than half of the workers."""
        failed = set(events.failed)
        for key in events.finished:
            if key not in failed:
                worker.ejection.succeeded()
                continue
            num_ejected = sum(one.ejection.is_ejected(now) for one in self._workers.values() if one is not worker)
            if worker.ejection.failed(now, may_eject=num_ejected + 1 <= len(self._workers) // 2):
                self._ejected_until = max(self._ejected_until, worker.ejection.until)

    def _allowed(self, rows: Rows, options: PlacementOptions) -> Rows:
        if not options.restricts:
            return rows
        allowed = [one.row for one in self._workers_at(rows) if options.allows(one.card)]
        return np.array(allowed, dtype=np.intp)

    def _preferred(self, rows: Rows, now: float) -> Rows:
        """Filters rows to those that are neither ejected nor only compute prompts for others, as far as any remain."""
        rows = self._table.without_ejected(rows, now) if now < self._ejected_until else rows
        return self._table.without_prefill(rows)

    def _overlap_blocks(self, hashes: Sequence[int], levels: Sequence[MatchLevel], now: float) -> Floats:
        """Returns, for each row, how many leading blocks it holds or is predicted to hold soon."""
        self._predictions.expire(now)
        overlap = np.zeros(len(self._by_row))
        if hashes:
            for level in levels:
                level.write_to(overlap)
            for row, blocks in self._predictions.match(hashes, levels).items():
                overlap[row] = blocks
        return overlap

    def _view(self, request: PlacementRequest, rows: Rows, held_blocks: Floats, waited_s: float, now: float) -> View:
        columns = self._table.columns_of(rows, now)
        session = None
        if request.session and (worker := self._workers.get(self._sessions.get(request.session, now) or "")):
            session = (rows == worker.row).astype(np.float64)
        held_tokens, distance_s = held_blocks * columns[_BLOCK_SIZE], self._distances.in_seconds(rows)
        times = self._step_times.times
        return View(request.num_tokens, times, held_tokens, waited_s, session, None, distance_s, *columns[_BLOCK_SIZE:])

    def _room_wait_s(self, request: PlacementRequest, view: View) -> Floats | None:
        """Returns how long the request would wait for a place and for KV memory at each candidate; None if at none.

        That is Little's law: while one stream lives, as many end as the worker can have at once, so that one ends after
        this share of a life. The request waits for as many as have the places, or the memory, that it lacks."""
        lacking_tokens: Floats = request.num_tokens + request.answer_tokens - view.overlap_tokens - view.free_tokens
        waiting = view.waiting_requests
        if lacking_tokens[lacking_tokens.argmax()] <= 0.0 and waiting[waiting.argmax()] <= 0.0:
            return None
        total_tokens = np.maximum(view.total_blocks * view.block_size, 1.0)
        used_tokens = total_tokens - np.minimum(view.free_tokens, total_tokens)
        tokens_each = np.maximum(used_tokens / np.maximum(view.requests, 1.0), 1.0)
        lives: Floats = np.ceil(np.maximum(lacking_tokens, 0.0) / tokens_each) * tokens_each / total_tokens
        lives = np.maximum(lives, waiting / np.maximum(view.max_num_seqs, 1.0))
        lives *= self.expected_answer_tokens(None) * view.times.decode_step_s
        return lives * view.decode_slowdown

    def _count_wait(self, last_hash: int, view: View, at: int, copied_blocks: int) -> None:
        """Counts what a request waits at the chosen candidate because idle ones don't hold its prefix, or the time that
        another copy of the prefix takes there."""
        if copied_blocks:
            copy_s = copied_blocks * float(view.block_size[at]) * view.times.prompt_token_s
            waited_s = max(0.0, view.waited_s - copy_s)
        else:
            wait_s = float(view.wait_s[at])
            waited_s = view.waited_s + (wait_s and wait_s - float(view.wait_s.min()))
        if waited_s != view.waited_s:
            self._waits.put(last_hash, waited_s)

    def _locate(self, worker: Worker) -> None:
        """Applies where a worker says that it runs: blocks are fetched only within a site."""
        card = worker.card
        self._distances.set_worker(worker.row, card)
        identity = card.kv_identity and f"{card.kv_identity} at {card.site}"
        self._exchange.set_worker(worker.row, identity, card.kv_token_bytes)

    def _arrange_source(
        self,
        request: PlacementRequest,
        worker: Worker,
        holder: HolderCandidate | None,
        helpers: Rows | None,
        overlap: Floats,
        now: float,
        options: PlacementOptions,
    ) -> BlockSource:
        """Decides where the chosen worker gets blocks that it lacks, and counts that there: from one of `helpers` that
        computes them for it, from their holder, or from none."""
        overlap_blocks = int(overlap[worker.row])
        fetch_blocks = 0 if holder is None else holder.overlap_blocks - overlap_blocks
        if helpers is not None:
            remote = self._find_remote_prefill(request, worker, helpers, overlap, fetch_blocks, options)
            if remote is not None:
                helper = self._by_row[remote.row]
                assert helper is not None
                self._book_remote_prefill(helper, request, int(overlap[remote.row]), now)
                return BlockSource(helper, len(request.hashes) - overlap_blocks, remote.seconds)
        if holder is None:
            return NO_SOURCE
        self._exchange.begin(holder.row, worker.row, now)
        return BlockSource(self._by_row[holder.row], fetch_blocks)

    def _find_remote_prefill(
        self,
        request: PlacementRequest,
        worker: Worker,
        rows: Rows,
        overlap: Floats,
        fetch_blocks: int,
        options: PlacementOptions,
    ) -> remote_prefills.RemotePrefillChoice | None:
        """Returns which of the workers in `rows`, if any, should compute a prompt for the one that gets the request,
        which would otherwise be expected to fetch `fetch_blocks`."""
        role, size = worker.card.role, worker.card.kv_block_size or 0
        own_missing = request.num_tokens - (float(overlap[worker.row]) + fetch_blocks) * size
        if role is messages.WorkerRole.PREFILL:
            return None
        if not remote_prefills.is_long(request.num_tokens, own_missing, options.min_remote_prefill_tokens):
            return None
        rows = self._exchange.givers_of(worker.row, self._table.free_prefill(rows, request.num_tokens))
        if options.adapters:
            has = [has_all(one.card, options.adapters, options.tenant) for one in self._workers_at(rows)]
            rows = rows[np.array(has, dtype=bool)]
        if not len(rows):
            return None
        queued = self._table.column("prefill_tokens")[: len(overlap)]
        state = remote_prefills.PrefillState(request.num_tokens - overlap * size, queued, self._prefill_s)
        own = remote_prefills.Prefill(own_missing, float(queued[worker.row]), float(self._prefill_s[worker.row]))
        move_s = self._exchange.move_s(worker.row, own_missing, self._transfer_rate.mb_per_s)
        return remote_prefills.choose(state, rows, own, worker.num_requests, role, move_s)

    def _book_remote_prefill(self, worker: Worker, request: PlacementRequest, overlap_blocks: int, now: float) -> None:
        """Counts a prompt towards the load of the worker that computes it for another, and that will cache its
        blocks."""
        size = worker.card.kv_block_size or 0
        missing_tokens = request.num_tokens - overlap_blocks * size
        num_blocks, num_missing = -(-request.num_tokens // size), -(-missing_tokens // size)
        worker.bookings[request.key] = Booking(
            now, prefill_tokens=missing_tokens, blocks=num_blocks, expected_blocks=num_missing
        )
        if not worker.reports_no_blocks:
            self._predictions.add(worker.row, request.hashes, overlap_blocks, now)
        self.refresh(worker)

    def _can_give(self, row: int) -> bool:
        worker = self._by_row[row]
        return worker is not None and worker.can_give_blocks

    def _hash_scheme_without(self, worker_id: str | None) -> HashScheme | None:
        """Returns the hash scheme of the workers other than that one. All have the same, so the first one will do."""
        for worker in self._workers.values():
            if worker.card.worker_id != worker_id and (scheme := hash_scheme_of(worker.card)) is not None:
                return scheme
        return None

    def _reset_row(self, worker: Worker) -> None:
        """Discards all blocks of a worker by giving it another row, which is faster than scanning the index."""
        self._drop_row(worker)
        self.add_worker(worker)

    def _drop_row(self, worker: Worker) -> None:
        self._by_row[worker.row] = None
        self._distances.set_worker(worker.row, None)
        self._table.clear(worker.row)
        self._index.remove_worker(worker.row)
        self._predictions.remove_worker(worker.row)
        self._exchange.remove_worker(worker.row)

    def _workers_at(self, rows: Rows) -> list[Worker]:
        workers = [worker for row in rows.tolist() if (worker := self._by_row[row]) is not None]
        assert len(workers) == len(rows), rows
        return workers


def _max_blocks(card: messages.Card) -> int:
    return min(_MAX_BLOCKS, (card.total_kv_blocks or 0) + (card.host_kv_blocks or 0))
