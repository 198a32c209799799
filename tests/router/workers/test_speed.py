"""A worker's speed is estimated from consecutive events, and a router's decisions are counted."""

import functools

import pytest

from tests.router.builders import card
from tokenbus.protocol.wire import codec, messages
from tokenbus.router.fleet.stats import DecisionStats
from tokenbus.router.placement.placement import Placement
from tokenbus.router.workers.speed import Speed, StepSample, StepTimes, StepTimesFit
from tokenbus.router.workers.worker import Worker


def prompts(tokens: int, left: int = 0) -> tuple[messages.Load, messages.Load]:
    """Returns the loads of two events between which a worker computed that many prompt tokens."""
    before = messages.Load(running=1, queued_prefill_tokens=tokens + left, computed_tokens=0)
    return before, messages.Load(running=1, queued_prefill_tokens=left, computed_tokens=tokens)


def streams(running: int, tokens: int) -> tuple[messages.Load, messages.Load]:
    return messages.Load(running=running), messages.Load(running=running, generated_tokens=tokens)


def test_there_is_no_estimate_before_there_are_enough_samples() -> None:
    speed = Speed()
    for _ in range(19):
        speed.observe_loads(*prompts(1_000), 0.1)
    assert speed.prefill_s_per_token == 0.0, "two of them make one sample"
    speed.observe_loads(*prompts(1_000), 0.1)
    assert speed.prefill_s_per_token == pytest.approx(0.0001)
    assert speed.itl_s == 0.0


def test_the_first_prompt_gives_a_first_estimate_however_short_it_was() -> None:
    speed = Speed()
    assert speed.first_prefill_s_per_token == 0.0
    speed.observe_loads(*prompts(1_000), 0.1)
    assert speed.first_prefill_s_per_token == pytest.approx(0.0001)
    speed.observe_loads(*prompts(500), 0.1)
    assert speed.first_prefill_s_per_token == pytest.approx(0.2 / 1_500)
    assert speed.prefill_s_per_token == 0.0


def test_the_inter_token_latency_is_that_of_a_step_however_many_sequences_run() -> None:
    speed = Speed()
    for running in (1, 4, 8, 16) * 6:
        speed.observe_loads(*streams(running, 2 * running), 0.1)
    assert speed.itl_s == pytest.approx(0.05)


def test_the_best_speed_counts_and_not_how_busy_the_worker_is_now() -> None:
    speed = Speed()
    for _ in range(40):
        speed.observe_loads(*prompts(1_000), 0.1)
    for _ in range(60):
        speed.observe_loads(*prompts(1_000), 0.4)
    assert speed.prefill_s_per_token < 0.00013
    for _ in range(200):
        speed.observe_loads(*prompts(1_000), 0.05)
    assert speed.prefill_s_per_token == pytest.approx(0.00005, rel=0.1)


def test_idle_time_and_new_arrivals_are_no_samples() -> None:
    speed = Speed()
    for _ in range(40):
        speed.observe_loads(messages.Load(), messages.Load(running=1, queued_prefill_tokens=100), 5.0)
        speed.observe_loads(*reversed(prompts(1_000)), 0.1)
    assert (speed.prefill_s_per_token, speed.itl_s) == (0.0, 0.0)


def test_late_events_make_no_difference() -> None:
    speed = Speed()
    for _ in range(40):
        speed.observe_loads(*streams(2, 4), 0.199)
        speed.observe_loads(*streams(2, 4), 0.001)
    assert speed.itl_s == pytest.approx(0.05)


def test_events_in_the_middle_of_a_step_do_not_make_it_seem_shorter() -> None:
    """Steps of 150 tokens take 0.6 s, and events come five times in a step, as of an engine without streams."""
    speed = Speed()
    for _ in range(20):
        before, after = prompts(150, left=500)
        for _ in range(4):
            speed.observe_loads(before, before, 0.12)
        speed.observe_loads(before, after, 0.12)
    assert speed.prefill_s_per_token == pytest.approx(0.004)


def test_time_in_which_nothing_was_queued_is_nobodys() -> None:
    speed, (before, after) = Speed(), prompts(150, left=500)
    for _ in range(20):
        speed.observe_loads(before, before, 0.3)
        speed.observe_loads(before, after, 0.3)
        speed.observe_loads(messages.Load(), messages.Load(), 100.0)
    assert speed.prefill_s_per_token == pytest.approx(0.004)


WAITING = {"running": 2, "waiting": 9, "queued_prefill_tokens": 60_000}
"""The load of a worker with two streams and prompts that have no room."""


def decoded(steps: int) -> messages.Load:
    """Returns its load after that many steps of the streams."""
    return messages.Load(**WAITING, computed_tokens=7_000 + 2 * steps, generated_tokens=2 * steps)


def test_streams_show_their_latency_however_many_prompts_wait_for_room() -> None:
    speed = Speed()
    for step in range(60):
        assert speed.observe_loads(decoded(step), decoded(step + 1), 0.05) == StepSample(0.05)
    assert speed.itl_s == pytest.approx(0.05)
    assert speed.prefill_s_per_token == 0.0


def test_a_step_with_a_part_of_a_prompt_says_nothing_about_the_latency_of_streams() -> None:
    speed, before = Speed(), decoded(0)
    for _ in range(60):
        after = codec.replace(before, computed_tokens=before.computed_tokens + 2 + 512, generated_tokens=2)
        speed.observe_loads(before, after, 0.3)
    assert speed.itl_s == 0.0


@pytest.mark.parametrize("has_queue", [False, True])
def test_an_accept_in_the_middle_of_a_step_does_not_make_streams_seem_faster(has_queue: bool) -> None:
    speed, queued = Speed(), WAITING["queued_prefill_tokens"] if has_queue else 0
    for step in range(60):
        before = codec.replace(decoded(step), queued_prefill_tokens=queued)
        accepted = codec.replace(before, queued_prefill_tokens=queued + 1_000, waiting=10)
        speed.observe_loads(before, accepted, 0.03)
        speed.observe_loads(accepted, codec.replace(decoded(step + 1), queued_prefill_tokens=queued + 1_000), 0.02)
    assert speed.itl_s == pytest.approx(0.05)


def test_a_waiting_prompt_that_is_cancelled_was_not_computed() -> None:
    speed, after = Speed(), codec.replace(decoded(1), waiting=8, queued_prefill_tokens=53_000)
    assert speed.observe_loads(decoded(0), after, 0.05) == StepSample(0.05)
    assert speed.first_prefill_s_per_token == 0.0


def test_decisions_are_counted_with_their_rate_hit_rate_and_duration() -> None:
    stats = DecisionStats()
    report = functools.partial(stats.report, "router-1", [], [], 0, 0)
    none = report(0.0)
    assert (none.predicted_hit_rate, none.decision_p50_us, none.decision_p99_us) == (0.0, 0.0, 0.0)
    worker = Worker(card(kv_block_size=5), 0.0)
    with_remote_prefill = Placement(worker, "kv", fetch_blocks=9, remote_prefill_s=1.0)
    for second in range(60):
        for _ in range(4):
            stats.record_placement(100, Placement(worker, "kv", overlap_blocks=3, fetch_blocks=2), float(second))
        stats.record_placement(100, with_remote_prefill, float(second))
    found = report(59.0)
    assert (found.decisions, found.legs) == (300, 60)
    assert (found.predicted_hit_rate, found.predicted_fetch_rate) == (0.2, 0.08)
    assert found.decisions_per_s == pytest.approx(5.0, rel=0.06)
    assert report(159.0).decisions_per_s < 0.01
    for number in range(100):
        stats.record_decision_time(number * 1e-6)
    found = report(159.0)
    assert (found.decision_p50_us, found.decision_p99_us) == (50.0, 99.0)


def fitted(*steps: StepSample, slowdown: float = 1.0) -> StepTimes:
    fit = StepTimesFit()
    for step in steps:
        fit.observe(step, slowdown)
        fit.update()
    return fit.times


def test_the_fixed_time_of_a_step_is_told_from_that_of_its_tokens() -> None:
    times = fitted(*[StepSample(0.02 + 0.0001 * tokens, tokens) for tokens in (10, 500, 2_000) * 5])
    assert times.prompt_step_s == pytest.approx(0.02)
    assert times.prompt_token_s == pytest.approx(0.0001)


@pytest.mark.parametrize("tokens", [(64,), (64, 64, 64), (64, 65, 63)])
def test_steps_that_are_all_alike_count_by_the_token(tokens: tuple[int, ...]) -> None:
    times = fitted(*[StepSample(0.001 * one, one) for one in tokens])
    assert (times.prompt_step_s, times.prompt_token_s) == (0.0, pytest.approx(0.001))


def test_a_longer_prompt_never_counts_as_faster() -> None:
    times = fitted(*[StepSample(0.1, 10), StepSample(0.01, 1_000)] * 5)
    assert times.prompt_token_s > 0.0
    assert times.prompt_step_s >= 0.0


def test_a_step_that_was_held_up_counts_for_a_few_times_its_time() -> None:
    steps = [StepSample(0.02 + 0.0001 * tokens, tokens) for tokens in (10, 500, 2_000) * 5]
    times = fitted(*steps, StepSample(60.0, 500))
    assert times.prompt_step_s + 500 * times.prompt_token_s < 0.09
    assert fitted(*[StepSample(0.02)] * 10, StepSample(60.0)).decode_step_s < 0.03


def test_the_steps_of_a_slower_worker_count_as_if_the_fastest_had_taken_them() -> None:
    steps = [StepSample(0.04 + 0.0002 * tokens, tokens) for tokens in (10, 500, 2_000)]
    times = fitted(*steps, StepSample(0.06), slowdown=2.0)
    assert times == pytest.approx(StepTimes(0.02, 0.0001, 0.03))


def test_a_step_between_two_events_is_told_with_its_tokens() -> None:
    speed = Speed()
    assert speed.observe_loads(*prompts(1_000), 0.1) == StepSample(0.1, 1_000)
    assert speed.observe_loads(*streams(4, 8), 0.1) == StepSample(0.05)
    assert speed.observe_loads(messages.Load(), messages.Load(), 0.1) is None
