"""Limits of a client, as it is told of them with each answer."""

from msgspec import Struct


class RateLimit(Struct, frozen=True, kw_only=True):
    """One limit."""

    limit: int
    """The number allowed in a minute, or in a day if that limit is nearer."""
    remaining: int
    """The number left until `reset_ms`."""
    reset_ms: float
    """Time until more may be used."""


class RateLimits(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of a client: those of its key or of its tenant, whichever leave less."""

    requests: RateLimit | None = None
    """The limit of requests."""
    tokens: RateLimit | None = None
    """The limit of prompt and completion tokens together."""
