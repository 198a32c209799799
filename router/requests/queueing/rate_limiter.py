"""Per-tenant rate limits of one router: open requests, and requests and tokens per minute."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

from tokenbus.protocol.wire import errors

MAX_TENANTS = 16_384
"""Token buckets that are kept; beyond that the least recently used one is dropped, and starts full again."""
_MINUTE_S = 60.0


class TenantLimits(NamedTuple):
    """Limits of one tenant; 0 means unlimited."""

    concurrency: int = 0
    """Requests open at the same time."""
    requests_per_minute: float = 0.0
    tokens_per_minute: float = 0.0
    """Prompt tokens plus `max_tokens` of each request."""


class Throttled(NamedTuple):
    """The reason for which a request was refused, and the seconds until a retry may succeed."""

    reason: str
    retry_after_s: float


def check_throttled(throttled: Throttled | None) -> None:
    """Raises RequestError(overloaded) for a throttled request."""
    if throttled is not None:
        wait_ms = round(throttled.retry_after_s * 1e3, 1)
        raise errors.RequestError(errors.make_error(errors.Code.OVERLOADED, throttled.reason, retry_after_ms=wait_ms))


class _TokenBucket:
    """Refills by `capacity` per minute, up to that or to one token. It may be overdrawn once it holds at least one
    token, and then has to refill first: requests that are larger than the bucket are delayed, never locked out."""

    __slots__ = ("_level", "_updated_at")

    def __init__(self, capacity: float, now: float) -> None:
        self._level = max(capacity, 1.0)
        self._updated_at = now

    def wait_s(self, capacity: float, now: float) -> float:
        """Seconds until the bucket holds a token again; 0 if it does now."""
        self._level = min(max(capacity, 1.0), self._level + (now - self._updated_at) * capacity / _MINUTE_S)
        self._updated_at = now
        return max(0.0, (1.0 - self._level) * _MINUTE_S / capacity)

    def take(self, amount: float) -> None:
        self._level -= amount


class RateLimiter:
    """Applies `overrides` to the tenants that they name, and `limits` to all others."""

    def __init__(self, limits: TenantLimits, overrides: Mapping[str, TenantLimits]) -> None:
        self._limits = limits
        self._overrides = overrides
        self._buckets: OrderedDict[tuple[str, str], _TokenBucket] = OrderedDict()

    def __repr__(self) -> str:
        return f"<RateLimiter, {len(self._buckets)} buckets>"

    def set_limits(self, limits: TenantLimits, overrides: Mapping[str, TenantLimits]) -> None:
        """Changes the limits; usage in the last minute still counts."""
        self._limits, self._overrides = limits, overrides

    def charge_request(self, tenant: str, num_open: int, now: float) -> Throttled | None:
        """Charges one request to a tenant with `num_open` requests open, unless it is throttled."""
        limits = self._limits_of(tenant)
        if limits.concurrency and num_open >= limits.concurrency:
            return Throttled(f"tenant {tenant!r} has {num_open} open requests; its limit is {limits.concurrency}", 1.0)
        return self._charge(tenant, "requests", limits.requests_per_minute, 1.0, now)

    def charge_tokens(self, tenant: str, num_tokens: int, now: float) -> Throttled | None:
        """Charges a request's tokens, unless the tenant is throttled."""
        return self._charge(tenant, "tokens", self._limits_of(tenant).tokens_per_minute, num_tokens, now)

    def _limits_of(self, tenant: str) -> TenantLimits:
        return self._overrides.get(tenant, self._limits)

    def _charge(self, tenant: str, unit: str, per_minute: float, amount: float, now: float) -> Throttled | None:
        if not per_minute:
            return None
        bucket = self._buckets.setdefault((unit, tenant), _TokenBucket(per_minute, now))
        self._buckets.move_to_end((unit, tenant))
        if len(self._buckets) > MAX_TENANTS:
            self._buckets.popitem(last=False)
        wait_s = bucket.wait_s(per_minute, now)
        if wait_s > 0:
            return Throttled(f"tenant {tenant!r} has used up its {per_minute:g} {unit} per minute", wait_s)
        bucket.take(amount)
        return None
