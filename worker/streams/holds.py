"""Decides which streams are held, and for how long (decision 0012).

A stream is *held* while what is published might not reach its client, or might reach it beside what another worker
publishes. Its engine continues, but nothing leaves except probes, one a second: empty chunks, whose notices can be told
from others. There are two causes:

- The broker reports that a chunk has found no subscriber. The client is reconnecting, or gone, or a link between
  brokers is down.
- The guardian is a router beyond such a link, and does not confirm any more that it has not given the stream to
  another worker (`router_reach.py`).

    flowing ── no subscriber, or a silent guardian ──▶ held ── out of patience ──▶ given up
       ▲                                                │
       └── a probe has found a subscriber, and ─────────┘
           the guardian has answered afterwards

When a stream flows again, what the client lacks is published: its cursor was moved back to the first chunk that found
no subscriber."""

from collections.abc import Iterator
from typing import NamedTuple

MAX_HELD_TOKENS = 4_096
"""A stream that grows by more while it is held is given up."""
PROBE_INTERVAL_S = 1.0
_FIRST_PROBE_INTERVAL_S = 0.25
_FIRST_PROBES_S = 2.0
"""For this long, probes come more often: most clients only reconnect."""
RECONNECT_GRACE_S = 10.0
"""For this long after the frontend's own reconnect no client is given up, since clients are reconnecting too."""


class Patience(NamedTuple):
    """The times after which a held stream is given up, in seconds."""

    gone_after_s: float = 2.0
    """If its client has no subscription, and no link seems to be down. Longer than a client takes to reconnect."""
    link_patience_s: float = 60.0
    """If a link may be down. Also the most that all holds of one stream may take together, until it has flowed for as
    long: an inbox that answers probes and reads nothing can't have a stream published again for ever."""


class Hold:
    """One stream that is held. Times are seconds of `protocol.bus.bus.lease_time`."""

    __slots__ = ("away_since", "begun_tokens", "is_blind", "probe_due_at", "probed_at", "reached_at", "since")

    def __init__(self, since: float, num_tokens: int, *, is_blind: bool) -> None:
        self.since = self.away_since = since
        self.is_blind = is_blind
        """Whether its client gets one message: there is nothing to probe with, and that is published again instead."""
        self.begun_tokens = num_tokens
        self.probe_due_at = since + PROBE_INTERVAL_S if is_blind else since
        self.probed_at: float | None = None
        """When the probe was sent of which nothing is known yet."""
        self.reached_at: float | None = None
        """When the first of those probes was sent that have found a subscriber since the last that did not."""

    def __repr__(self) -> str:
        return f"<Hold since {self.since:.1f}, {'reached' if self.reached_at else 'away'}>"

    def doubt(self, now: float) -> None:
        """Notes that the guardian is in doubt: it has to confirm the stream in answer to a later check. What probes
        have found out about the client stays true, as of now."""
        self.probed_at = None if self.probed_at is None else now
        self.reached_at = None if self.reached_at is None else now


class _Spent(NamedTuple):
    """The sum of all earlier holds of a stream."""

    seconds: float
    tokens: int
    released_at: float


class Holds:
    """The held streams of one worker, by request key."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self._holds: dict[str, Hold] = {}
        self._spent: dict[str, _Spent] = {}
        self._keep_until = 0.0

    def __repr__(self) -> str:
        return f"<Holds {len(self._holds)}>"

    def __len__(self) -> int:
        return len(self._holds)

    def find(self, key: str) -> Hold | None:
        return self._holds.get(key)

    def __iter__(self) -> Iterator[str]:
        """Yields the keys of the streams that are held when it is called."""
        return iter(list(self._holds))

    def hold(self, key: str, num_tokens: int, now: float, *, is_blind: bool = False) -> Hold:
        """Holds a stream that has `num_tokens`."""
        if (known := self._holds.get(key)) is not None:
            return known
        new = self._holds[key] = Hold(now, num_tokens, is_blind=is_blind)
        return new

    def due_probes(self, now: float) -> list[str]:
        """Returns the streams to probe now; those that can't be probed count as reached."""
        due = [(key, hold) for key, hold in self._holds.items() if hold.probed_at is None and now >= hold.probe_due_at]
        for _, hold in due:
            if hold.is_blind:
                hold.reached_at = hold.reached_at or now
        return [key for key, hold in due if not hold.is_blind]

    def probed(self, key: str, now: float) -> None:
        """Notes that a probe has been sent."""
        hold = self._holds[key]
        is_new = now - hold.since < _FIRST_PROBES_S
        hold.probed_at = now
        hold.probe_due_at = now + (_FIRST_PROBE_INTERVAL_S if is_new else PROBE_INTERVAL_S)

    def missed(self, key: str) -> None:
        """Handles the notice for a probe: the client has no subscription."""
        if (hold := self._holds.get(key)) is not None:
            hold.probed_at = hold.reached_at = None

    def confirmed(self, at: float) -> None:
        """Notes that everything published before this time has reached the broker, whose notices have all arrived."""
        for hold in self._holds.values():
            if hold.probed_at is not None and hold.probed_at <= at:
                hold.reached_at = hold.reached_at or hold.probed_at
                hold.probed_at = None

    def is_over(self, key: str, num_tokens: int, now: float, *, is_link_suspect: bool) -> bool:
        """Whether a stream that has `num_tokens` now is to be given up."""
        hold, spent = self._holds[key], self._spent.get(key, _Spent(0.0, 0, 0.0))
        held_s, tokens = now - hold.since, num_tokens - hold.begun_tokens
        is_reached = hold.reached_at is not None and not hold.is_blind
        if is_link_suspect or is_reached or now < self._keep_until:
            hold.away_since = now  # once the link is back, the client has its time to return
        away_s = now - hold.away_since + (spent.seconds if hold.is_blind else 0.0)
        if not is_reached and away_s >= self.patience.gone_after_s:
            return True
        return spent.seconds + held_s >= self.patience.link_patience_s or spent.tokens + tokens >= MAX_HELD_TOKENS

    def release(self, key: str, num_tokens: int, now: float) -> Hold:
        """Ends a hold: the stream flows again."""
        hold, spent = self._holds.pop(key), self._spent.get(key, _Spent(0.0, 0, 0.0))
        tokens = spent.tokens + num_tokens - hold.begun_tokens
        self._spent[key] = _Spent(spent.seconds + now - hold.since, tokens, now)
        return hold

    def forget(self, key: str) -> None:
        """Forgets a stream that has ended."""
        self._holds.pop(key, None)
        self._spent.pop(key, None)

    def hurry(self, now: float) -> None:
        """Probes every held stream at once, since a link seems to be up again."""
        for hold in self._holds.values():
            hold.probe_due_at = min(hold.probe_due_at, now)

    def expire(self, now: float) -> None:
        """Forgets the earlier holds of streams that have flowed for long."""
        for key in [key for key, one in self._spent.items() if now - one.released_at >= self.patience.link_patience_s]:
            if key not in self._holds:
                del self._spent[key]

    def clear(self) -> None:
        """Forgets every stream."""
        self._holds.clear()
        self._spent.clear()

    def reconnected(self, now: float) -> None:
        """Probes again, since notices may have been lost with the connection."""
        self._keep_until = now + RECONNECT_GRACE_S
        for hold in self._holds.values():
            hold.probed_at = hold.reached_at = None
            hold.probe_due_at = now
