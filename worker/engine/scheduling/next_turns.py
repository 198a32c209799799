"""Next turns: the prompts with which conversations are expected to continue, for steps that would otherwise be empty.

A template that drops old reasoning renders the next prompt so that it continues the last one only up to its end:

    last prompt    |---- known ----|-- <think> --|-- reasoning --|-- answer --|
    next prompt    |---- known ----|-- answer --|-- the client's next message --|
                                   |-- ahead ---|

What can be known of it is computed while the client is busy, unless it is cached already. One turn at a time is
computed, and is set aside for any sequence. A turn is done when all of it is computed, and gone when its request has
come, or when newer ones need its place.
"""

import dataclasses
from array import array
from collections import Counter

from tokenbus.protocol.wire import block_hash
from tokenbus.worker.engine.kv.pool import BlockPool
from tokenbus.worker.engine.kv.prefix_tree import Domain
from tokenbus.worker.engine.scheduling.plan import ScheduledTokens
from tokenbus.worker.engine.scheduling.sequence import Sequence

_MAX_TURNS = 32
_MAX_TOKENS = 1 << 20
"""The most tokens of all turns together, at 4 bytes each."""


@dataclasses.dataclass(slots=True, eq=False)
class TurnAhead:
    """The prompt of a turn that is likely to come, as far as it can be known."""

    token_ids: "array[int]"
    domain: Domain
    num_known: int
    """Leading tokens that are those of the last prompt."""
    sequence: Sequence | None
    """The sequence that computes it; None once that is done."""
    first: int | None = None
    """The first token that was not cached; None until that is known."""
    end: int = 0
    """The number of its tokens that have been in the cache."""

    @property
    def num_computed(self) -> int:
        """The number of its tokens that were computed ahead."""
        return 0 if self.first is None else self.end - self.first


class TurnsAhead:
    """The turns that one engine expects. Tenants are served in turns, and the one with the most tokens loses its oldest
    first."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._turns: list[TurnAhead] = []
        """The oldest first."""
        self._computing: tuple[TurnAhead, Sequence] | None = None
        """The turn that has a lane, and its sequence."""
        self._done: list[TurnAhead] = []
        """Those of which something was computed and that were done since `take_done`."""
        self._spent: Counter[str] = Counter()
        """The tokens computed for tenants that have turns here."""
        self.computed_tokens = 0
        self.used_tokens = 0
        """Computed tokens that the request found which was expected."""

    def __repr__(self) -> str:
        return f"<TurnsAhead {len(self)} of {len(self._turns)} not done>"

    def __len__(self) -> int:
        """The number of turns that are not done."""
        return sum(turn.sequence is not None for turn in self._turns)

    @property
    def is_computing(self) -> bool:
        """Whether one has a lane and blocks; no sequence has any then."""
        return self._computing is not None

    @property
    def used_blocks(self) -> int:
        """The blocks that one has; any sequence may have them instead."""
        return self._pool.cache.used_blocks if self.is_computing else 0

    def add(self, turn: TurnAhead) -> None:
        """Adds a turn; others may have to go for it."""
        self._turns.append(turn)
        while len(self._turns) > _MAX_TURNS or sum(len(one.token_ids) for one in self._turns) > _MAX_TOKENS:
            held: Counter[str] = Counter()
            for one in self._turns:
                held[one.domain.tenant] += len(one.token_ids)
            most = max(held, key=held.__getitem__)
            self._remove(next(one for one in self._turns if one.domain.tenant == most))

    def schedule(self, budget: int) -> list[ScheduledTokens]:
        """Schedules at most `budget` tokens of a turn, all but its last one, and ends it if there are no more. If
        nearly all is cached from the start, as where a template keeps the reasoning, nothing is computed. With a budget
        of 0, the turn is set aside."""
        if not budget:
            self.set_aside()
        elif self._computing is None:
            self._start_next()
        if self._computing is None:
            return []
        turn, sequence = self._computing
        reused = sequence.kv.reuse_prefix(sequence.token_ids, sequence.num_computed, sequence.max_reused)
        sequence.reuse_prefix(reused)
        if sequence.kv.awaits_onload(sequence.token_ids):
            return []
        if turn.first is None:
            turn.first = turn.end = sequence.num_computed
        count = min(sequence.num_uncomputed - 1, budget, sequence.num_until_stop)
        is_known = not turn.num_computed and sequence.num_uncomputed <= self._pool.cache.block_size
        if count > 0 and not is_known and sequence.kv.allocate_blocks(sequence.num_computed + count):
            return [ScheduledTokens(sequence, sequence.num_computed, count)]
        self.set_aside()
        turn.sequence = None
        if turn.num_computed:
            self._done.append(turn)
        return []

    def update(self, scheduled: ScheduledTokens, *, is_done: bool) -> None:
        """Records the outcome of a share. A turn that could not be computed is given up, and leaves nothing."""
        assert self._computing is not None, scheduled
        turn, sequence = self._computing
        if not is_done:
            self._computing = None
            self._pool.drop(sequence.kv, trusts_others=True)
            self._remove(turn)
            return
        sequence.compute(scheduled.num_tokens)
        sequence.kv.cache_blocks(sequence.token_ids, sequence.num_computed)
        turn.end = max(turn.end, sequence.num_computed)
        self.computed_tokens += scheduled.num_tokens
        self._spent[turn.domain.tenant] += scheduled.num_tokens

    def set_aside(self) -> None:
        """Gives back the memory of the turn that is computed; what it has stays cached."""
        if self._computing is not None:
            _, sequence = self._computing
            self._pool.free(sequence.kv, sequence.token_ids, sequence.num_computed)
            sequence.preempt()
            self._computing = None

    def next(self) -> TurnAhead | None:
        """Returns the turn to compute: the oldest of the tenant for which least has been computed."""
        left = [turn for turn in self._turns if turn.sequence is not None]
        return min(left, key=lambda turn: self._spent[turn.domain.tenant], default=None)

    def take_done(self) -> list[TurnAhead]:
        """Returns the turns of which something was computed and that were done since the last call."""
        taken, self._done = self._done, []
        return taken

    def forget(self, adapter: str | None = None) -> None:
        """Gives up all turns, or those that use the adapter with this digest."""
        for turn in list(self._turns):
            if adapter is None or any(one.digest == adapter for one in turn.domain.adapters):
                self._remove(turn)

    def came(self, sequence: Sequence) -> None:
        """Notes what was computed ahead for a sequence that begins, if it is a turn that was expected."""
        if sequence.num_sampled:
            return
        for turn in self._turns:
            begin = turn.num_known + 1  # another answer to the last prompt has only what is known
            if turn.domain == sequence.domain and turn.token_ids[:begin] == sequence.token_ids[:begin]:
                packed = (block_hash.pack_token_ids(ids) for ids in (turn.token_ids, sequence.token_ids))
                end = min(turn.end, block_hash.num_common_tokens(*packed))
                sequence.ahead = range(end if turn.first is None else turn.first, end)
                self._remove(turn)
                return

    def count_used(self, sequence: Sequence) -> None:
        """Counts what a sequence has found of what was computed ahead for it."""
        self.used_tokens += len(range(sequence.ahead.start, min(sequence.ahead.stop, sequence.num_cached)))

    def _start_next(self) -> None:
        """Gives the next turn a lane. One that does not fit is given up."""
        if (turn := self.next()) is None:
            return
        assert turn.sequence is not None, turn
        sequence, pool = turn.sequence, self._pool
        if not pool.cache.has_lane or not pool.can_allocate(turn.domain, turn.token_ids, sequence.num_tokens):
            self._remove(turn)
            return
        sequence.start(pool.allocate(turn.domain, is_new=False, hint=sequence.hint))
        self._computing = turn, sequence

    def _remove(self, turn: TurnAhead) -> None:
        if self._computing is not None and self._computing[0] is turn:
            self.set_aside()
        self._turns.remove(turn)
        tenant = turn.domain.tenant
        if not any(one.domain.tenant == tenant for one in self._turns):
            del self._spent[tenant]
