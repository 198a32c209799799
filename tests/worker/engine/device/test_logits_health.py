"""Logits are looked at about once a second, and whenever they are not finite."""

import math
from array import array

import numpy as np
import pytest

from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.device.non_finite import LogitsHealth, summarize
from tokenbus.worker.engine.scheduling.plan import LogitsSummary, ScheduledTokens, SeenLogits
from tokenbus.worker.engine.scheduling.sequence import Sequence

NAN, INF = math.nan, math.inf


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def share(seq_no: int) -> ScheduledTokens:
    sampling = engine_request.Sampling(max_tokens=1)
    return ScheduledTokens(Sequence(seq_no, array("I", [1]), sampling, frozenset()), 0, 1)


def look(health: LogitsHealth, *rows: list[float]) -> SeenLogits:
    """Shows a batch to `health`, and returns what it has seen."""
    matrix = np.array(rows, np.float32)
    poisoned = [not bool((row < np.inf).all()) for row in matrix]
    health.look([share(10 + n) for n in range(len(rows))], matrix, poisoned)
    return health.take()


@pytest.mark.parametrize(
    ("row", "summary"),
    [
        ([1.0, 2.0, 6.0], LogitsSummary(0, 0, 0, 3, 3.0, 1.0, 6.0)),
        ([NAN, INF, -INF, -INF, -2.0, 4.0], LogitsSummary(1, 1, 2, 2, 1.0, -2.0, 4.0)),
        ([NAN, NAN], LogitsSummary(2, 0, 0, 0, 0.0, 0.0, 0.0)),
        (
            [3e38, 3e38],
            LogitsSummary(0, 0, 0, 2, float(np.float32(3e38)), float(np.float32(3e38)), float(np.float32(3e38))),
        ),
    ],
)
def test_each_kind_of_number_is_counted_apart_and_the_finite_ones_are_summed_up(
    row: list[float], summary: LogitsSummary
) -> None:
    assert summarize(np.array(row, np.float32)) == summary


def test_one_row_a_second_is_looked_at() -> None:
    clock = Clock()
    health = LogitsHealth(clock)
    assert look(health, [1.0, 2.0], [3.0, 4.0]).sampled == LogitsSummary(0, 0, 0, 2, 1.5, 1.0, 2.0)
    clock.now += 0.99
    assert look(health, [5.0, 6.0]) == SeenLogits()
    clock.now += 0.01
    assert look(health, [5.0, 6.0]).sampled == LogitsSummary(0, 0, 0, 2, 5.5, 5.0, 6.0)


def test_rows_that_are_not_finite_are_always_looked_at_and_never_taken_for_healthy_ones() -> None:
    health = LogitsHealth(Clock())
    seen = look(health, [NAN, 1.0], [2.0, 4.0], [INF, -INF])
    assert seen.poisoned == {10: LogitsSummary(1, 0, 0, 1, 1.0, 1.0, 1.0), 12: LogitsSummary(0, 1, 1, 0, 0.0, 0.0, 0.0)}
    assert seen.sampled == LogitsSummary(0, 0, 0, 2, 3.0, 2.0, 4.0)
    assert seen.non_finite == (1, 1, 1)
    assert look(health, [INF, 0.0]).poisoned.keys() == {10}


def test_minus_infinity_in_a_healthy_row_only_rules_a_token_out() -> None:
    seen = look(LogitsHealth(Clock()), [-INF, 1.0])
    assert seen.sampled
    assert (seen.sampled.neg_inf, seen.non_finite) == (1, (0, 0, 0))


def test_few_of_many_rows_that_are_not_finite_are_summed_up() -> None:
    seen = look(LogitsHealth(Clock()), *([[NAN, 0.0]] * 64))
    assert len(seen.poisoned) == 8
    assert seen.sampled is None
