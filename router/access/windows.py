"""The share that one router has of a limit per minute or per day, and how routers divide such a limit.

Time is cut into windows by the broker's clock. What a limit allows in one window is taken from a record that all
routers share, a part at a time, before it is needed:

    record    taken  ###########################........    capacity
    router    granted  |########|   spent  |#####---|        rest = granted - spent

The capacity is the whole limit, and each window takes its part of a minute off the record again: a client that was
quiet may use up a minute's limit at once, and then as much as passes. A day's limit is taken off when the day ends.
Without the record, a router does not know what others have let through, and gives only what passes, unless it is alone.

A request is let through while there is a rest, however much it costs: what it costs beyond that is reported with the
next lease, and counts against this window and, if it must, later ones. So routers together exceed a limit by at most
one request each, and one that is larger than a window is delayed, never locked out.

Each lease has a number, and a record the last number of each router: if the answer to a put is lost, its lease is found
in the record instead of being taken again."""

import math
from typing import Annotated, Any, NamedTuple

import msgspec

WINDOW_S = 4.0
"""Short, so that a client which uses up its window at once waits for less than five seconds."""
DAY_S = 86_400.0
_MINUTE_S = 60.0
_PARTS = 4
"""A lease is this part of a router's even share of what a window adds."""
_DAY_PARTS = 256
"""A lease is at most this part of a day's limit: a router that is killed has spent it in vain."""
_FEW = 4
"""If a lease is for fewer requests, the next one is not asked for ahead: it would often be lost with its window."""
_MAX_LEASES = 64
_PENDING_S = 1.0
"""A day's limit that only the charges of open requests have used up may have room again when one of them ends."""
_RESERVED_S = 1.0
_LEAST_WAIT_S = 0.001


Amount = Annotated[float, msgspec.Meta(ge=0.0, le=2.0**60)]
"""An amount in a record. What is none, such as NaN, makes the record count as damaged."""


class WindowLease(msgspec.Struct, frozen=True, array_like=True):
    """The last lease of a router in a record."""

    number: int
    excess: Amount
    """The amount that the router had spent beyond its earlier leases."""
    granted: Amount
    """The amount that it got in addition."""
    window: int


class Record(msgspec.Struct, frozen=True):
    """The part of one limit that routers have taken, as they share it."""

    window: int
    taken: Amount
    leases: dict[str, WindowLease] = {}
    """The last lease of each router, by its name."""


class Leased(NamedTuple):
    record: Record
    lease: WindowLease
    is_new: bool
    """Whether the record has to be stored; otherwise an earlier put had succeeded."""


class WindowShare:
    """One router's share of one limit. Unix times `now` are the broker's."""

    __slots__ = (
        "asked_at",
        "begins_at",
        "capacity",
        "ends_at",
        "granted",
        "grown_at",
        "growth_per_s",
        "is_full",
        "is_shared_out",
        "leased",
        "limit",
        "mean_charge",
        "number",
        "over",
        "part",
        "passing",
        "pending",
        "refill",
        "seconds",
        "spent",
        "stale_at",
        "taken",
        "window",
    )

    def __init__(self, limit: float, seconds: float) -> None:
        self.seconds = seconds
        self.limit = self.capacity = self.refill = 0.0
        self.window = -1
        self.begins_at = self.ends_at = 0.0
        """Unix times of the window's beginning and end."""
        self.granted = 0.0
        self.leased = 0.0
        """The part of it that is in the record."""
        self.spent = 0.0
        self.pending = 0.0
        """The part of it, or of earlier windows, that open requests were charged with: they may have used less."""
        self.taken = 0.0
        """The amount that all routers have taken of this window, as far as this one knows."""
        self.over = 0.0
        """The part of it that was beyond the limit when the window began, and is repaid in it."""
        self.stale_at = 0.0 if seconds == DAY_S else math.inf
        """When the record of a day is read again, to tell clients what other routers have left: leases can be hours
        apart."""
        self.is_full = False
        """Whether nothing more can be taken of this window."""
        self.is_shared_out = False
        """Whether this router has its even share of this window, because there is no record."""
        self.passing = 0.0
        """Such a share has this added with each window."""
        self.growth_per_s = 0.0
        """The amount that is added to such a share of a day while the record can't be reached."""
        self.grown_at = 0.0
        self.mean_charge = 1.0
        self.part = 0.0
        """The amount of the last lease."""
        self.number = 0
        self.asked_at: float | None = None
        """When a lease was asked for that has not been answered."""
        self.set_limit(limit)

    def __repr__(self) -> str:
        return f"<WindowShare {self.spent:g} of {self.granted:g} in window {self.window}, {self.capacity:g} in all>"

    def set_limit(self, limit: float) -> None:
        """Changes the limit, from now on and not only from the next window on, which may begin tomorrow. What is left
        of a share of a higher limit is given up; what was spent counts."""
        if limit == self.limit:
            return
        if self.is_shared_out:
            self.granted, self.is_shared_out = self.leased, False
        elif limit < self.limit:
            self.granted = min(self.granted, self.spent)
        self.is_full = False
        self.limit = limit
        self.capacity = limit
        """The amount that can be taken at once."""
        self.refill = limit if self.seconds == DAY_S else limit * self.seconds / _MINUTE_S
        """The amount that may be taken again with each window."""

    @property
    def rest(self) -> float:
        return self.granted - self.spent

    @property
    def needs_lease(self) -> bool:
        """Whether there is so little left that the router may lease more."""
        return not self.is_full and not self.is_shared_out and self.rest <= self.part / 2

    @property
    def needs_lease_ahead(self) -> bool:
        """Whether a lease should be asked for, so that it is there before it is needed."""
        return self.needs_lease and self.part >= _FEW * self.mean_charge

    @property
    def is_reserved(self) -> bool:
        """Whether the rest of this window is left to routers that take even shares."""
        return self.is_full and not self.is_shared_out and self.taken < self.capacity

    def observe(self, record: Record | None, now: float) -> None:
        """Notes what all routers have taken."""
        if self.seconds == DAY_S:
            self.stale_at = now + WINDOW_S
        if record is not None and record.window == self.window:
            self.taken = max(self.taken, record.taken)

    def roll(self, now: float) -> None:
        """Begins another window if it is time. A rest is lost; what was spent beyond it is not forgiven, and neither is
        anything by a clock that was set back."""
        if self.begins_at <= now < self.ends_at:
            return
        window = int(now // self.seconds)
        self.begins_at, self.ends_at = window * self.seconds, (window + 1) * self.seconds
        self.over = max(0.0, self.taken - self.capacity) if window == self.window + 1 else 0.0
        covered = self.granted
        if self.is_shared_out and self.seconds != DAY_S:
            covered = self.leased + self.passing * max(1, window - self.window)
        excess = max(0.0, self.spent - covered)
        self.granted, self.leased, self.spent, self.taken = 0.0, 0.0, excess, 0.0
        self.window, self.is_full, self.is_shared_out = window, False, False

    def charge(self, amount: float) -> None:
        """Spends an amount, which may exceed the rest."""
        self.spent += amount
        self.mean_charge += 0.1 * (amount - self.mean_charge)

    def settle(self, amount: float) -> None:
        """Corrects an earlier charge, perhaps one of an earlier window, by an amount that may be negative."""
        self.spent += amount

    def wait_s(self, now: float) -> float:
        """Returns the time until there may be a rest again, if this window is full."""
        if self.seconds == DAY_S and self.spent - self.pending < self.granted:
            return max(_LEAST_WAIT_S, min(self.ends_at - now, _PENDING_S))
        if self.is_reserved:
            return max(_LEAST_WAIT_S, min(self.ends_at - now, _RESERVED_S))
        if self.is_shared_out and self.growth_per_s:
            grown_s = (self.spent - self.granted) / self.growth_per_s
            return max(_LEAST_WAIT_S, min(self.ends_at - now, max(1.0, grown_s)))
        unit = self.passing if self.is_shared_out else self.refill
        excess = max(0.0, self.taken - self.capacity) + max(0.0, self.spent - self.granted)
        return max(_LEAST_WAIT_S, (self.window + 1 + math.floor(excess / unit)) * self.seconds - now)

    def share_out(self, num_routers: int, now: float, *, is_outage: bool = False, is_alone: bool = False) -> None:
        """Takes this router's even share of what the window adds, where routers have no record, or all that it has not
        spent of the limit if no other router can have taken any (`is_alone`).

        If there is a record that can't be reached (`is_outage`), others may have taken more of a day than this router
        knows: its share is then a lease's, and grows with `tick` by as much of the day as passes."""
        if self.seconds == DAY_S:
            self.stale_at = now + WINDOW_S
        if self.is_shared_out:
            return
        self.passing = self.refill / max(1, num_routers)
        left = max(0.0, self.capacity - self.taken)
        share = left if is_alone else min(left / max(1, num_routers), self.passing)
        if self.seconds != DAY_S:
            share = max(0.0, share - self.over / max(1, num_routers))
        self.growth_per_s = 0.0
        if is_outage and self.seconds == DAY_S:
            self.growth_per_s, self.grown_at = self.capacity / DAY_S / max(1, num_routers), now
            share = min(share, self.capacity / _DAY_PARTS / max(1, num_routers))
        self.granted += share
        self.is_shared_out = self.is_full = True

    def tick(self, num_routers: int, now: float) -> None:
        """Lets a window be leased again that was only full because of routers that take even shares: they may lease by
        now. Adds the time that has passed to a share that grows, up to the even share of what is known to be left."""
        if self.is_reserved:
            self.is_full = False
        if self.is_shared_out and self.growth_per_s:
            most = self.leased + max(0.0, self.capacity - self.taken) / max(1, num_routers)
            grown = self.granted + self.growth_per_s * (now - self.grown_at)
            self.granted, self.grown_at = max(self.granted, min(most, grown)), now

    def end_shares(self, shortest_s: float) -> None:
        """Leases again within a window that is longer than `shortest_s`: what was spent of a share is then reported
        as what was spent in excess."""
        if self.is_shared_out and self.seconds > shortest_s:
            self.granted, self.is_shared_out, self.is_full = self.leased, False, False

    def lease(
        self, record: Record | None, router: str, num_routers: int, num_sharing: int = 0, known_from: int = 0
    ) -> Leased | None:
        """Returns the record with another lease of this router, which is to be stored in place of the given one; None
        if other routers are in the next window already, as this one soon will be. `num_sharing` of the routers take
        even shares instead, which are left to them; before the window `known_from` all did."""
        if record is not None and record.window == self.window + 1:
            return None
        shared = 0.0 if self.seconds == DAY_S else self.refill * num_sharing / max(1, num_routers)
        found = self.current(record, self.refill - shared, known_from)
        if (last := found.leases.get(router)) is not None and last.number == self.number:
            return Leased(found, last, is_new=False)
        excess = max(0.0, self.spent - self.granted)
        taken = found.taken + excess
        part = self.refill / (_PARTS * max(1, num_routers))
        if self.seconds == DAY_S:
            part = min(part, self.capacity / _DAY_PARTS)
            shared = self.capacity * num_sharing / max(1, num_routers)
        part = max(part, 1.0, self.mean_charge)
        grant = min(max(0.0, self.capacity - shared - taken), part)
        lease = WindowLease(self.number, excess, grant, self.window)
        leases = {name: one for name, one in found.leases.items() if one.window >= self.window - 1 and name != router}
        while len(leases) >= _MAX_LEASES:
            del leases[next(iter(leases))]
        return Leased(Record(self.window, taken + grant, {**leases, router: lease}), lease, is_new=True)

    def current(self, record: Record | None, refill: float, known_from: int) -> Record:
        """Returns the record as of this window: each window since has added `refill`. What routers took before the
        window `known_from` is not in it, and may have been all that those windows added."""
        if self.seconds != DAY_S and known_from > (-1 if record is None else record.window):
            taken = self.capacity if record is None else record.taken
            left = max(0.0, taken - (self.window - known_from + 1) * refill)
            return Record(self.window, max(left, self.taken), {} if record is None else record.leases)
        if record is None:
            return Record(self.window, self.taken)
        passed = self.window - record.window
        if passed <= 0:  # the same one, or one of a clock that was set back since
            return Record(self.window, max(record.taken, self.taken if passed == 0 else 0.0), record.leases)
        return Record(self.window, max(0.0, record.taken - passed * refill), record.leases)

    def corrected(self, record: Record | None) -> Record | None:
        """Returns the record with what this router knows to be taken of a day, if it says less; None if it says enough.
        Of a new bucket, a router that stood still when the one before was lost would lease the difference again."""
        if self.seconds != DAY_S or not self.taken:
            return None
        if record is not None and (record.window != self.window or record.taken >= self.taken):
            return None
        return Record(self.window, self.taken, {} if record is None else record.leases)

    def drop_share(self) -> None:
        """Gives up what is left of an even share: others may have taken it since this router was last heard of."""
        if self.is_shared_out:
            self.granted = min(self.granted, max(self.spent, self.leased))

    def take(self, leased: Leased) -> None:
        """Takes a lease that is stored. One for an earlier window has come too late: only its excess counts."""
        self.number += 1
        lease = leased.lease
        self.part = lease.granted
        if lease.window == self.window:
            self.taken = max(self.taken, leased.record.taken)
            self.granted += lease.excess + lease.granted
            self.leased += lease.excess + lease.granted
            self.is_full = lease.granted <= 0.0
        else:
            self.spent -= lease.excess

    @property
    def remaining(self) -> int:
        """The amount left of this window, as far as this router knows."""
        left = self.granted - self.spent
        if not self.is_shared_out:
            left += max(0.0, self.capacity - self.taken)
        return int(max(0.0, min(left, self.capacity)))

    def reset_s(self, now: float) -> float:
        """Returns the time until more becomes available."""
        return self.wait_s(now) if self.is_full else max(0.0, self.ends_at - now)


def decoded(decoder: "msgspec.msgpack.Decoder[Any]", value: bytes | None) -> Any:
    """Decodes a record; one that can't be read counts as none, and is replaced."""
    if value is None:
        return None
    try:
        return decoder.decode(value)
    except (msgspec.MsgspecError, ValueError):
        return None
