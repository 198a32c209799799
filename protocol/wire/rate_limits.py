"""What a client has left of its limits, as it is told with each answer."""

from msgspec import Struct


class RateLimit(Struct, frozen=True, kw_only=True):
    """One limit."""

    limit: int
    """What is allowed in a minute, or in a day if that limit is nearer."""
    remaining: int
    """What may still be used before `reset_ms`."""
    reset_ms: float
    """Time until more may be used."""


class RateLimits(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of a client: those of its key or of its tenant, whichever leave less."""

    requests: RateLimit | None = None
    """Of requests."""
    tokens: RateLimit | None = None
    """Of prompt and completion tokens together."""
