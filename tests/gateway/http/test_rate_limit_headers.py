"""Clients are told what they have left by the names that their SDKs know."""

import pytest

from tokenbus.gateway.http import rate_limit_headers
from tokenbus.protocol.wire.messages import RateLimit, RateLimits


def limits(reset_ms: float) -> RateLimits:
    return RateLimits(requests=RateLimit(limit=60, remaining=3, reset_ms=reset_ms))


@pytest.mark.parametrize(
    ("reset_ms", "text"),
    [
        (0.0, "0ms"),
        (999.5, "1000ms"),
        (1_500.0, "1.5s"),
        (59_990.0, "1m0s"),
        (90_000.0, "1m30s"),
        (3_601_000, "1h0m1s"),
    ],
)
def test_openais_headers_have_durations(reset_ms: float, text: str) -> None:
    assert rate_limit_headers.to_openai(limits(reset_ms), 0.0) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "3",
        "x-ratelimit-reset-requests": text,
    }


def test_anthropics_headers_have_times_at_which_there_is_certainly_more() -> None:
    both = RateLimits(requests=limits(1.0).requests, tokens=RateLimit(limit=9, remaining=0, reset_ms=2_500.0))
    headers = rate_limit_headers.to_anthropic(both, 1_790_000_000.0)
    assert headers["anthropic-ratelimit-requests-reset"] == "2026-09-21T14:13:21Z"
    assert headers["anthropic-ratelimit-tokens-reset"] == "2026-09-21T14:13:23Z"
    assert headers["anthropic-ratelimit-tokens-remaining"] == "0"


def test_a_limit_that_a_client_does_not_have_is_not_named() -> None:
    assert rate_limit_headers.to_openai(RateLimits(), 0.0) == {}
