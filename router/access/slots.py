"""A router's part of a limit of requests that are open at the same time, and how routers divide such a limit.

A router holds as many slots as it has open requests, and a few more, for a few seconds at a time. It renews them while
it runs; the slots of one that is gone are free once they expire."""

from typing import NamedTuple

import msgspec

LEASE_S = 5.0
RENEW_S = 1.5
_PARTS = 4


class Held(msgspec.Struct, frozen=True, array_like=True):
    """The slots of one router."""

    slots: int
    until: float
    """Unix time of the broker."""


class SlotRecord(msgspec.Struct, frozen=True):
    """All slots that are held, by router."""

    held: dict[str, Held] = {}


class Slots(NamedTuple):
    record: SlotRecord
    held: Held


class SlotShare:
    """The slots of one router under one limit."""

    __slots__ = ("asked_at", "held", "is_full", "limit", "num_open", "until")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_open = 0
        self.held = 0
        self.until = 0.0
        """When what is held expires, by the broker's clock."""
        self.is_full = False
        """Whether other routers hold the rest, as far as this one knows."""
        self.asked_at: float | None = None

    def __repr__(self) -> str:
        return f"<SlotShare {self.num_open} of {self.held}, {self.limit} in all>"

    def expire(self, now: float) -> None:
        if now >= self.until:
            self.held, self.is_full = 0, False

    @property
    def has_room(self) -> bool:
        return self.num_open < self.held

    def is_due(self, now: float) -> bool:
        """Whether the slots have to be renewed, or given back."""
        return (self.num_open > 0 or self.held > 0) and now >= self.until - LEASE_S + RENEW_S

    def share_out(self, num_routers: int, now: float) -> None:
        """Takes this router's even share, where routers have no record."""
        self.held, self.until, self.is_full = max(1, self.limit // max(1, num_routers)), now + LEASE_S, True

    def lease(self, record: SlotRecord | None, router: str, num_routers: int, now: float) -> Slots:
        """Returns the record with this router's slots: those that it needs, and some for the next requests."""
        others = {} if record is None else {name: one for name, one in record.held.items() if name != router}
        others = {name: one for name, one in others.items() if now < one.until <= now + 2 * LEASE_S}
        free = self.limit - sum(one.slots for one in others.values())
        spare = max(1, self.limit // (_PARTS * max(1, num_routers)))
        wanted = self.num_open + spare if self.num_open or self.asked_at is not None else 0
        # requests that run can't be undone, if their slots have expired meanwhile
        held = Held(max(self.num_open, min(free, wanted)), now + LEASE_S)
        return Slots(SlotRecord({**others, router: held} if held.slots else others), held)

    def take(self, slots: Slots) -> None:
        """Takes slots that are stored."""
        self.held, self.until = slots.held.slots, slots.held.until
        self.is_full = self.held <= self.num_open
