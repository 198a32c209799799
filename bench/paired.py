"""Compares the CPU time of two ways of doing the same thing, in interleaved pairs (A B A B ...)."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Ratio(NamedTuple):
    """The median and quartiles of a number over all pairs, usually B's CPU time as a share of A's."""

    first_quartile: float
    median: float
    third_quartile: float

    def __str__(self) -> str:
        return f"{self.median:.2f} (quartiles {self.first_quartile:.2f} to {self.third_quartile:.2f})"


def quartiles(values: Sequence[float]) -> Ratio:
    """Returns the median and quartiles of some numbers."""
    low, middle, high = statistics.quantiles(values, n=4)
    return Ratio(low, middle, high)


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def compare(first: Callable[[], None], second: Callable[[], None], pairs: int = 9) -> tuple[float, float, Ratio]:
    """Returns the median CPU seconds of both and the ratio second / first, after one pair that is not measured."""
    first()
    second()
    times = [(cpu_seconds(first), cpu_seconds(second)) for _ in range(pairs)]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    return medians[0], medians[1], quartiles([b / a for a, b in times])
