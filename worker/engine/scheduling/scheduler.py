"""Decides what each step computes: decodes first, then prompts in chunks, in turn, under a token budget."""

import bisect
from collections.abc import Sequence as Listing

from tokenbus.protocol.wire import messages
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.kv.prefix_tree import KvEvents
from tokenbus.worker.engine.scheduling.plan import SampledToken, ScheduledTokens, StepPlan, StepResult
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, Sequence
from tokenbus.worker.engine.scheduling.waiting_queue import WaitingQueue, priority_key


class Scheduler:
    """Holds every sequence of one engine: waiting ones, and running ones with a lane and a promise, both in turn.

    `priority_s` is how many seconds of waiting one step of priority is worth; `max_cached_blocks` how many cached
    blocks
    that nobody uses may stay on the device."""

    def __init__(
        self, pool: BlockPool, max_num_seqs: int, *, priority_s: float = 1.0, max_cached_blocks: int | None = None
    ) -> None:
        assert max_num_seqs > 0, max_num_seqs
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._priority_s = priority_s
        self._max_cached_blocks = pool.total_blocks if max_cached_blocks is None else max_cached_blocks
        self._waiting = WaitingQueue(priority_s)
        self._running: list[Sequence] = []
        self._num_generated = 0
        self._num_computed = 0
        self._num_prompt = 0
        self._num_cached = 0
        self.preemptions = 0
        self._under_pressure = False
        """The device had less room than was promised: none is started before one has ended."""

    def __repr__(self) -> str:
        return f"<Scheduler {len(self._running)} running, {len(self._waiting)} waiting, {self._pool!r}>"

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def evicted_blocks(self) -> int:
        """Cached blocks that had to leave the device, in all."""
        return self._pool.cache.evicted_blocks

    @property
    def running(self) -> Listing[Sequence]:
        """Those with a lane, in turn."""
        return self._running

    @property
    def num_decoding(self) -> int:
        """Sequences whose clients wait for their next token."""
        return sum(sequence.num_uncomputed == 1 for sequence in self._running)

    @property
    def isolated(self) -> Sequence | None:
        """The one that takes no step with others now, since an engine died in a step with it."""
        return next((sequence for sequence in self._running if sequence.isolated), None)

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence that fits the pool when it is empty."""
        assert self._pool.can_ever_allocate(sequence.max_num_tokens), sequence
        self._waiting.add(sequence)

    def abort(self, seq_no: int) -> StepResult | None:
        """Removes a sequence; None if there is no such one."""
        for sequence in self._running:
            if sequence.seq_no == seq_no:
                return self.finish(sequence, EngineFinishReason.ABORTED)
        for sequence in self._waiting:
            if sequence.seq_no == seq_no:
                self._waiting.remove(sequence)
                return StepResult(sequence, None, EngineFinishReason.ABORTED)
        return None

    def finish(self, sequence: Sequence, finish_reason: EngineFinishReason) -> StepResult:
        """Takes a running sequence out; what it has computed stays cached."""
        self._free(sequence)
        self._under_pressure = False
        return StepResult(sequence, None, finish_reason)

    def schedule(self, prefill_budget: int, transfer_blocks: int = 0) -> StepPlan:
        """The next step: one token for each sequence that decodes, and at most `prefill_budget` tokens of prompts.

        At most `transfer_blocks` go to host memory before it, and as many come back."""
        self._pool.cache.host.set_limits(offloads=transfer_blocks, onloads=transfer_blocks)
        started = self._admit()
        self._reuse_prefixes()
        stepping = self._stepping()
        decodes = self._decodes(stepping)
        parts = decodes + self._chunks(stepping, prefill_budget, {part.sequence.seq_no for part in decodes})
        self._pool.cache.trim(self._max_cached_blocks)
        return StepPlan(tuple(parts), tuple(started), tuple(self._pool.cache.ops.take()))

    def update(self, plan: StepPlan, sampled: Listing[SampledToken | EngineFinishReason]) -> list[StepResult]:
        """Notes that a plan was computed. `sampled` holds a token, or why there is none, for each part that samples."""
        advances = []
        results = iter(sampled)
        for part in plan.scheduled:
            sequence, samples = part.sequence, part.samples
            sequence.num_computed += part.num_tokens
            self._num_computed += part.num_tokens
            self._pool.cache_blocks(sequence.seq_no, sequence.token_ids, sequence.num_computed)
            if samples:
                advances.append(self._advance(sequence, next(results)))
        assert next(results, None) is None, "more results than parts that sample"
        return advances

    def skippable_steps(self) -> int:
        """How many steps from now on will be one token for each running sequence and nothing else, if nobody comes.

        The last of them may end sequences; 0 where prompts, a wait for room or a preemption come into it."""
        if not self._running or self._waiting or self.isolated is not None:
            return 0
        if not all(sequence.num_uncomputed == 1 and sequence.num_sampled for sequence in self._running):
            return 0
        steps = min(sequence.max_num_tokens - sequence.num_tokens for sequence in self._running)
        room = self._pool.cache.free_blocks + self._pool.cache.evictable_blocks
        return min(steps, max(0, room // len(self._running) - 1) * self._pool.block_size)

    def skip_steps(self, steps: int, token_ids: Listing[int]) -> None:
        """Takes `steps` such steps at once, which sampled the same of `token_ids` for a sequence each time, and ended
        none."""
        assert 0 < steps < self.skippable_steps(), (self, steps)
        for sequence, token_id in zip(self._running, token_ids, strict=True):
            sequence.skip_steps(steps, token_id)
            has_room = self._pool.allocate_blocks(sequence.seq_no, sequence.num_computed)
            assert has_room, sequence
            self._pool.cache_blocks(sequence.seq_no, sequence.token_ids, sequence.num_computed)
        count = steps * len(self._running)
        self._num_computed += count
        self._num_generated += count

    def reclaim_memory(self) -> StepResult | None:
        """Makes room where the device has none although it was promised: cached blocks go, then the last in turn.

        What a lone sequence can't have ends it."""
        if self._pool.cache.evictable_blocks:
            self._pool.cache.clear()
            return None
        last = self._running[-1]
        if len(self._running) == 1:
            return self.finish(last, EngineFinishReason.INSUFFICIENT_MEMORY)
        self._preempt(last)
        self._under_pressure = True
        return None

    def clear_cache(self) -> None:
        """Forgets every cached block that no sequence uses."""
        self._pool.cache.clear()

    def take_kv_events(self) -> KvEvents:
        """Which cached blocks came and went since the last time."""
        return self._pool.cache.tree.take_events()

    def load(self) -> messages.Load:
        waiting_tokens = sum(sequence.num_uncomputed for sequence in self._waiting)
        prefill_tokens = sum(s.num_uncomputed for s in self._running if s.num_uncomputed > 1)
        return messages.Load(
            running=len(self._running),
            waiting=len(self._waiting),
            queued_prefill_tokens=waiting_tokens + prefill_tokens,
            used_blocks=self._pool.cache.used_blocks,
            cached_blocks=self._pool.cache.evictable_blocks,
            free_blocks=self._pool.cache.free_blocks,
            generated_tokens=self._num_generated,
            computed_tokens=self._num_computed,
            prompt_tokens=self._num_prompt,
            cached_tokens=self._num_cached,
        )

    def check_counts(self) -> None:
        """Asserts of what must hold between any two calls that which costs little, however much is cached."""
        assert len(self._running) <= self._max_num_seqs
        self._pool.check_counts()

    def check_integrity(self) -> None:
        """Asserts what must hold between any two calls."""
        assert len(self._running) <= self._max_num_seqs
        assert self._running == sorted(self._running, key=self._priority_key)
        assert all(sequence.lane is None and not sequence.num_computed for sequence in self._waiting)
        for sequence in self._running:
            assert sequence.lane == self._pool.lane_of(sequence.seq_no)
            sequence.check_integrity()
        self._pool.check_integrity()
        numbers = [sequence.seq_no for sequence in (*self._running, *self._waiting)]
        assert len(numbers) == len(set(numbers)), numbers

    def _priority_key(self, sequence: Sequence) -> tuple[float, int]:
        return priority_key(sequence, self._priority_s)

    def _free(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._pool.free(sequence.seq_no, sequence.token_ids, sequence.num_computed)

    def _preempt(self, sequence: Sequence) -> None:
        """A sequence gives up its place; it goes on in its turn, by computing again what is not cached by then."""
        self._free(sequence)
        sequence.preempt()
        self.preemptions += 1
        self._waiting.add(sequence)

    def _advance(self, sequence: Sequence, result: SampledToken | EngineFinishReason) -> StepResult:
        if isinstance(result, EngineFinishReason):
            return self.finish(sequence, result)
        end = sequence.append_token(result.token_id)
        self._num_generated += 1
        if sequence.num_sampled == 1:
            self._num_prompt += sequence.num_prompt
            self._num_cached += sequence.num_cached
        if end is not None:
            self.finish(sequence, end)
        return StepResult(sequence, result, end)

    def _admit(self) -> list[Sequence]:
        """Starts waiting sequences in turn while there is a lane and room; a large one is not overtaken for ever."""
        started: list[Sequence] = []
        if self._under_pressure and self._running:
            return started
        while self._waiting and len(self._running) < self._max_num_seqs and self._fits(self._waiting.first):
            sequence = self._waiting.pop()
            sequence.lane = self._pool.allocate(sequence.seq_no, sequence.domain, sequence.max_num_tokens)
            bisect.insort(self._running, sequence, key=self._priority_key)
            if not sequence.preemptions:
                started.append(sequence)
        return started

    def _fits(self, sequence: Sequence) -> bool:
        """One that was preempted has paid for over-commitment once: it comes back to a whole promise."""
        return self._pool.can_allocate(
            sequence.domain, sequence.token_ids, sequence.max_num_tokens, fully=sequence.preemptions > 0
        )

    def _reuse_prefixes(self) -> None:
        for sequence in self._running:
            if sequence.num_uncomputed > 1:
                sequence.reuse_prefix(
                    self._pool.reuse_prefix(sequence.seq_no, sequence.token_ids, sequence.num_computed)
                )

    def _stepping(self) -> list[Sequence]:
        """Those that take part in the next step: all, or the first of those that must be alone."""
        isolated = self.isolated
        return list(self._running) if isolated is None else [isolated]

    def _decodes(self, stepping: list[Sequence]) -> list[ScheduledTokens]:
        parts: list[ScheduledTokens] = []
        planned: set[int] = set()
        for sequence in stepping:
            if sequence.lane is None or sequence.num_uncomputed > 1:
                continue
            if self._make_room(sequence, sequence.num_tokens, planned):
                planned.add(sequence.seq_no)
                parts.append(ScheduledTokens(sequence, sequence.num_computed, 1))
        return parts

    def _chunks(self, stepping: list[Sequence], budget: int, planned: set[int]) -> list[ScheduledTokens]:
        """Shares the budget out in turn: a prompt that can be finished is, of a longer one half of what is left is
        computed while others wait."""
        parts: list[ScheduledTokens] = []
        prompts = self._distinct_prompts(stepping)
        for behind, sequence in zip(range(len(prompts) - 1, -1, -1), prompts, strict=True):
            if budget <= 0:
                break
            if sequence.lane is None:
                continue
            count = sequence.num_uncomputed
            if count > budget:
                count = -(-budget // 2) if behind else budget
            if self._make_room(sequence, sequence.num_computed + count, planned):
                planned.add(sequence.seq_no)
                parts.append(ScheduledTokens(sequence, sequence.num_computed, count))
                budget -= count
        return parts

    def _distinct_prompts(self, stepping: list[Sequence]) -> list[Sequence]:
        """The prompts to go on with: of several that would compute the same block next only the first."""
        prompts, nexts = [], set()
        for sequence in stepping:
            if sequence.lane is None or sequence.num_uncomputed <= 1:
                continue
            if self._pool.awaits_onload(sequence.seq_no, sequence.token_ids):
                continue
            block = self._pool.next_block(sequence.seq_no, sequence.token_ids)
            if block is None or block not in nexts:
                prompts.append(sequence)
                nexts.add(block)
        return prompts

    def _make_room(self, sequence: Sequence, num_tokens: int, planned: set[int]) -> bool:
        """Sees to it that a sequence can hold `num_tokens`, at the cost of those that come after it if need be.

        One that must be alone takes room from all others, since none of them gets on before it has a token."""
        while not self._pool.allocate_blocks(sequence.seq_no, num_tokens):
            others = [one for one in self._running if one is not sequence] if sequence.isolated else self._running
            last = others[-1]
            if last is sequence or last.seq_no in planned:
                return False
            self._preempt(last)
        return True
