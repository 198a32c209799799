"""A virtual worker does the same however often it is advanced."""

import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.replay.settings import ReplaySettings
from tokenbus.replay.traces import TracedRequest
from tokenbus.replay.virtual_worker import RequestProgress, VirtualWorker
from tokenbus.worker.engine.sim.runner import PRESETS

SMALL = ReplaySettings(trace="", kv_blocks=40, block_size=4, timing="dynamo", max_num_seqs=4, max_num_batched_tokens=24)


class Seen(NamedTuple):
    """Everything that a worker has done."""

    progress: list[RequestProgress]
    tokens: int
    gaps_s: float
    held: set[int]
    step_ends_at: float | None


def play(requests: list[tuple[float, TracedRequest]], worker: VirtualWorker, *, coalesce: bool) -> Seen:
    for number, (at_s, request) in enumerate(requests):
        worker.advance(at_s, at_s if coalesce else -1.0)
        worker.submit(number, request, at_s)
        worker.check_integrity()
    worker.advance(1e9, 1e9 if coalesce else -1.0)
    worker.check_integrity()
    held: set[int] = set()
    for _, entry in worker.events:
        held -= set(entry.removed)
        held |= {name for run in entry.stored for name in run.hashes}
    count = sum(len(steps.gaps_s) * steps.sequences for steps in worker.steps)
    gaps_s = sum(sum(steps.gaps_s) * steps.sequences for steps in worker.steps)
    return Seen(worker.progress, count, gaps_s, held, worker.step_ends_at)


@given(
    st.lists(
        st.tuples(st.floats(0, 0.5), st.integers(1, 60), st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=8
    )
)
def test_coalesced_steps_are_the_same_as_steps_taken_one_by_one(asked: list[tuple[float, int, int, int]]) -> None:
    requests, now = [], 0.0
    for after_s, prompt, output, group in asked:
        now += after_s
        blocks = -(-prompt // 4)
        requests.append((now, TracedRequest(now, prompt, output, tuple(range(100 * group, 100 * group + blocks)), 4)))
    one_by_one = play(requests, VirtualWorker("w", SMALL), coalesce=False)
    hurried = play(requests, VirtualWorker("w", SMALL), coalesce=True)
    assert hurried.progress == [done._replace(at_s=pytest.approx(done.at_s)) for done in one_by_one.progress]
    assert hurried.tokens == one_by_one.tokens == sum(output - 1 for _, _, output, _ in asked)
    assert hurried.gaps_s == pytest.approx(one_by_one.gaps_s)
    assert hurried.held == one_by_one.held
    assert hurried.step_ends_at is None


def test_an_idle_worker_takes_as_long_as_its_timing_model_says() -> None:
    worker = VirtualWorker("w", SMALL)
    request = TracedRequest(0.0, 20, 3, tuple(range(5)), 4)
    seen = play([(1.0, request)], worker, coalesce=True)
    timing = PRESETS["dynamo"]
    first_s = 1.0 + timing.step_ms(20, 0, 0.0) / 1e3
    gaps_s = [timing.step_ms(0, 1, held / 160) / 1e3 for held in (21, 22)]
    assert [one.at_s for one in seen.progress] == [pytest.approx(first_s), pytest.approx(first_s + sum(gaps_s))]
    assert seen.progress[0].cached_tokens == 0


def test_a_repeated_prompt_is_cached_except_for_its_last_token() -> None:
    request = TracedRequest(0.0, 20, 3, tuple(range(5)), 4)
    seen = play([(0.0, request), (9.0, request)], VirtualWorker("w", SMALL), coalesce=True)
    assert [one.cached_tokens for one in seen.progress if one.cached_tokens is not None] == [0, 19]


def test_a_worker_that_is_twice_as_fast_takes_half_the_time() -> None:
    rng = random.Random(1)
    requests = [
        (0.01 * number, TracedRequest(0.0, 30, rng.randrange(1, 30), tuple(range(8)), 4)) for number in range(3)
    ]
    slow = play([(0.0, request) for _, request in requests], VirtualWorker("w", SMALL), coalesce=True)
    fast = play([(0.0, request) for _, request in requests], VirtualWorker("w", SMALL, speed=2.0), coalesce=True)
    assert fast.progress[-1].at_s == pytest.approx(slow.progress[-1].at_s / 2)
