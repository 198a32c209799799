"""Cancels and drops of requests that this worker does not hold (decision 0014).

A cancel or a drop can overtake the run that it concerns. It is remembered for a while, so that the run is refused when
it arrives. A drop takes back one attempt and those before it; a cancel ends every attempt."""

from typing import NamedTuple

from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import internal, limits

_EVERY_ATTEMPT = 2**63 - 1
_CANCEL_MARGIN_S = 0.25
"""Clients may reuse an id. A cancel counts only if it came this much later than the request was made: an earlier cancel
was meant for an earlier request, and a simultaneous one has reached the router too."""


class _EarlyCancel(NamedTuple):
    attempt: int
    """The last attempt that it concerns."""
    at: float


class EarlyCancels:
    """Remembers early cancels and drops by request key. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._by_key: TTLCache[_EarlyCancel] = TTLCache(limits.WITHDRAWN_TTL_S, limits.MAX_WITHDRAWN)

    def __repr__(self) -> str:
        return f"<EarlyCancels {len(self._by_key)}>"

    def cancel(self, key: str, now: float) -> None:
        """Remembers a client's cancel."""
        self._by_key.put(key, _EarlyCancel(_EVERY_ATTEMPT, now), now)

    def drop(self, key: str, attempt: int, now: float) -> None:
        """Remembers a router's drop, unless a cancel or a later drop is known."""
        known = self._by_key.get(key, now)
        if known is None or known.attempt < attempt:
            self._by_key.put(key, _EarlyCancel(attempt, now), now)

    def is_taken_back(self, run: internal.Run, now: float) -> bool:
        """Returns whether this attempt was dropped or cancelled before it arrived."""
        known = self._find(run, now)
        return known is not None and known.attempt >= run.attempt

    def is_cancelled(self, run: internal.Run, now: float) -> bool:
        """Returns whether the client cancelled the request before it arrived."""
        known = self._find(run, now)
        return known is not None and known.attempt == _EVERY_ATTEMPT

    def expire(self, now: float) -> None:
        """Forgets what is too old."""
        self._by_key.expire(now)

    def _find(self, run: internal.Run, now: float) -> _EarlyCancel | None:
        known = self._by_key.get(run.request_id, now)
        if known is not None and known.attempt == _EVERY_ATTEMPT and run.age_ms is not None:
            made_at = now - run.age_ms / 1e3
            return known if known.at >= made_at + _CANCEL_MARGIN_S else None
        return known
