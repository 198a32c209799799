"""Finds which of a prompt's KV blocks a worker could fetch from another worker instead of computing them.

Workers with the same KV identity form a group: each can read the blocks of all others. The one that holds most of a
prompt is the *holder* for the rest of its group:

    prompt         |-- block --|-- block --|-- block --|-- block --|-- rest --|
    holder         |===============================================|
    this worker    |===========|<----------- fetchable ----------->|<-compute->

A worker that already takes part in its maximum number of transfers is passed over, in either role."""

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tokenbus.router.placement.policies import Fetchable, View
from tokenbus.router.placement.prefix_index import MatchLevel
from tokenbus.router.placement.worker_table import Floats, Rows

MIN_FETCH_TOKENS = 128
"""Fewer tokens are not worth a fetch."""
MAX_FETCH_COST = 0.5
"""Fetching must take less than this share of the time that computing takes."""
MAX_TRANSFERS = 2
"""The most transfers of a worker in each direction."""
_TRANSFER_TTL_S = 5.0
"""A transfer counts for at most this long."""
_PROBE_INTERVAL_S = 60.0
"""Where fetching seems too slow, one fetch is tried per interval: only fetches reveal how fast blocks move, and a
worker gives up after half the time that computing would take."""
_MIN_PREFILL_S = 1e-12
_NO_GROUP = -1


class HolderCandidate(NamedTuple):
    """The worker of a group that holds most of a prompt and can serve it."""

    row: int
    overlap_blocks: int


class FetchOffer(NamedTuple):
    """The tokens of one prompt that each candidate could fetch, and from where."""

    fetchable: Fetchable
    probed: Floats
    """Tokens that a candidate might fetch only to measure the rate."""
    groups: Rows
    """The group of each candidate."""
    holders: dict[int, HolderCandidate]

    @property
    def tokens(self) -> Floats:
        """The tokens that each candidate would fetch if it were chosen."""
        return np.maximum(self.fetchable.tokens, self.probed)

    def holder_for(self, candidate: int) -> HolderCandidate | None:
        """Returns the worker that a candidate should fetch from, if any."""
        if not self.tokens[candidate]:
            return None
        return self.holders[int(self.groups[candidate])]


class _Transfer(NamedTuple):
    until: float
    holder: int
    receiver: int


class FetchPlanner:
    """The groups of a model's workers that can read each other's blocks, by row, and the transfers between them."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        """The number of each group, by its KV identity."""
        self._members: dict[int, int] = {}
        """The rows of each group, one bit each."""
        self._token_bytes: dict[int, int] = {}
        self._group_of = np.full(1, _NO_GROUP)
        self._next_number = itertools.count()
        self._transfers: deque[_Transfer] = deque()
        self._given: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._probed_at = -math.inf
        self.is_possible = False
        """Whether any worker could fetch from another."""

    def __repr__(self) -> str:
        return f"<FetchPlanner {len(self._members)} groups, {len(self._transfers)} transfers>"

    def set_worker(self, row: int, identity: str, token_bytes: int) -> None:
        """Records what a worker's card says; without an identity it exchanges nothing."""
        while row >= len(self._group_of):
            self._group_of = np.concatenate([self._group_of, np.full_like(self._group_of, _NO_GROUP)])
        self._leave_group(row)
        if identity and token_bytes > 0:
            if identity not in self._numbers:
                self._numbers[identity] = next(self._next_number)
            group = self._numbers[identity]
            self._group_of[row] = group
            self._members[group] = self._members.get(group, 0) | 1 << row
            self._token_bytes[group] = token_bytes
        self._update_is_possible()

    def remove_worker(self, row: int) -> None:
        self._leave_group(row)
        self._update_is_possible()
        for transfer in [one for one in self._transfers if row in (one.holder, one.receiver)]:
            self._remove(transfer)

    def offer(
        self,
        levels: Sequence[MatchLevel],
        rows: Rows,
        view: View,
        prefill_s: Floats,
        mb_per_s: float,
        can_give: Callable[[int], bool],
        now: float,
    ) -> FetchOffer | None:
        """Returns what the candidates in `rows` could fetch, or None if there is nothing.

        `levels` says which workers hold how much of the prompt, `prefill_s` how long each row takes to compute a token
        (0 if unknown), and `can_give` whether a row's worker can be asked."""
        while self._transfers and self._transfers[0].until <= now:
            self._remove(self._transfers[0])
        holders = self._find_holders(levels, can_give)
        if not holders:
            return None
        groups: Rows = self._group_of[rows]
        held, move_s = np.zeros(len(rows)), np.zeros(len(rows))
        for group, holder in holders.items():
            mine = groups == group
            held[mine] = holder.overlap_blocks
            move_s[mine] = self._token_bytes[group] / max(mb_per_s, 1e-6) / 1e6
        extra = held * view.block_size - view.overlap_tokens
        extra[extra < MIN_FETCH_TOKENS] = 0.0
        for row, count in self._received.items():
            if count >= MAX_TRANSFERS:
                extra[rows == row] = 0.0
        cost = move_s / np.maximum(prefill_s[rows], _MIN_PREFILL_S)
        is_worth = cost < MAX_FETCH_COST
        fetchable = Fetchable(np.where(is_worth, extra, 0.0), cost)
        probed = extra if now - self._probed_at >= _PROBE_INTERVAL_S else np.zeros_like(extra)
        return FetchOffer(fetchable, probed, groups, holders) if extra.any() else None

    def givers_of(self, receiver: int, rows: Rows) -> Rows:
        """Filters rows to those whose blocks a worker can read."""
        group = self._group_of[receiver]
        givers: Rows = rows[(self._group_of[rows] == group) & (group != _NO_GROUP) & (rows != receiver)]
        return givers

    def move_s(self, row: int, num_tokens: float, mb_per_s: float) -> float:
        """Returns the time it takes to move that many tokens of a row."""
        return num_tokens * self._token_bytes[int(self._group_of[row])] / max(mb_per_s, 1e-6) / 1e6

    def begin(self, holder: int, receiver: int, now: float) -> None:
        """Records that one worker is about to fetch from another."""
        self._probed_at = now  # any fetch reveals how fast blocks move
        self._transfers.append(_Transfer(now + _TRANSFER_TTL_S, holder, receiver))
        self._given[holder] += 1
        self._received[receiver] += 1

    def end(self, holder: int, receiver: int) -> None:
        """Records that a fetch has ended, whichever router requested it."""
        found = next((one for one in self._transfers if (one.holder, one.receiver) == (holder, receiver)), None)
        if found is not None:
            self._remove(found)

    def check_integrity(self) -> None:
        for group, bits in self._members.items():
            rows = (self._group_of == group).nonzero()[0].tolist()
            assert bits == sum(1 << row for row in rows) != 0, self
        assert self._numbers.keys() == {name for name, group in self._numbers.items() if group in self._members}
        assert self._given == Counter(one.holder for one in self._transfers)
        assert self._received == Counter(one.receiver for one in self._transfers)

    def _find_holders(
        self, levels: Sequence[MatchLevel], can_give: Callable[[int], bool]
    ) -> dict[int, HolderCandidate]:
        """Returns the holder of each group that has one."""
        holders: dict[int, HolderCandidate] = {}
        for group, members in self._members.items():
            for level in levels:
                row = self._find_giver(level.worker_bits & members, can_give)
                if row is not None:
                    holders[group] = HolderCandidate(row, level.overlap_blocks)
                    break
        return holders

    def _find_giver(self, bits: int, can_give: Callable[[int], bool]) -> int | None:
        while bits:
            lowest = bits & -bits
            row = lowest.bit_length() - 1
            if self._given[row] < MAX_TRANSFERS and can_give(row):
                return row
            bits ^= lowest
        return None

    def _leave_group(self, row: int) -> None:
        group = int(self._group_of[row])
        if group == _NO_GROUP:
            return
        self._group_of[row] = _NO_GROUP
        self._members[group] ^= 1 << row
        if not self._members[group]:
            del self._members[group], self._token_bytes[group]
            self._numbers = {name: number for name, number in self._numbers.items() if number != group}

    def _update_is_possible(self) -> None:
        self.is_possible = any(bits & (bits - 1) for bits in self._members.values())  # two bits or more

    def _remove(self, transfer: _Transfer) -> None:
        self._transfers.remove(transfer)
        self._given -= Counter([transfer.holder])
        self._received -= Counter([transfer.receiver])
