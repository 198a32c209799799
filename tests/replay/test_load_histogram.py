"""A histogram has a bounded size, and its percentiles are exact or within half a per cent."""

import random

import pytest

from tokenbus.replay.load.histogram import LatencyHistogram, LatencyStats


def of(*values: float) -> LatencyHistogram:
    histogram = LatencyHistogram()
    for value in values:
        histogram.add(value)
    return histogram


def test_without_values_there_are_no_numbers() -> None:
    assert of().summary() == LatencyStats(None, None, None, None, None)


def test_with_one_value_every_number_is_that_value() -> None:
    assert of(12.345).summary() == LatencyStats(12.345, 12.345, 12.345, 12.345, 12.345)


def test_mean_and_largest_are_exact() -> None:
    spread = of(1, 2, 3, 1_000).summary()
    assert (spread.mean, spread.max) == (251.5, 1_000)


def test_percentiles_are_by_nearest_rank_and_right_within_half_a_per_cent() -> None:
    values = [random.Random(3).lognormvariate(3, 2) for _ in range(2_000)]
    values.sort()
    histogram = of(*values)
    for percent in (0.05, 1, 50, 90, 99, 99.9, 100):
        exact = values[max(0, -(-int(percent * 1_000) * len(values) // 100_000) - 1)]
        assert histogram.percentile(percent) == pytest.approx(exact, rel=0.0051)


def test_the_99th_percentile_of_100_values_is_the_last_but_one() -> None:
    assert of(*range(1, 101)).percentile(99) == pytest.approx(99, rel=0.005)
    assert of(*range(1, 101)).percentile(99.1) == pytest.approx(100, rel=0.005)


def test_a_value_can_count_several_times() -> None:
    histogram = of(10)
    histogram.add(2.0, 3)
    assert (histogram.count, histogram.summary().mean) == (4, 4.0)
    assert histogram.percentile(75) == pytest.approx(2, rel=0.005)


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-12, 1e15])
def test_values_outside_all_buckets_are_exact_extremes(value: float) -> None:
    histogram = of(value)
    assert histogram.percentile(50) == value


def test_memory_does_not_grow_with_values() -> None:
    histogram = LatencyHistogram()
    for power in range(-20, 20):
        for part in range(100):
            histogram.add((1 + part / 100) * 10.0**power)
    assert len(list(histogram.cumulative())) <= 2_778


def test_cumulative_shares_rise_to_1() -> None:
    shares = list(of(1, 2, 2, 5).cumulative())
    assert [share for _, share in shares] == [0.25, 0.75, 1.0]
    assert shares[0][0] >= 1
    assert shares[-1][0] <= 5
