"""How fast a worker is, from what two events in a row say of the time between them."""

import pytest

from tokenbus.protocol.wire import messages
from tokenbus.router.fleet.speed import Speed
from tokenbus.router.fleet.stats import DecisionStats


def prompts(tokens: int, left: int = 0) -> tuple[messages.Load, messages.Load]:
    """Events between which a worker computed so many tokens of prompts."""
    before = messages.Load(running=1, queued_prefill_tokens=tokens + left, computed_tokens=0)
    return before, messages.Load(running=1, queued_prefill_tokens=left, computed_tokens=tokens)


def streams(running: int, tokens: int) -> tuple[messages.Load, messages.Load]:
    return messages.Load(running=running), messages.Load(running=running, generated_tokens=tokens)


def test_nothing_is_said_before_there_are_enough_signs() -> None:
    speed = Speed()
    for _ in range(19):
        speed.observe(*prompts(1_000), 0.1)
    assert speed.prefill_s_per_token == 0.0, "two of them are a sign"
    speed.observe(*prompts(1_000), 0.1)
    assert speed.prefill_s_per_token == pytest.approx(0.0001)
    assert speed.itl_s == 0.0


def test_a_stream_gets_its_next_token_after_the_time_of_a_step_however_many_run() -> None:
    speed = Speed()
    for running in (1, 4, 8, 16) * 6:
        speed.observe(*streams(running, 2 * running), 0.1)
    assert speed.itl_s == pytest.approx(0.05)


def test_what_a_worker_does_at_its_best_counts_and_not_how_busy_it_is_now() -> None:
    speed = Speed()
    for _ in range(40):
        speed.observe(*prompts(1_000), 0.1)
    for _ in range(60):
        speed.observe(*prompts(1_000), 0.4)
    assert speed.prefill_s_per_token < 0.00013
    for _ in range(200):
        speed.observe(*prompts(1_000), 0.05)
    assert speed.prefill_s_per_token == pytest.approx(0.00005, rel=0.1)


def test_idle_time_and_new_arrivals_say_nothing() -> None:
    speed = Speed()
    for _ in range(40):
        speed.observe(messages.Load(), messages.Load(running=1, queued_prefill_tokens=100), 5.0)
        speed.observe(*reversed(prompts(1_000)), 0.1)
    assert (speed.prefill_s_per_token, speed.itl_s) == (0.0, 0.0)


def test_events_that_come_late_and_then_two_at_once_say_the_same() -> None:
    speed = Speed()
    for _ in range(40):
        speed.observe(*streams(2, 4), 0.199)
        speed.observe(*streams(2, 4), 0.001)
    assert speed.itl_s == pytest.approx(0.05)


def test_placements_are_counted_with_their_rate_and_what_was_expected_of_them() -> None:
    stats = DecisionStats()
    assert (stats.predicted_hit_rate, stats.decision_percentiles_us()) == (0.0, (0.0, 0.0))
    for second in range(60):
        for _ in range(4):
            stats.record_placement(100, 25, float(second))
    assert stats.decisions == 240
    assert stats.predicted_hit_rate == 0.25
    assert stats.decisions_per_s(59.0) == pytest.approx(4.0, rel=0.06)
    assert stats.decisions_per_s(159.0) < 0.01
    for number in range(100):
        stats.record_decision_time(number * 1e-6)
    assert stats.decision_percentiles_us() == (pytest.approx(50.0), pytest.approx(99.0))
