"""A scheduler that can take many identical decode steps at once, for workers whose steps compute nothing."""

from array import array
from collections.abc import Sequence as Listing

from tokenbus.worker.engine.scheduling.scheduler import Scheduler


class FastForwardScheduler(Scheduler):
    """The engine's scheduler, for sequences whose sampled tokens end nothing before `max_tokens`."""

    def skippable_steps(self) -> int:
        """Returns how many of the next steps will each be just one token for each running sequence, if no request
        arrives.

        The last of them may end sequences; 0 if prompts, a wait for room or a preemption are involved."""
        if not self._running or self._waiting or self.isolated is not None:
            return 0
        if not all(sequence.num_uncomputed == 1 and sequence.num_sampled for sequence in self._running):
            return 0
        steps = min(sequence.max_num_tokens - sequence.num_tokens for sequence in self._running)
        room = self._cache.free_blocks + self._cache.evictable_blocks
        return min(steps, max(0, room // len(self._running) - 1) * self._cache.block_size)

    def skip_steps(self, steps: int, token_ids: Listing[int]) -> None:
        """Takes `steps` such steps, none of which ends a sequence; each step samples one of `token_ids` for each
        sequence."""
        assert 0 < steps < self.skippable_steps(), (self, steps)
        for sequence, token_id in zip(self._running, token_ids, strict=True):
            sequence.token_ids.extend(array("I", [token_id]) * steps)
            sequence.num_computed += steps
            has_room = sequence.kv.allocate_blocks(sequence.num_computed)
            assert has_room, sequence
            sequence.kv.cache_blocks(sequence.token_ids, sequence.num_computed)
        count = steps * len(self._running)
        self._counters.computed_tokens += count
        self._counters.generated_tokens += count
