"""Next turns: the prompts with which conversations are expected to continue, for steps that would otherwise be empty.

A template that drops old reasoning renders the next prompt so that it continues the last one only up to its end:

    last prompt    |---- known ----|-- <think> --|-- reasoning --|-- answer --|
    next prompt    |---- known ----|-- answer --|-- the client's next message --|
                                   |-- ahead ---|

What can be known of it is computed while the client is busy, unless it is cached already. A turn is done when all of it
is computed, and gone when its request has come, or when newer ones need its place.
"""

import dataclasses
from array import array
from collections import Counter

from tokenbus.protocol.wire import block_hash
from tokenbus.worker.engine.kv.prefix_tree import Domain
from tokenbus.worker.engine.scheduling.sequence import Sequence

_MAX_TURNS = 32
_MAX_TOKENS = 1 << 20
"""Of all turns together, at 4 bytes each."""


@dataclasses.dataclass(slots=True, eq=False)
class NextTurn:
    """The prompt of a turn that is likely to come, as far as it can be known."""

    token_ids: "array[int]"
    domain: Domain
    num_known: int
    """Its leading tokens that are those of the last prompt."""
    sequence: Sequence | None
    """What computes it; None once that is done."""
    first: int | None = None
    """The first token that was not cached; None until that is known."""
    end: int = 0
    """The number of its tokens that have been in the cache."""

    @property
    def num_computed(self) -> int:
        """The number of its tokens that were computed ahead."""
        return 0 if self.first is None else self.end - self.first


class NextTurns:
    """The turns that one engine expects. Tenants are served in turns, and the one with the most tokens loses its oldest
    first."""

    def __init__(self) -> None:
        self._turns: list[NextTurn] = []
        """The oldest first."""
        self._done: list[NextTurn] = []
        """Those of which something was computed and that were done since `take_done`."""
        self._spent: Counter[str] = Counter()
        """The tokens computed for tenants that have turns here."""
        self.computed_tokens = 0
        self.used_tokens = 0
        """Computed tokens that the request found which was expected."""

    def __repr__(self) -> str:
        return f"<NextTurns {len(self)} of {len(self._turns)} not done>"

    def __len__(self) -> int:
        """The number of turns that are not done."""
        return sum(turn.sequence is not None for turn in self._turns)

    def add(self, turn: NextTurn) -> None:
        """Adds a turn; others may have to go for it."""
        self._turns.append(turn)
        while len(self._turns) > _MAX_TURNS or sum(len(one.token_ids) for one in self._turns) > _MAX_TOKENS:
            held: Counter[str] = Counter()
            for one in self._turns:
                held[one.domain.tenant] += len(one.token_ids)
            most = max(held, key=held.__getitem__)
            self._remove(next(one for one in self._turns if one.domain.tenant == most))

    def next(self) -> NextTurn | None:
        """Returns the turn to compute: the oldest of the tenant for which least has been computed."""
        left = [turn for turn in self._turns if turn.sequence is not None]
        return min(left, key=lambda turn: self._spent[turn.domain.tenant], default=None)

    def turn_of(self, sequence: Sequence) -> NextTurn | None:
        """Returns the turn that a sequence computes; None if it is gone."""
        return next((turn for turn in self._turns if turn.sequence is sequence), None)

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Counts tokens that a step has computed."""
        self.computed_tokens += num_tokens
        if (turn := self.turn_of(sequence)) is not None:
            self._spent[turn.domain.tenant] += num_tokens
            turn.end = sequence.num_computed

    def done(self, sequence: Sequence) -> None:
        """Keeps a turn only to recognize its request."""
        if (turn := self.turn_of(sequence)) is not None:
            turn.sequence = None
            if turn.num_computed:
                self._done.append(turn)

    def take_done(self) -> list[NextTurn]:
        """Returns the turns of which something was computed and that were done since the last call."""
        taken, self._done = self._done, []
        return taken

    def drop(self, sequence: Sequence) -> None:
        """Gives up the turn that a sequence computes."""
        if (turn := self.turn_of(sequence)) is not None:
            self._remove(turn)

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

    def _remove(self, turn: NextTurn) -> None:
        self._turns.remove(turn)
        tenant = turn.domain.tenant
        if not any(one.domain.tenant == tenant for one in self._turns):
            del self._spent[tenant]
