"""One worker in virtual time: the scheduler and the block pool of the live engine, steps that only take their time."""

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from tokenbus.protocol.wire import internal, messages
from tokenbus.replay.fast_forward import FastForwardScheduler
from tokenbus.worker import contract
from tokenbus.worker.broker.published_blocks import to_runs
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.kv.prefix_tree import Domain
from tokenbus.worker.engine.scheduling.plan import SampledToken, StepPlan, StepResult
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, Sequence
from tokenbus.worker.engine.scheduling.step_budget import StepBudget
from tokenbus.worker.engine.sim.runner import VOCAB_SIZE
from tokenbus.worker.engine.sim.timing import TimingModel, plan_ms

MODEL = "replayed"
FINGERPRINT = "replay"
_FEWEST_PREFILL_TOKENS = 32
_LANES_PER_SEQUENCE = 64


class VirtualWorkerSettings(NamedTuple):
    """What a simulated worker is like."""

    kv_blocks: int
    block_size: int
    timing: TimingModel
    speed: float = 1.0
    """How many times faster than its timing it is."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8_192
    step_target_ms: float = 0.0
    """Prompts are computed in chunks of about this long; 0: of as many tokens as a step may carry."""


class RequestProgress(NamedTuple):
    """What a step did for one request."""

    number: int
    at_s: float
    cached_tokens: int | None = None
    """With the first token: how much of the prompt it did not have to compute."""
    end: EngineFinishReason | None = None


class DecodeSteps(NamedTuple):
    """Several steps in which each of `sequences` got a token, `gap_s` after the one before."""

    sequences: int
    gaps_s: tuple[float, ...]


class VirtualWorker:
    """Computes nothing and takes as long as its timing says. `say` gets its event log, `report` what its steps did."""

    def __init__(self, worker_id: str, settings: VirtualWorkerSettings) -> None:
        self.worker_id = worker_id
        self._settings = settings
        pool = BlockPool(
            settings.kv_blocks,
            settings.block_size,
            settings.max_num_seqs * _LANES_PER_SEQUENCE + settings.kv_blocks,
            fingerprint=FINGERPRINT,
        )
        self._scheduler = FastForwardScheduler(pool, settings.max_num_seqs)
        self._most_prefill = settings.max_num_batched_tokens
        target_s = settings.step_target_ms / 1e3
        self._step_budget = StepBudget(target_s, _FEWEST_PREFILL_TOKENS, self._most_prefill) if target_s else None
        self._capacity_tokens = settings.kv_blocks * settings.block_size
        self._plan: StepPlan | None = None
        self._step_began_at = 0.0
        self._seq = 0
        self._keys: dict[int, str] = {}
        self._last_token_at: dict[int, float] = {}
        self.step_ends_at: float | None = None
        """When the step in progress ends; None while there is none."""
        self.events: list[tuple[float, internal.Events]] = []
        """Its event log with times; the world takes them out."""
        self.progress: list[RequestProgress] = []
        self.steps: list[DecodeSteps] = []

    def __repr__(self) -> str:
        return f"<VirtualWorker {self.worker_id} {self._scheduler!r}>"

    def card(self) -> messages.Card:
        settings = self._settings
        return messages.Card(
            worker_id=self.worker_id,
            epoch="1-replay",
            model=MODEL,
            source="replay",
            engine="sim",
            engine_version="1",
            context_length=self._capacity_tokens,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            hash_scheme=f"xxh3-64:{FINGERPRINT}",
            features=[],
            state=messages.WorkerState.READY,
            host="replay",
            pids=messages.Pids(front=0, engine=0),
            versions={},
            kv_block_size=settings.block_size,
            total_kv_blocks=settings.kv_blocks,
        )

    def submit(
        self,
        number: int,
        key: str,
        token_ids: "array[int]",
        output_tokens: int,
        domain: Domain,
        priority: int,
        now: float,
    ) -> None:
        """Accepts a request, and begins with it at once if there is nothing else to do."""
        sampling = contract.Sampling(max_tokens=output_tokens)
        sequence = Sequence(number, token_ids, sampling, frozenset(), domain=domain, priority=priority, arrived_at=now)
        self._keys[number] = key
        self._scheduler.add(sequence)
        self._publish(now, started=[internal.Started(id=key, prompt_tokens=len(token_ids), overlap_blocks=0)])
        if self._plan is None:
            self._begin(now)

    def advance(self, now: float, coalesce_until: float) -> None:
        """Takes all steps that end by `now`; those that end by `coalesce_until` several at a time
        where they are alike."""
        while self.step_ends_at is not None and self.step_ends_at <= now:
            ended_at = self.step_ends_at
            self._commit(ended_at)
            self._begin(self._skip(ended_at, coalesce_until))

    @property
    def load(self) -> messages.Load:
        return self._scheduler.load()

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()

    def _begin(self, now: float) -> None:
        if not self._scheduler.has_work:
            self._plan, self.step_ends_at = None, None
            return
        decoding = self._scheduler.num_decoding
        budget = self._most_prefill - decoding
        if self._step_budget is not None:
            budget = min(budget, self._step_budget.prefill_tokens(decoding))
        self._plan = self._scheduler.schedule(budget)
        assert self._plan.scheduled, self
        self._step_began_at = now
        step_ms = plan_ms(self._plan, self._settings.timing, self._capacity_tokens)
        self.step_ends_at = now + step_ms / 1e3 / self._settings.speed

    def _commit(self, now: float) -> None:
        plan = self._plan
        assert plan is not None
        if self._step_budget is not None:
            self._step_budget.observe(plan.num_tokens, now - self._step_began_at)
        sampled = [SampledToken(_sampled(part.sequence)) for part in plan.scheduled if part.samples]
        advances = self._scheduler.update(plan, sampled)
        self._note(advances, now)
        self._publish(
            now, finished=[self._keys.pop(one.sequence.seq_no) for one in advances if one.finish_reason is not None]
        )

    def _note(self, advances: Iterable[StepResult], now: float) -> None:
        gaps: dict[float, int] = {}
        for sequence, _, end in advances:
            number = sequence.seq_no
            before = self._last_token_at.get(number)
            if before is None:
                self.progress.append(RequestProgress(number, now, sequence.num_cached, end))
            else:
                gaps[now - before] = gaps.get(now - before, 0) + 1
                if end is not None:
                    self.progress.append(RequestProgress(number, now, None, end))
            self._last_token_at[number] = now
            if end is not None:
                del self._last_token_at[number]
        self.steps += [DecodeSteps(count, (gap,)) for gap, count in gaps.items()]

    def _skip(self, now: float, until: float) -> float:
        """Takes steps that are all alike at once, if they end by `until`; returns when the last of them ends."""
        most = self._scheduler.skippable_steps() - 1
        if most < 1 or now >= until:
            return now
        count = self._scheduler.num_decoding
        held = sum(sequence.num_tokens for sequence in self._scheduler.running)
        timing, speed = self._settings.timing, self._settings.speed
        gaps = list[float]()
        at = now
        while len(gaps) < most:
            share = min(1.0, (held + len(gaps) * count) / self._capacity_tokens)
            gap = timing.step_ms(0, count, share) / 1e3 / speed
            if at + gap > until:
                break
            gaps.append(gap)
            at += gap
        if gaps:
            self._scheduler.skip_steps(len(gaps), [_sampled(sequence) for sequence in self._scheduler.running])
            self.steps.append(DecodeSteps(count, tuple(gaps)))
            self._last_token_at = dict.fromkeys(self._last_token_at, at)
            self._publish(at)
        return at

    def _publish(
        self, now: float, started: list[internal.Started] | None = None, finished: list[str] | None = None
    ) -> None:
        removed, stored = self._scheduler.take_kv_events()
        entry = internal.Events(
            worker_id=self.worker_id,
            epoch="1-replay",
            seq=self._seq,
            load=self._scheduler.load(),
            state=messages.WorkerState.READY,
            removed=removed,
            stored=list(to_runs((new.parent, new.hash) for new in stored)),
            started=started or [],
            finished=finished or [],
        )
        self._seq += 1
        self.events.append((now, entry))


def _sampled(sequence: Sequence) -> int:
    """A token that is in no prompt and no other completion."""
    return VOCAB_SIZE + sequence.seq_no
