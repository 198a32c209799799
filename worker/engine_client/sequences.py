"""The sequences that an engine works on: those with an open stream, and those that it has yet to release.

A sequence is open until its stream ends. If the engine ended it, it is gone. If the stream ended first, because of a
stop string or a cancel, the client aborts the sequence: it is then being released until the engine reports its end.
Both kinds count against the engine's capacity, since the engine frees a lane only with that report."""

from collections.abc import Callable, Mapping

from tokenbus.protocol.wire import block_hash
from tokenbus.protocol.wire.traces import GAP_BUCKETS
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine.scheduling.plan import ScoredTokens
from tokenbus.worker.engine_client.engine_faults import MAX_CRASHES, CrashAttribution
from tokenbus.worker.engine_client.generation import Generation

_LONG_PROMPT_TOKENS = 1_024
"""The engine reports the progress of a prompt this long even if its client does not want it."""


def add_command(number: int, generation: Generation) -> bytes:
    """Returns the command that gives an engine a generation, which may have tokens from a dead engine."""
    request = generation.request
    return ipc.encode(
        ipc.Add(
            number,
            block_hash.pack_token_ids(request.token_ids) + block_hash.pack_token_ids(generation.sampled),
            request.sampling,
            (request.tenant, request.cache_salt) if request.cache_prompt else None,
            request.priority,
            request.return_progress or len(request.token_ids) >= _LONG_PROMPT_TOKENS,
            num_sampled=len(generation.sampled),
            isolated=generation.crashes > 0,
            constraint=request.constraint,
            tenant=request.tenant,
            adapters=request.adapters,
            session=request.session_id,
            cache_ttl_s=request.cache_ttl_s,
            reasoning_limit=request.reasoning_limit,
            logprobs_from=generation.logprobs_from,
        )
    )


class OpenSequences:
    """Generations by sequence number. Numbers are never reused. `abort` tells the engine to end a sequence, and
    `on_progress` gets a request's key and how many of its prompt's tokens are computed and were cached."""

    def __init__(
        self,
        abort: Callable[[int], None],
        on_progress: Callable[[str, int, int], None] = lambda key, computed_tokens, cached_tokens: None,
    ) -> None:
        self._abort = abort
        self._on_progress = on_progress
        self._generations: dict[int, Generation] = {}
        self._key_to_number: dict[str, int] = {}
        self._queued_tokens: dict[int, int] = {}
        """Prompt tokens that this engine is expected to compute, of open sequences that it has not started."""
        self._held: dict[int, bytes] = {}
        """Open sequences not yet given to the engine, with the command that does so."""
        self._compiling: dict[int, bool] = {}
        """The engine's sequences whose constraints are not compiled, and whether the engine itself compiles each."""
        self._releasing: set[int] = set()
        self._started: set[int] = set()
        """Open sequences that this engine has started to compute: one of them may be why it died."""
        self._is_engine_lost = False
        self._last_number = 0

    def __repr__(self) -> str:
        return f"<OpenSequences {len(self._generations)} open, {len(self._releasing)} releasing>"

    def __len__(self) -> int:
        return len(self._generations) + len(self._releasing)

    def next_number(self) -> int:
        """Returns a number for another sequence."""
        self._last_number += 1
        return self._last_number

    @property
    def num_given(self) -> int:
        """The number of sequences that the engine has; none once it is lost."""
        return 0 if self._is_engine_lost else len(self) - len(self._held)

    @property
    def num_computing(self) -> int:
        """The number of sequences that keep the engine busy; those waiting for their constraints do not."""
        num_given = self.num_given
        return num_given - sum(not is_at_it for is_at_it in self._compiling.values()) if self._compiling else num_given

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that the engine is expected to compute, of sequences that it has not started."""
        return sum(self._queued_tokens.values())

    def expected_blocks(self, answer_tokens: int, block_size: int) -> int:
        """Returns the KV blocks that sequences which the engine has not started are expected to use before they end,
        if answers have `answer_tokens`."""
        found = 0
        for number in self._queued_tokens:
            generation = self._generations[number]
            num_prompt, most = len(generation.request.token_ids), generation.request.sampling.max_tokens
            found += -(-(num_prompt + min(most, len(generation.sampled) + answer_tokens)) // block_size)
        return found

    @property
    def held_adapters(self) -> set[str]:
        """The digests of the adapters of sequences that the engine does not have yet."""
        return {one.digest for number in self._held for one in self._generations[number].request.adapters}

    def add(self, number: int, generation: Generation, held: bytes | None = None) -> None:
        """Opens a sequence for a generation; `held` is the command to be sent at `release_held`."""
        assert generation.request.key not in self._key_to_number, generation
        if held is not None:
            self._held[number] = held
        elif generation.request.constraint is not None:
            self._compiling[number] = False
        self._generations[number] = generation
        self._key_to_number[generation.request.key] = number
        self._queued_tokens[number] = _num_to_compute(generation)

    def abort(self, key: str) -> Generation | None:
        """Makes the engine end a sequence whose stream is open; returns its generation, which is no longer open."""
        number = self._key_to_number.get(key)
        if number is None or self._generations[number].has_ended:  # then its sink is just receiving the terminal
            return None
        generation = self._generations[number]
        self._release(number)
        return generation

    def release_held(self, key: str) -> bytes | None:
        """Returns the command that gives the engine a held-back sequence; None for any other."""
        number = self._key_to_number.get(key, -1)
        command = self._held.pop(number, None)
        if command is not None and self._generations[number].request.constraint is not None:
            self._compiling[number] = False
        return command

    def start(self, numbers: list[int], now: float) -> None:
        """Notes which sequences got a lane."""
        for number in numbers:
            self._queued_tokens.pop(number, None)
            if generation := self._generations.get(number):
                self._started.add(number)
                if generation.started_at is None:
                    generation.started_at = now

    def constraint_started(self, number: int) -> None:
        """Notes that the engine itself is compiling a constraint."""
        if number in self._compiling:  # else it was aborted meanwhile
            self._compiling[number] = True

    def constraint_compiled(self, compiled: ipc.ConstraintCompiled, now: float) -> None:
        """Tells a generation that its constraint is compiled, or ends it because that is impossible."""
        number, problem = compiled.seq_no, compiled.problem
        self._compiling.pop(number, None)
        generation = self._generations.get(number)
        if problem is not None:
            self._releasing.discard(number)
            if generation is not None:
                self._remove(number)
                generation.fail(problem, now)
        elif generation is not None and generation.constraint_ready() and number in self._generations:
            self._release(number)  # else its sink has aborted it

    def report_progress(self, progress: list[ipc.PromptProgress]) -> None:
        """Hands out the progress of prompts."""
        for one in progress:
            generation = self._generations.get(one.seq_no)
            if generation is None:
                continue
            self._on_progress(generation.request.key, one.computed_tokens, one.cached_tokens)
            failed = generation.progress(one.computed_tokens, one.cached_tokens)
            if failed and one.seq_no in self._generations:  # else its sink has aborted it
                self._release(one.seq_no)

    def report_scored(self, scored: list[ScoredTokens]) -> None:
        """Hands out log probabilities of prompts."""
        for one in scored:
            generation = self._generations.get(one.seq_no)
            if generation is not None and generation.scored(one) and one.seq_no in self._generations:
                self._release(one.seq_no)

    def advance(self, outputs: list[ipc.SequenceOutput], now: float) -> tuple[list[Generation], Mapping[float, int]]:
        """Hands a step's outputs to their generations.

        Returns those that ended, and how many requests got a token, by the seconds since their previous one. Requests
        that step together mostly got their previous token together too, so there is usually one such time."""
        ended: list[Generation] = []
        counts: dict[float, int] = {}
        generations, previous, count, bucket = self._generations, now, 0, 0
        for output in outputs:
            number = output.seq_no
            if output.finish_reason is not None:
                self._releasing.discard(number)
                self._compiling.pop(number, None)
            generation = generations.get(number)
            if generation is None:
                continue
            if output.token_ids and (last := generation.last_token_at) is not None:
                if last != previous:
                    counts[previous], previous, count = count, last, counts.get(last, 0)
                    bucket = min(int(1e3 * (now - last)).bit_length(), GAP_BUCKETS - 1)
                count += 1
                generation.gaps[bucket] += 1
            if generation.advance(output, now) and number in generations:  # else its sink has aborted it
                ended.append(generation)
                if output.finish_reason is None:
                    self._release(number)
                else:
                    self._remove(number)
        counts[previous] = count
        return ended, {now - last: count for last, count in counts.items() if count}

    def lose_engine(self, attribution: CrashAttribution, replica: object) -> list[Generation]:
        """Counts the engine's death against every open sequence that may have caused it.

        Returns the generations that have now ended too many engines; the others stay open for the next engine. If the
        engine had started none of them, one that was never started killed it. Those waiting for a constraint are
        innocent, unless the engine itself was compiling it. An engine that dies before it got any is not counted."""
        if self._is_engine_lost:
            return []
        self._is_engine_lost = True
        waiting = set(self._held) | {number for number, is_at_it in self._compiling.items() if not is_at_it}
        compiling = (set(self._compiling) - waiting) & set(self._generations)
        self._releasing.clear()
        self._held.clear()
        self._compiling.clear()
        new = {number for number, generation in self._generations.items() if generation.started_at is None} - waiting
        # `_started` is about this engine; `started_at` may be from an earlier one
        for number in (self._started | compiling) or new:
            self._generations[number].crashes += attribution.may_be_caused_by(replica, number)
        culprits = {n: one for n, one in self._generations.items() if one.crashes >= MAX_CRASHES}
        for number in culprits:
            self._remove(number)
        return list(culprits.values())

    def take_all(self) -> list[Generation]:
        """Removes and returns every open generation; none is left to wait for. The next ones are another engine's."""
        generations = list(self._generations.values())
        self._generations.clear()
        self._key_to_number.clear()
        self._queued_tokens.clear()
        self._started.clear()
        self._held.clear()
        self._compiling.clear()
        self._releasing.clear()
        self._is_engine_lost = False
        return generations

    def _release(self, number: int) -> None:
        is_held = self._held.pop(number, None) is not None
        self._remove(number)
        if not self._is_engine_lost and not is_held:
            self._releasing.add(number)
            self._abort(number)

    def _remove(self, number: int) -> None:
        del self._key_to_number[self._generations.pop(number).request.key]
        self._queued_tokens.pop(number, None)
        self._started.discard(number)


def _num_to_compute(generation: Generation) -> int:
    request = generation.request
    if request.has_remote_prefill:
        return 0
    return max(0, len(request.token_ids) + len(generation.sampled) - request.expected_cached_tokens)
