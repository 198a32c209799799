"""Decides what each step computes: decodes first, then prompts in chunks, oldest first, under a token budget."""

from collections import deque
from collections.abc import Sequence as Listing

from protocol import messages
from worker.engine.blocks import BlockPool
from worker.engine.plan import Advance, Part, StepPlan
from worker.engine.sequence import End, Sequence


class Scheduler:
    """Holds every sequence of one engine: waiting ones in order of arrival, running ones with a lane and a promise."""

    def __init__(self, pool: BlockPool, max_num_seqs: int) -> None:
        assert max_num_seqs > 0, max_num_seqs
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._free_lanes = list(reversed(range(max_num_seqs)))
        self._num_generated = 0

    def __repr__(self) -> str:
        return f"<Scheduler {len(self._running)} running, {len(self._waiting)} waiting, {self._pool!r}>"

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence that fits the pool when it is empty."""
        assert self._pool.can_ever_promise(sequence.max_num_tokens), sequence
        self._waiting.append(sequence)

    def abort(self, seq_no: int) -> Advance | None:
        """Removes a sequence; None if there is no such one."""
        for sequence in self._running:
            if sequence.seq_no == seq_no:
                return self.end(sequence, End.ABORTED)
        for sequence in self._waiting:
            if sequence.seq_no == seq_no:
                self._waiting.remove(sequence)
                return Advance(sequence, None, End.ABORTED)
        return None

    def youngest(self) -> Sequence:
        """The sequence that started last: the one to give way when something must."""
        return self._running[-1]

    def end(self, sequence: Sequence, end: End) -> Advance:
        """Takes a running sequence out. Its `lane` stays written on it, for the runner to clear."""
        self._running.remove(sequence)
        self._pool.release(sequence.seq_no)
        assert sequence.lane is not None
        self._free_lanes.append(sequence.lane)
        return Advance(sequence, None, end)

    def plan(self, prefill_budget: int) -> StepPlan:
        """The next step: one token for each sequence that decodes, and at most `prefill_budget` tokens of prompts."""
        started = self._start_waiting()
        decodes = [sequence for sequence in self._running if sequence.num_uncomputed == 1]
        prompts = [sequence for sequence in self._running if sequence.num_uncomputed > 1]
        parts = [Part(sequence, sequence.num_computed, 1) for sequence in decodes]
        parts += self._chunks(prompts, prefill_budget)
        return StepPlan(tuple(parts), tuple(started))

    def commit(self, plan: StepPlan, sampled: Listing[int | End]) -> list[Advance]:
        """Notes that a plan was computed. `sampled` holds a token, or why there is none, for each part that samples."""
        advances = []
        results = iter(sampled)
        for part in plan.parts:
            sequence, samples = part.sequence, part.samples
            sequence.num_computed += part.num_tokens
            self._pool.use(sequence.seq_no, sequence.num_computed)
            if samples:
                advances.append(self._advance(sequence, next(results)))
        assert next(results, None) is None, "more results than parts that sample"
        return advances

    def load(self) -> messages.Load:
        waiting_tokens = sum(sequence.num_uncomputed for sequence in self._waiting)
        prefill_tokens = sum(s.num_uncomputed for s in self._running if s.num_uncomputed > 1)
        return messages.Load(
            running=len(self._running),
            waiting=len(self._waiting),
            queued_prefill_tokens=waiting_tokens + prefill_tokens,
            used_blocks=self._pool.used_blocks,
            free_blocks=self._pool.free_blocks,
            generated_tokens=self._num_generated,
        )

    def check_integrity(self) -> None:
        """Asserts what must hold between any two calls."""
        lanes = [sequence.lane for sequence in self._running if sequence.lane is not None]
        assert sorted(lanes + self._free_lanes) == list(range(self._max_num_seqs)), (lanes, self._free_lanes)
        assert all(sequence.lane is None for sequence in self._waiting)
        for sequence in self._running:
            sequence.check_integrity()
        self._pool.check_integrity()
        numbers = [sequence.seq_no for sequence in (*self._running, *self._waiting)]
        assert len(numbers) == len(set(numbers)), numbers

    def _advance(self, sequence: Sequence, result: int | End) -> Advance:
        if isinstance(result, End):
            return self.end(sequence, result)
        end = sequence.append(result)
        self._num_generated += 1
        if end is not None:
            self.end(sequence, end)
        return Advance(sequence, result, end)

    def _start_waiting(self) -> list[Sequence]:
        """Starts waiting sequences in order while there is a lane and room; a large one is not overtaken for ever."""
        started = []
        while self._waiting and self._free_lanes and self._pool.can_promise(self._waiting[0].max_num_tokens):
            sequence = self._waiting.popleft()
            sequence.lane = self._free_lanes.pop()
            self._pool.promise(sequence.seq_no, sequence.max_num_tokens)
            self._running.append(sequence)
            started.append(sequence)
        return started

    def _chunks(self, prompts: list[Sequence], budget: int) -> list[Part]:
        """Shares the budget out, oldest first: while others wait no prompt gets more than half of what is left."""
        parts = []
        for behind, sequence in zip(range(len(prompts) - 1, -1, -1), prompts, strict=True):
            if budget <= 0:
                break
            count = min(sequence.num_uncomputed, -(-budget // 2) if behind else budget)
            parts.append(Part(sequence, sequence.num_computed, count))
            budget -= count
        return parts
