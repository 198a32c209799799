"""A router's part of a limit of requests that are open at the same time, and how routers divide such a limit.

A router holds as many slots as it has open requests, and a few more if the limit is large, for a few seconds at a time.
It renews them while it runs; the slots of one that is gone are free once they expire. Of a small limit, a slot that is
no longer used is given back at once: held idle, it would keep other routers from taking the client's next request."""

from typing import Annotated, NamedTuple

import msgspec

LEASE_S = 5.0
RENEW_S = 1.5
_PARTS = 4
_PATIENCE_S = 0.06
"""A request waits this long for a slot that another router gives back, since a client's next request can be faster than
the news that the one before it has ended."""
_FULL_S = 0.1
"""Requests are refused for this time without another look at what others hold."""


class Held(msgspec.Struct, frozen=True, array_like=True):
    """The slots of one router."""

    slots: Annotated[int, msgspec.Meta(ge=0)]
    until: float
    """Unix time of the broker."""


class SlotRecord(msgspec.Struct, frozen=True):
    """All slots that are held, by router."""

    held: dict[str, Held] = {}


class Slots(NamedTuple):
    record: SlotRecord
    held: Held
    is_answer: bool
    """Whether a request was waiting for them."""


class SlotShare:
    """The slots of one router under one limit."""

    __slots__ = (
        "_full_since",
        "_spare",
        "asked_at",
        "full_until",
        "has_ended",
        "held",
        "is_needed",
        "limit",
        "num_open",
        "until",
    )

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_open = 0
        self.held = 0
        self.until = 0.0
        """When what is held expires, by the broker's clock."""
        self.full_until = 0.0
        """Until when this router knows that others hold the rest: they give slots back at any time."""
        self.is_needed = False
        """Whether a request waits for a slot."""
        self.asked_at: float | None = None
        self.has_ended = False
        """Whether a request has ended whose slot is to be given back, while a lease was being asked for."""
        self._full_since: float | None = None
        self._spare = 0

    def __repr__(self) -> str:
        return f"<SlotShare {self.num_open} of {self.held}, {self.limit} in all>"

    def set_limit(self, limit: int) -> None:
        """Changes the limit. Slots that are held beside those in use are given up, since there may be fewer now."""
        if limit != self.limit:
            self.limit, self.full_until, self._spare = limit, 0.0, min(self._spare, limit)
            self.held = min(self.held, self.num_open)

    def expire(self, now: float) -> None:
        if now >= self.until:
            self.held = 0

    @property
    def has_room(self) -> bool:
        return self.num_open < self.held

    @property
    def needs_lease(self) -> bool:
        """Whether slots for the next requests are to be held, and are all used."""
        return self._spare > 0 and not self.has_room

    @property
    def is_idle(self) -> bool:
        """Whether there is a slot to give back at once."""
        return self._spare == 0 and self.held > self.num_open and not self.is_needed

    def is_due(self, now: float) -> bool:
        """Whether the slots have to be renewed, or given back."""
        return (self.num_open > 0 or self.held > 0) and now >= self.until - LEASE_S + RENEW_S

    def share_out(self, num_routers: int, now: float) -> None:
        """Takes this router's even share, where routers have no record."""
        self.held, self.until, self.is_needed = max(1, self.limit // max(1, num_routers)), now + LEASE_S, False
        self._spare, self.full_until = self.limit, self.until

    def lease(self, record: SlotRecord | None, router: str, num_routers: int, now: float) -> Slots:
        """Returns the record with this router's slots: those that it needs, and of a large limit some for the next
        requests."""
        others = {} if record is None else {name: one for name, one in record.held.items() if name != router}
        others = {name: one for name, one in others.items() if now < one.until <= now + 2 * LEASE_S}
        free = self.limit - sum(one.slots for one in others.values())
        self._spare = self.limit // (_PARTS * max(1, num_routers))
        more = max(self._spare, int(self.is_needed))
        wanted = self.num_open + more if self.num_open or self.is_needed else 0
        # requests that run can't be undone, if their slots have expired meanwhile
        held = Held(max(self.num_open, min(free, wanted)), now + LEASE_S)
        self.held = min(self.held, held.slots)  # no request takes what is being given back
        return Slots(SlotRecord({**others, router: held} if held.slots else others), held, self.is_needed)

    def take(self, slots: Slots, now: float) -> None:
        """Takes slots that are stored."""
        self.held, self.until = slots.held.slots, slots.held.until
        if not slots.is_answer:
            return
        self.is_needed, self.full_until = False, 0.0
        if self.has_room:
            self._full_since = None
        elif self._full_since is None or now - self._full_since > 10 * _PATIENCE_S:
            self._full_since = now
        elif now - self._full_since >= _PATIENCE_S:
            self._full_since, self.full_until = None, now + _FULL_S
