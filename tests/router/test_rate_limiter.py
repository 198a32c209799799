"""A tenant above its limits has to wait, and no other tenant does."""

from hypothesis import given
from hypothesis import strategies as st

from tokenbus.router.requests.queueing.rate_limiter import MAX_TENANTS, RateLimiter, TenantLimits, Throttled


def test_without_limits_nothing_is_throttled_or_stored() -> None:
    limiter = RateLimiter(TenantLimits(), {})
    assert limiter.charge_request("a", 10**6, 0.0) is None
    assert limiter.charge_tokens("a", 10**9, 0.0) is None
    assert repr(limiter) == "<RateLimiter, 0 buckets>"


def test_the_concurrency_limit_counts_open_requests() -> None:
    limiter = RateLimiter(TenantLimits(concurrency=2), {"big": TenantLimits(concurrency=3)})
    assert limiter.charge_request("a", 1, 0.0) is None
    throttled = limiter.charge_request("a", 2, 0.0)
    assert throttled is not None
    assert "2 open requests; its limit is 2" in throttled.reason
    assert limiter.charge_request("big", 2, 0.0) is None


def test_the_request_limit_refills_with_time_and_is_separate_for_each_tenant() -> None:
    limiter = RateLimiter(TenantLimits(requests_per_minute=60), {})
    assert [limiter.charge_request("a", 0, 0.0) for _ in range(60)] == [None] * 60
    throttled = limiter.charge_request("a", 0, 0.0)
    assert isinstance(throttled, Throttled)
    assert throttled.retry_after_s == 1.0
    assert limiter.charge_request("b", 0, 0.0) is None
    assert limiter.charge_request("a", 0, 0.99) is not None
    assert limiter.charge_request("a", 0, 1.0) is None
    assert limiter.charge_request("a", 0, 1.0) is not None


def test_a_request_larger_than_the_bucket_passes_and_delays_the_next() -> None:
    limiter = RateLimiter(TenantLimits(tokens_per_minute=600), {})
    assert limiter.charge_tokens("a", 1_200, 0.0) is None
    throttled = limiter.charge_tokens("a", 1, 0.0)
    assert throttled is not None
    assert abs(throttled.retry_after_s - 60.1) < 0.01
    assert limiter.charge_tokens("a", 1, 60.2) is None


def test_less_than_one_request_a_minute_is_one_in_several_minutes() -> None:
    limiter = RateLimiter(TenantLimits(requests_per_minute=0.5), {})
    assert limiter.charge_request("a", 0, 0.0) is None
    throttled = limiter.charge_request("a", 0, 60.0)
    assert throttled is not None
    assert throttled.retry_after_s == 60.0
    assert limiter.charge_request("a", 0, 120.0) is None
    assert limiter.charge_request("a", 0, 10_000.0) is None
    assert limiter.charge_request("a", 0, 10_000.0) is not None


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 400)), max_size=60))
def test_usage_never_exceeds_the_rate_plus_a_full_bucket_plus_one_request(
    asked: list[tuple[float, int]],
) -> None:
    limiter = RateLimiter(TenantLimits(tokens_per_minute=600), {})
    now = spent = 0.0
    for pause_s, tokens in asked:
        now += pause_s
        if limiter.charge_tokens("a", tokens, now) is None:
            spent += tokens
        assert spent <= 600 + now * 10 + 400 + 1e-6


def test_made_up_tenants_take_bounded_memory() -> None:
    limiter = RateLimiter(TenantLimits(requests_per_minute=1), {})
    for number in range(MAX_TENANTS + 100):
        limiter.charge_request(f"tenant-{number}", 0, 0.0)
    assert repr(limiter) == f"<RateLimiter, {MAX_TENANTS} buckets>"
