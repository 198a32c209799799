"""Compares two ways of doing the same thing in interleaved pairs (A B A B ...), and prints medians and quartiles."""

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

_Seen = TypeVar("_Seen")


class Ratio(NamedTuple):
    """The median and quartiles of a number over all pairs, usually B's CPU time as a share of A's."""

    first_quartile: float
    median: float
    third_quartile: float

    def __str__(self) -> str:
        return f"{self.median:.2f} (quartiles {self.first_quartile:.2f} to {self.third_quartile:.2f})"


def quartiles(values: Sequence[float]) -> Ratio:
    """Returns the median and quartiles of some numbers; of one alone, that number."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    return Ratio(low, middle, high)


async def interleave(
    first: Callable[[int], Awaitable[_Seen]], second: Callable[[int], Awaitable[_Seen]], pairs: int, warm_up: int = 1
) -> list[tuple[_Seen, _Seen]]:
    """Runs both in turn, each with the number of the pair. The first `warm_up` pairs are not returned."""
    seen = []
    for number in range(pairs + warm_up):
        pair = await first(number), await second(number)
        if number >= warm_up:
            seen.append(pair)
            print(f"  pair {len(seen)}: {_text(pair[0])}; {_text(pair[1])}", flush=True)
    return seen


def _text(seen: object) -> str:
    if isinstance(seen, float):
        return f"{seen:.4g}"
    return ", ".join(map(_text, seen)) if isinstance(seen, tuple) else str(seen)


def show(names: tuple[str, str], unit: str, seen: Sequence[tuple[float, float]], decimals: int = 1) -> None:
    """Prints both medians, and the ratio second / first."""
    for name, column in zip(names, zip(*seen, strict=True), strict=True):
        print(f"  {name:<22} {statistics.median(column):10.{decimals}f} {unit}")
    print(f"  {names[1]} / {names[0]}   {quartiles([second / first for first, second in seen])}")


def show_difference(names: tuple[str, str], unit: str, seen: Sequence[tuple[float, float]]) -> None:
    """Prints medians and quartiles of both, and of the difference second - first."""
    show_column(names[0], unit, [first for first, _ in seen])
    show_column(names[1], unit, [second for _, second in seen])
    show_column("difference", unit, [second - first for first, second in seen])


def show_column(name: str, unit: str, values: Sequence[float]) -> None:
    low, middle, high = quartiles(values)
    print(f"  {name:<18} {middle:7.2f} {unit} (quartiles {low:.2f} to {high:.2f})")


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
