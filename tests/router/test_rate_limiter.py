"""A careless tenant waits, and nobody else does."""

from hypothesis import given
from hypothesis import strategies as st

from tokenbus.router.requests.rate_limiter import MAX_TENANTS, RateLimiter, Refusal, TenantLimits


def test_without_limits_nothing_is_refused_or_remembered() -> None:
    limiter = RateLimiter(TenantLimits(), {})
    assert limiter.request("a", 10**6, 0.0) is None
    assert limiter.tokens("a", 10**9, 0.0) is None
    assert repr(limiter) == "<Allowances, 0 buckets>"


def test_as_many_requests_as_the_limit_may_be_open_and_no_more() -> None:
    limiter = RateLimiter(TenantLimits(concurrency=2), {"big": TenantLimits(concurrency=3)})
    assert limiter.request("a", 1, 0.0) is None
    refusal = limiter.request("a", 2, 0.0)
    assert refusal is not None
    assert "2 requests open, 2 may be" in refusal.reason
    assert limiter.request("big", 2, 0.0) is None


def test_requests_come_back_with_time_and_one_tenant_s_do_not_count_for_another() -> None:
    limiter = RateLimiter(TenantLimits(requests_per_minute=60), {})
    assert [limiter.request("a", 0, 0.0) for _ in range(60)] == [None] * 60
    refusal = limiter.request("a", 0, 0.0)
    assert isinstance(refusal, Refusal)
    assert refusal.retry_after_s == 1.0
    assert limiter.request("b", 0, 0.0) is None
    assert limiter.request("a", 0, 0.99) is not None
    assert limiter.request("a", 0, 1.0) is None
    assert limiter.request("a", 0, 1.0) is not None


def test_a_request_larger_than_what_is_left_is_let_through_and_paid_for_afterwards() -> None:
    limiter = RateLimiter(TenantLimits(tokens_per_minute=600), {})
    assert limiter.tokens("a", 1_200, 0.0) is None
    refusal = limiter.tokens("a", 1, 0.0)
    assert refusal is not None
    assert abs(refusal.retry_after_s - 60.1) < 0.01
    assert limiter.tokens("a", 1, 60.2) is None


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 400)), max_size=60))
def test_over_any_time_no_more_is_spent_than_the_rate_a_full_bucket_and_one_request(
    asked: list[tuple[float, int]],
) -> None:
    limiter = RateLimiter(TenantLimits(tokens_per_minute=600), {})
    now = spent = 0.0
    for pause_s, tokens in asked:
        now += pause_s
        if limiter.tokens("a", tokens, now) is None:
            spent += tokens
        assert spent <= 600 + now * 10 + 400 + 1e-6


def test_tenants_that_are_made_up_take_bounded_memory() -> None:
    limiter = RateLimiter(TenantLimits(requests_per_minute=1), {})
    for number in range(MAX_TENANTS + 100):
        limiter.request(f"tenant-{number}", 0, 0.0)
    assert repr(limiter) == f"<Allowances, {MAX_TENANTS} buckets>"
