"""What each tenant may ask of one router: so many requests at a time, so many requests and tokens a minute; pure."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

MAX_TENANTS = 16_384
"""Tenants whose spending is remembered; the one that was longest away is forgotten first."""
_MINUTE_S = 60.0


class TenantLimits(NamedTuple):
    """0 is no limit."""

    concurrency: int = 0
    """Requests that are open at the same time."""
    requests_per_minute: float = 0.0
    tokens_per_minute: float = 0.0
    """Of prompts, and of completions as long as they may become."""


class Refusal(NamedTuple):
    """Why a tenant has to wait, and for how long."""

    reason: str
    retry_after_s: float


class _Bucket:
    """Fills to `most` in a minute, and may be emptied further than it holds once it has something."""

    __slots__ = ("_at", "_left")

    def __init__(self, most: float, now: float) -> None:
        self._left = most
        self._at = now

    def wait_s(self, most: float, now: float) -> float:
        """Until there is something in it."""
        self._left = min(most, self._left + (now - self._at) * most / _MINUTE_S)
        self._at = now
        return max(0.0, (1.0 - self._left) * _MINUTE_S / most)

    def take(self, amount: float) -> None:
        self._left -= amount


class RateLimiter:
    """`own` are limits of single tenants, by name; all others have `limits`."""

    def __init__(self, limits: TenantLimits, own: Mapping[str, TenantLimits]) -> None:
        self._limits = limits
        self._own = own
        self._buckets: OrderedDict[tuple[str, str], _Bucket] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Allowances, {len(self._buckets)} buckets>"

    def set(self, limits: TenantLimits, own: Mapping[str, TenantLimits]) -> None:
        """Others, from now on; what was used counts."""
        self._limits, self._own = limits, own

    def of(self, tenant: str) -> TenantLimits:
        return self._own.get(tenant, self._limits)

    def request(self, tenant: str, num_open: int, now: float) -> Refusal | None:
        """A tenant, with so many requests open, asks for one more; takes it from its allowance unless refused."""
        limits = self.of(tenant)
        if limits.concurrency and num_open >= limits.concurrency:
            return Refusal(f"tenant {tenant!r} has {num_open} requests open, {limits.concurrency} may be", 1.0)
        reason = f"tenant {tenant!r} has made its {limits.requests_per_minute:g} requests of a minute"
        return self._take("requests", tenant, limits.requests_per_minute, 1.0, reason, now)

    def tokens(self, tenant: str, count: int, now: float) -> Refusal | None:
        """Its request comes to so many tokens. One larger than what is left is let through, and then waited for."""
        most = self.of(tenant).tokens_per_minute
        return self._take(
            "tokens", tenant, most, count, f"tenant {tenant!r} has used its {most:g} tokens of a minute", now
        )

    def _take(self, kind: str, tenant: str, most: float, amount: float, reason: str, now: float) -> Refusal | None:
        if not most:
            return None
        bucket = self._buckets.setdefault((kind, tenant), _Bucket(most, now))
        self._buckets.move_to_end((kind, tenant))
        if len(self._buckets) > MAX_TENANTS:
            self._buckets.popitem(last=False)
        wait_s = bucket.wait_s(most, now)
        if wait_s > 0:
            return Refusal(reason, wait_s)
        bucket.take(amount)
        return None
