"""The ledger of a KV pool: how many bytes of one budget each replica of a process may hold (decision 0025).

    budget
    |-- fixed --|---------- replica A holds ----------|-- B holds --|-- free --|
                |------ used ------|----- idle -------|

A replica holds whole lanes, each with room for one sequence of any length. Its demand is the lanes of its running
sequences and those that it wants for waiting ones. Idle lanes carry cached prefixes and are not part of it.

While all demands fit, each is met, and what is left stays where it is. When they don't fit, lanes are dealt out: first
one to every replica that has any demand, which is its minimum, since no request needs more than a lane; then each
further one to the replica that has the fewest bytes with it. That is what a replica is *entitled* to. None then grows
beyond it, and those that hold more give lanes back at their next step, idle ones first. A budget covers the minima of
all its replicas, or the last one is refused; so a replica that wakes waits for at most one step of the others.

Memory that can't be lent is *fixed*: it counts in full from the moment it is reserved.
"""

import dataclasses
import functools
import heapq
from collections.abc import Mapping
from typing import NamedTuple


class OvercommitError(ValueError):
    """The budget is too small for one more replica. The message says which replicas use it."""


class KvUsage(NamedTuple):
    """One replica's part of a pool."""

    budget_bytes: int
    held_bytes: int
    share_bytes: int
    """The bytes that it would hold if every replica wanted as much as it can get; anything beyond that is borrowed."""
    cap_bytes: int
    """The most bytes that it may ever hold."""
    attainable_lanes: int
    """The lanes that it would get now if it asked for as many as it can use."""


@dataclasses.dataclass
class _Borrower:
    """A replica whose lanes are lent and reclaimed. Lanes are as last reported."""

    name: str
    lane_bytes: int
    max_lanes: int
    held: int = 0
    """Lanes that it may use, or has not given back yet."""
    used: int = 0
    idle: int = 0
    wanted: int = 0
    is_woken: bool = False
    """Whether it has been told to ask again and has not done so yet."""

    @property
    def demand(self) -> int:
        return min(self.max_lanes, self.used + self.wanted)

    @property
    def held_bytes(self) -> int:
        return self.held * self.lane_bytes


class KvLedger:
    """Replicas are known by the numbers that `join` and `reserve` return."""

    def __init__(self, budget_bytes: int) -> None:
        assert budget_bytes > 0, budget_bytes
        self.budget_bytes = budget_bytes
        self._borrowers: dict[int, _Borrower] = {}
        self._fixed: dict[int, tuple[str, int]] = {}
        """Names and bytes."""
        self._last_number = 0

    def __repr__(self) -> str:
        return f"<KvLedger {self.held_bytes} of {self.budget_bytes} bytes, {list(self._borrowers.values())}>"

    @property
    def held_bytes(self) -> int:
        """The bytes held or reserved; they exceed the budget only until others have given lanes back."""
        return self._fixed_bytes + sum(one.held_bytes for one in self._borrowers.values())

    @property
    def is_overdrawn(self) -> bool:
        """Whether reserved memory is still held by others."""
        return self.held_bytes > self.budget_bytes

    def join(self, name: str, lane_bytes: int, max_lanes: int) -> int:
        """Adds a replica whose lanes can be lent; it holds none yet. Raises OvercommitError."""
        assert lane_bytes > 0, lane_bytes
        assert max_lanes > 0, max_lanes
        self._require_room(name, lane_bytes)
        self._last_number += 1
        self._borrowers[self._last_number] = _Borrower(name, lane_bytes, max_lanes)
        return self._last_number

    def reserve(self, name: str, num_bytes: int) -> int:
        """Adds a replica with fixed memory, which is available once the ledger is no longer overdrawn. Raises
        OvercommitError."""
        self._require_room(name, num_bytes)
        self._last_number += 1
        self._fixed[self._last_number] = (name, num_bytes)
        return self._last_number

    def resize(self, number: int, num_bytes: int) -> None:
        """Corrects a replica's reservation to what it has actually taken."""
        self._fixed[number] = (self._fixed[number][0], num_bytes)

    def leave(self, number: int) -> None:
        """Removes a replica and frees its memory."""
        self._fixed.pop(number, None)
        self._borrowers.pop(number, None)

    def request(self, number: int, used: int, idle: int, wanted: int) -> int:
        """Notes a replica's lanes and how many more it wants; returns how many it may hold until it asks again.

        If these are fewer than it holds, it empties the others and reports that with `give_back`."""
        one = self._borrowers[number]
        one.used, one.idle, one.wanted, one.is_woken = used, idle, wanted, False
        allowed = self._allowed()[number]
        one.held = max(one.held, allowed)
        return allowed

    def give_back(self, number: int, lanes: int) -> None:
        """Notes that a replica holds only this many lanes, and that its other lanes' memory is free."""
        one = self._borrowers[number]
        assert lanes <= one.held, (lanes, one)
        one.held = lanes

    def take_woken(self, caller: int) -> list[int]:
        """Returns the replicas, other than the caller, that should ask again: they may now hold more lanes, or have to
        give some back. Each is returned only once until it has asked."""
        woken = []
        for number, allowed in self._allowed().items():
            one = self._borrowers[number]
            if number != caller and allowed != one.held and not one.is_woken:
                one.is_woken = True
                woken.append(number)
        return woken

    def usage(self, number: int) -> KvUsage:
        one = self._borrowers[number]
        caps = {other: each.max_lanes for other, each in self._borrowers.items()}
        return KvUsage(
            self.budget_bytes,
            one.held_bytes,
            self._dealt(caps)[number] * one.lane_bytes,
            one.max_lanes * one.lane_bytes,
            self._dealt(self._demands() | {number: one.max_lanes})[number],
        )

    def check(self) -> None:
        """Asserts what holds between any two calls."""
        entitled = self._dealt(self._demands())
        assert self._fixed_bytes + self._minima_bytes <= self.budget_bytes, self
        assert sum(lanes * self._borrowers[one].lane_bytes for one, lanes in entitled.items()) <= self._lendable_bytes
        for number, one in self._borrowers.items():
            assert 0 <= one.held <= one.max_lanes, one
            assert min(1, one.demand) <= entitled[number] <= one.demand, one

    @property
    def _fixed_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self._fixed.values())

    @property
    def _minima_bytes(self) -> int:
        return sum(one.lane_bytes for one in self._borrowers.values())

    @property
    def _lendable_bytes(self) -> int:
        return self.budget_bytes - self._fixed_bytes

    def _require_room(self, name: str, num_bytes: int) -> None:
        """Raises OvercommitError unless there is room beside the minima of all others."""
        left = self._lendable_bytes - self._minima_bytes
        if num_bytes <= left:
            return
        kept = [(one.name, one.lane_bytes) for one in self._borrowers.values()] + list(self._fixed.values())
        others = ", ".join(f"{other} {amount}" for other, amount in kept)
        raise OvercommitError(
            f"--kv-budget leaves {max(0, left)} of {self.budget_bytes} bytes for {name}, which needs {num_bytes}"
            + (f"; the others keep at least: {others}" if others else "")
            + ": raise it, pass a smaller --context-length, or unload another model"
        )

    def _demands(self) -> dict[int, int]:
        return {number: one.demand for number, one in self._borrowers.items()}

    def _dealt(self, demands: Mapping[int, int]) -> dict[int, int]:
        """Returns the lanes that each replica is entitled to, given these demands."""
        lane_bytes = tuple(one.lane_bytes for one in self._borrowers.values())
        lanes = _deal(self._lendable_bytes, lane_bytes, tuple(demands[number] for number in self._borrowers))
        return dict(zip(self._borrowers, lanes, strict=True))

    def _allowed(self) -> dict[int, int]:
        """Returns the lanes that each replica may hold: those that it is entitled to, and any that no replica
        claims."""
        entitled = self._dealt(self._demands())
        free = max(0, self.budget_bytes - self.held_bytes)
        claims = {number: max(one.held, entitled[number]) * one.lane_bytes for number, one in self._borrowers.items()}
        unclaimed = self._lendable_bytes - sum(claims.values())
        allowed = {}
        for number, one in self._borrowers.items():
            asked = min(one.max_lanes, one.used + one.idle + one.wanted)
            # regardless of its entitlement, it grows only by what is free now
            within_reach = one.held + free // one.lane_bytes
            granted = max(entitled[number], (unclaimed + claims[number]) // one.lane_bytes)
            allowed[number] = min(asked, within_reach, granted)
        return allowed


@functools.lru_cache(maxsize=256)  # most steps change no demand
def _deal(num_bytes: int, lane_bytes: tuple[int, ...], demands: tuple[int, ...]) -> tuple[int, ...]:
    """Deals out lanes to replicas, each with its lane size and its demand."""
    if sum(size * demand for size, demand in zip(lane_bytes, demands, strict=True)) <= num_bytes:
        return demands
    dealt = [min(1, demand) for demand in demands]
    left = num_bytes - sum(size * lanes for size, lanes in zip(lane_bytes, dealt, strict=True))
    waiting = [(2 * lane_bytes[place], place) for place, demand in enumerate(demands) if demand > 1]
    heapq.heapify(waiting)
    while waiting:
        with_next, place = heapq.heappop(waiting)
        if lane_bytes[place] > left:
            continue
        left -= lane_bytes[place]
        dealt[place] += 1
        if dealt[place] < demands[place]:
            heapq.heappush(waiting, (with_next + lane_bytes[place], place))
    return tuple(dealt)
