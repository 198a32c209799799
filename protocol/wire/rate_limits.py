"""Limits of a client, as it is told of them with each answer."""

from collections.abc import Sequence

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


def least(told: Sequence[RateLimits]) -> RateLimits | None:
    """Returns what is left after several answers: of each limit, the report with the smallest `remaining`; None if
    there are no limits."""

    def smallest(of: list[RateLimit | None]) -> RateLimit | None:
        return min((one for one in of if one is not None), key=lambda one: one.remaining, default=None)

    requests, tokens = smallest([one.requests for one in told]), smallest([one.tokens for one in told])
    return None if requests is None and tokens is None else RateLimits(requests=requests, tokens=tokens)
