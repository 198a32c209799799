"""The headers that tell a client what it has left of its limits, by the names that its SDK knows."""

import math
from datetime import UTC, datetime

from tokenbus.protocol.wire.messages import RateLimit, RateLimits


def to_openai(limits: RateLimits, now: float) -> dict[str, str]:
    """Returns `x-ratelimit-*`, with durations such as `1.5s` and `6m0s`."""
    headers = {}
    for unit, one in _units(limits):
        headers[f"x-ratelimit-limit-{unit}"] = str(one.limit)
        headers[f"x-ratelimit-remaining-{unit}"] = str(one.remaining)
        headers[f"x-ratelimit-reset-{unit}"] = _duration(one.reset_ms)
    return headers


def to_anthropic(limits: RateLimits, now: float) -> dict[str, str]:
    """Returns `anthropic-ratelimit-*`, with times of day; `now` is Unix time."""
    headers = {}
    for unit, one in _units(limits):
        reset = datetime.fromtimestamp(math.ceil(now + one.reset_ms / 1e3), UTC)
        headers[f"anthropic-ratelimit-{unit}-limit"] = str(one.limit)
        headers[f"anthropic-ratelimit-{unit}-remaining"] = str(one.remaining)
        headers[f"anthropic-ratelimit-{unit}-reset"] = reset.strftime("%Y-%m-%dT%H:%M:%SZ")
    return headers


def _units(limits: RateLimits) -> list[tuple[str, RateLimit]]:
    pairs = (("requests", limits.requests), ("tokens", limits.tokens))
    return [(unit, one) for unit, one in pairs if one is not None]


def _duration(ms: float) -> str:
    if ms < 1_000:
        return f"{math.ceil(ms)}ms"
    seconds = math.ceil(ms / 1e2) / 10
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{rest:.3g}s"
