"""A worker in virtual time: the real scheduler and block pool, with steps that only take time."""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tokenbus.protocol.wire import block_hash, codec, internal, messages
from tokenbus.replay.fast_forward import FastForwardScheduler
from tokenbus.replay.settings import ReplaySettings
from tokenbus.replay.traces import TracedRequest
from tokenbus.replay.virtual_transfers import Prefix, TransferLink, VirtualTransfer
from tokenbus.worker.broker.event_log import to_runs
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.kv.prefix_tree import Domain
from tokenbus.worker.engine.scheduling.plan import SampledToken, StepPlan, StepResult
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, Sequence
from tokenbus.worker.engine.scheduling.step_budget import StepBudget
from tokenbus.worker.engine.sim.runner import PRESETS, VOCAB_SIZE, plan_ms

MODEL = "replayed"
FINGERPRINT = "replay"
_EPOCH = "1-replay"
_MIN_PREFILL_TOKENS = 32
_LANES_PER_SEQUENCE = 64


class RequestProgress(NamedTuple):
    """A request's first token, its end, or both."""

    number: int
    at_s: float
    cached_tokens: int | None = None
    """Prompt tokens that did not have to be computed; set with the first token."""
    finish_reason: EngineFinishReason | None = None


class DecodeSteps(NamedTuple):
    """Consecutive steps in which each of `sequences` got another token."""

    sequences: int
    gaps_s: tuple[float, ...]
    """The time since the previous token, for each step."""


class VirtualWorker:
    """Takes steps that last as long as its timing model says, divided by its speed.

    The simulation reads its `events` and `progress` and clears them."""

    def __init__(
        self,
        worker_id: str,
        settings: ReplaySettings,
        speed: float = 1.0,
        role: messages.WorkerRole = messages.WorkerRole.BOTH,
    ) -> None:
        self.worker_id = worker_id
        self.role = role
        self._settings = settings
        self._timing, self._speed = PRESETS[settings.timing], speed
        self._pool = BlockPool(
            settings.kv_blocks,
            settings.block_size,
            settings.max_num_seqs * _LANES_PER_SEQUENCE + settings.kv_blocks,
            fingerprint=FINGERPRINT,
        )
        self._scheduler = FastForwardScheduler(self._pool, settings.max_num_seqs)
        self._max_prefill_tokens = settings.max_num_batched_tokens
        target_s = settings.step_target_ms / 1e3
        self._step_budget = StepBudget(target_s, _MIN_PREFILL_TOKENS, self._max_prefill_tokens) if target_s else None
        self._capacity_tokens = settings.kv_blocks * settings.block_size
        self._plan: StepPlan | None = None
        self._step_began_at = 0.0
        self._seq = 0
        self._link = TransferLink(self._pool, settings)
        self._keys: dict[int, str] = {}
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        """A heap of the end times of transfers; ties are broken by number."""
        self._timer_numbers = itertools.count()
        self._fetching: set[int] = set()
        """The numbers of the sequences that wait for blocks."""
        self._queued_tokens: dict[int, int] = {}
        """Prompt tokens expected to be computed, of sequences that have not started."""
        self._unstarted: dict[int, Sequence] = {}
        self._remote_prefills: dict[int, Callable[[float], None]] = {}
        """The workers waiting for the prompts that this one computes for others, by the number of the sequence."""
        self._num_awaited = 0
        """Sequences that wait for another worker to compute their prompts."""
        self._last_token_at: dict[int, float] = {}
        self.step_ends_at: float | None = None
        """When the step in progress ends; None while the worker is idle."""
        self.num_fetched_tokens = 0
        """Tokens whose blocks came from other workers' caches."""
        self.num_remote_prefill_tokens = 0
        """Tokens that this worker has computed for others."""
        self.events: list[tuple[float, internal.Events]] = []
        """The new entries of its event log with their times."""
        self.progress: list[RequestProgress] = []
        self.steps: list[DecodeSteps] = []
        """All steps so far in which sequences got further tokens."""

    def __repr__(self) -> str:
        return f"<VirtualWorker {self.worker_id} {self._scheduler!r}>"

    @property
    def next_at(self) -> float | None:
        """When it does something next; None while it is idle."""
        return min((at for at in (self.step_ends_at, self._timer_at) if at is not None), default=None)

    def card(self) -> messages.Card:
        settings = self._settings
        return messages.Card(
            worker_id=self.worker_id,
            epoch=_EPOCH,
            model=MODEL,
            source="replay",
            engine="sim",
            engine_version="1",
            context_length=self._capacity_tokens,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            hash_scheme=block_hash.scheme_of(FINGERPRINT),
            features=[],
            state=messages.WorkerState.READY,
            host="replay",
            pids=messages.Pids(front=0, engine=0),
            versions={},
            kv_block_size=settings.block_size,
            total_kv_blocks=settings.kv_blocks,
            kv_identity=FINGERPRINT if settings.kv_token_bytes else "",
            kv_token_bytes=settings.kv_token_bytes,
            role=self.role,
        )

    def submit(
        self,
        number: int,
        request: TracedRequest,
        now: float,
        source: "VirtualWorker | None" = None,
        expected_cached_tokens: int = 0,
    ) -> None:
        """Accepts a request of the trace, fetching blocks from `source` first. Starts a step at once if it was idle and
        has nothing to wait for."""
        sequence, started = self._accept(number, request, now)
        self._queued_tokens[number] = max(0, request.prompt_tokens - expected_cached_tokens)
        transfer = None if source is None else self._begin_fetch(source, sequence, now)
        fetches = []
        if transfer is None:
            self._scheduler.add(sequence)
            if source is not None:
                fetches.append(internal.Fetched(stream_no=number, worker_id=source.worker_id))
        self._publish(now, started=[started], fetches=fetches)
        if self._plan is None:
            self._start_step(now)

    def submit_with_remote_prefill(
        self, number: int, request: TracedRequest, now: float, source: "VirtualWorker"
    ) -> None:
        """Accepts a request of the trace whose prompt another worker computes. That worker must be advanced before this
        one, which needs to know when the blocks arrive."""
        sequence, started = self._accept(number, request, now)
        self._num_awaited += 1
        self._publish(now, started=[started])
        source._compute_for(
            self._keys[number], sequence, now, lambda at: self._take_remote_prefill(source, sequence, now, at)
        )

    def advance(self, now: float, coalesce_until: float) -> None:
        """Takes all steps that end by `now`. Identical steps that end by `coalesce_until` are taken together, with one
        event at their end."""
        while (at := self.next_at) is not None and at <= now:
            if at == self._timer_at:
                _, _, act = heapq.heappop(self._timers)
                act(at)
                continue
            self._finish_step(at)
            until = coalesce_until if self._timer_at is None else min(coalesce_until, self._timer_at)
            self._start_step(self._skip_steps(at, until))

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()

    @property
    def _timer_at(self) -> float | None:
        return self._timers[0][0] if self._timers else None

    def _accept(self, number: int, request: TracedRequest, now: float) -> tuple[Sequence, internal.Started]:
        sequence = Sequence(
            number,
            request.token_ids(VOCAB_SIZE),
            engine_request.Sampling(max_tokens=request.output_tokens),
            frozenset(),
            domain=Domain(request.tenant),
            priority=request.priority,
            arrived_at=now,
        )
        self._unstarted[number] = sequence
        key = self._keys[number] = request.key(number)
        return sequence, internal.Started(id=key, stream_no=number, attempt=1, prompt_tokens=request.prompt_tokens)

    def _compute_for(self, key: str, other: Sequence, now: float, on_computed: Callable[[float], None]) -> None:
        """Computes all but the last token of another worker's prompt, and reports when they are ready."""
        number = -1 - other.seq_no
        remote_prefill = Sequence(
            number,
            other.token_ids[: max(1, other.num_prompt - 1)],
            engine_request.Sampling(max_tokens=1),
            frozenset(),
            domain=other.domain,
            priority=other.priority,
            arrived_at=now,
        )
        self._remote_prefills[number] = on_computed
        self._queued_tokens[number] = remote_prefill.num_prompt
        self._unstarted[number] = remote_prefill
        self._scheduler.add(remote_prefill)
        self._publish(now, remote_prefills=[key])
        if self._plan is None:
            self._start_step(now)

    def _take_remote_prefill(self, source: "VirtualWorker", sequence: Sequence, began_at: float, now: float) -> None:
        """Takes the blocks that another worker has computed since `began_at`."""
        assert sequence.domain is not None
        transfer = self._link.begin_remote_prefill(
            source._link, Prefix(sequence.domain, sequence.token_ids), began_at, now
        )
        if transfer is None:
            self._call_at(now, lambda at: self._end_remote_prefill(sequence, at))
            return
        source._call_at(transfer.ends_at, lambda at: source._link.finish_sending(transfer))
        self._call_at(transfer.ends_at, lambda at: self._end_remote_prefill(sequence, at, transfer))

    def _end_remote_prefill(self, sequence: Sequence, now: float, transfer: VirtualTransfer | None = None) -> None:
        self._num_awaited -= 1
        if transfer is not None:
            self._link.finish_receiving(transfer)
        self._scheduler.add(sequence)
        self._publish(now)
        if self._plan is None:
            self._start_step(now)

    def _begin_fetch(self, source: "VirtualWorker", sequence: Sequence, now: float) -> VirtualTransfer | None:
        assert sequence.domain is not None
        prefix = Prefix(sequence.domain, sequence.token_ids)
        compute_s = self._timing.step_ms(self._link.num_missing(prefix), 0, 0.0) / 1e3 / self._speed
        transfer = self._link.begin(source._link, prefix, compute_s, now)
        if transfer is not None:
            self._fetching.add(sequence.seq_no)
            source._call_at(transfer.ends_at, lambda at: source._link.finish_sending(transfer))
            self._call_at(transfer.ends_at, lambda at: self._end_fetch(source, sequence, transfer, at))
        return transfer

    def _end_fetch(self, source: "VirtualWorker", sequence: Sequence, transfer: VirtualTransfer, now: float) -> None:
        self._fetching.remove(sequence.seq_no)
        self._link.finish_receiving(transfer)
        tokens = transfer.end - transfer.start
        self.num_fetched_tokens += tokens
        fetched = internal.Fetched(
            stream_no=sequence.seq_no,
            worker_id=source.worker_id,
            fetched_tokens=tokens,
            fetched_bytes=tokens * self._settings.kv_token_bytes,
            fetch_ms=(now - transfer.began_at) * 1e3,
        )
        self._scheduler.add(sequence)
        self._publish(now, fetches=[fetched])
        if self._plan is None:
            self._start_step(now)

    def _call_at(self, at: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._timers, (at, next(self._timer_numbers), act))

    def _start_step(self, now: float) -> None:
        if not self._scheduler.has_work:
            self._plan, self.step_ends_at = None, None
            return
        decoding = self._scheduler.num_decoding
        budget = self._max_prefill_tokens - decoding
        if self._step_budget is not None:
            budget = min(budget, self._step_budget.prefill_tokens(decoding))
        self._plan = self._scheduler.schedule(budget)
        for sequence in self._plan.started:
            self._queued_tokens.pop(sequence.seq_no, None)
            del self._unstarted[sequence.seq_no]
        assert self._plan.scheduled, self
        self._step_began_at = now
        step_ms = plan_ms(self._plan, self._timing, self._capacity_tokens)
        self.step_ends_at = now + step_ms / 1e3 / self._speed

    def _finish_step(self, now: float) -> None:
        plan = self._plan
        assert plan is not None
        if self._step_budget is not None:
            self._step_budget.observe(plan.num_tokens, now - self._step_began_at)
        outcomes = [SampledToken(_sampled(part.sequence)) if part.samples else None for part in plan.scheduled]
        results = self._scheduler.update(plan, outcomes)
        self._record(results, now)
        ended = [result.sequence for result in results if result.finish_reason is not None]
        self._publish(
            now, finished=[self._keys.pop(one.seq_no) for one in ended if one.seq_no not in self._remote_prefills]
        )
        for sequence in ended:
            if (on_computed := self._remote_prefills.pop(sequence.seq_no, None)) is not None:
                self.num_remote_prefill_tokens += sequence.num_prompt - sequence.num_cached
                on_computed(now)

    def _record(self, results: Iterable[StepResult], now: float) -> None:
        gaps: Counter[float] = Counter()
        for sequence, _, finish_reason in results:
            number = sequence.seq_no
            if number in self._remote_prefills:
                continue
            before = self._last_token_at.get(number)
            if before is None:
                self.progress.append(RequestProgress(number, now, sequence.num_cached, finish_reason))
            else:
                gaps[now - before] += 1
                if finish_reason is not None:
                    self.progress.append(RequestProgress(number, now, None, finish_reason))
            self._last_token_at[number] = now
            if finish_reason is not None:
                del self._last_token_at[number]
        self.steps += [DecodeSteps(count, (gap,)) for gap, count in gaps.items()]

    def _skip_steps(self, now: float, until: float) -> float:
        """Takes the next steps together, as long as they are identical and end by `until`. Returns when the last one
        ends."""
        most = self._scheduler.skippable_steps() - 1  # the last may end sequences, so it is left to a real step
        if most < 1 or now >= until:
            return now
        count = self._scheduler.num_decoding
        held = sum(sequence.num_tokens for sequence in self._scheduler.running)
        gaps = list[float]()
        at = now
        while len(gaps) < most:
            share = min(1.0, (held + len(gaps) * count) / self._capacity_tokens)
            gap = self._timing.step_ms(0, count, share) / 1e3 / self._speed
            if at + gap > until:
                break
            gaps.append(gap)
            at += gap
        if gaps:  # one event stands for all of these steps
            self._scheduler.skip_steps(len(gaps), [_sampled(sequence) for sequence in self._scheduler.running])
            self.steps.append(DecodeSteps(count, tuple(gaps)))
            self._last_token_at = dict.fromkeys(self._last_token_at, at)
            self._publish(at)
        return at

    def _unstarted_blocks(self, answer_tokens: int) -> int:
        tokens = [one.num_prompt + min(one.sampling.max_tokens, answer_tokens) for one in self._unstarted.values()]
        return sum(-(-one // self._settings.block_size) for one in tokens)

    def _publish(
        self,
        now: float,
        started: list[internal.Started] | None = None,
        finished: list[str] | None = None,
        fetches: list[internal.Fetched] | None = None,
        remote_prefills: list[str] | None = None,
    ) -> None:
        load = self._scheduler.load()
        if self._unstarted:
            load = codec.replace(
                load,
                waiting=load.waiting + len(self._fetching) + self._num_awaited,
                queued_prefill_tokens=load.queued_prefill_tokens + sum(self._queued_tokens.values()),
                expected_blocks=load.expected_blocks + self._unstarted_blocks(load.expected_answer_tokens),
            )
        removed, stored = self._pool.prefixes.take_events()
        entry = internal.Events(
            worker_id=self.worker_id,
            epoch=_EPOCH,
            seq=self._seq,
            load=load,
            state=messages.WorkerState.READY,
            removed=removed,
            stored=list(to_runs((new.parent, new.hash) for new in stored)),
            started=started or [],
            finished=finished or [],
            fetches=fetches or [],
            legs=remote_prefills or [],
        )
        self._seq += 1
        self.events.append((now, entry))


def _sampled(sequence: Sequence) -> int:
    """Returns a token that occurs in no prompt or other sequence's output."""
    return own_token(sequence.seq_no)


def own_token(seq_no: int) -> int:
    """Returns the token of a sequence's output. Remote prefills have negative numbers."""
    return VOCAB_SIZE + (2 * seq_no if seq_no >= 0 else -2 * seq_no - 1)
