"""A run that was cancelled or dropped before it arrived is refused, and only that one."""

import pytest

from tokenbus.protocol.wire import codec, internal, limits, params
from tokenbus.worker.streams.early_cancels import EarlyCancels


def run(attempt: int = 0, age_ms: float | None = 1_000.0) -> internal.Run:
    return internal.Run(
        request_id="acme:r",
        attempt=attempt,
        epoch="1-a",
        router_id="router",
        reply="_INBOX.a",
        encoding=codec.Encoding.JSON,
        token_ids=b"",
        params=params.GenerationParams(),
        age_ms=age_ms,
    )


@pytest.mark.parametrize(("attempt", "is_taken_back"), [(0, True), (1, True), (2, False)])
def test_a_drop_takes_back_its_attempt_and_those_before_it(attempt: int, is_taken_back: bool) -> None:
    early = EarlyCancels()
    early.drop("acme:r", 1, now=10.0)
    early.drop("acme:r", 0, now=10.0)
    assert early.is_taken_back(run(attempt), now=11.0) is is_taken_back
    assert not early.is_cancelled(run(attempt), now=11.0)


@pytest.mark.parametrize(("cancelled_at", "counts"), [(9.0, False), (10.2, False), (10.25, True), (10.9, True)])
def test_a_cancel_counts_only_if_it_came_clearly_after_the_request_was_made(cancelled_at: float, counts: bool) -> None:
    early = EarlyCancels()
    early.cancel("acme:r", now=cancelled_at)
    assert early.is_cancelled(run(age_ms=1_000.0), now=11.0) is counts
    assert early.is_taken_back(run(attempt=7, age_ms=1_000.0), now=11.0) is counts


def test_a_cancel_counts_where_the_age_of_the_request_is_not_known() -> None:
    early = EarlyCancels()
    early.cancel("acme:r", now=1.0)
    early.drop("acme:r", 3, now=1.0)
    assert early.is_cancelled(run(age_ms=None), now=1.0)


def test_early_cancels_are_forgotten() -> None:
    early = EarlyCancels()
    early.drop("acme:r", 0, now=0.0)
    assert not early.is_taken_back(run(), now=limits.WITHDRAWN_TTL_S + 1)
    early.expire(limits.WITHDRAWN_TTL_S + 1)
    assert repr(early) == "<EarlyCancels 0>"
