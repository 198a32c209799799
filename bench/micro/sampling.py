"""Compares drawing a token from the whole vocabulary with sorting it first.

Run: .venv/bin/python -m bench.micro.sampling [--vocabulary 152000] [--streams 16] [--rounds 9]

The result is the CPU time of one step's draws, one for each stream, without top_k: the way the sampler draws, and with
a full sort, in turn. Logits are normally distributed; with a small spread all tokens are about equally likely."""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.device.draws import Row, draw_from_all, draw_from_sorted

Draw = Callable[[Row, engine_request.Sampling, float], int]


def draw_sorting(row: Row, sampling: engine_request.Sampling, u: float) -> int:
    """Draws with NumPy's fastest sort, which is not stable for equally likely tokens."""
    order = np.argsort(row)[::-1]
    return int(order[draw_from_sorted(row[order].astype(np.float64)[None], [sampling], np.array([[u]]))[0]])


def _ms(draw: Draw, rows: Sequence[Row], sampling: engine_request.Sampling) -> float:
    began = time.process_time()
    for number, row in enumerate(rows):
        draw(row, sampling, (number + 0.5) / len(rows))
    return (time.process_time() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    for spread in (3.0, 0.01):
        rows = list(rng.normal(0, spread, (options.streams, options.vocabulary)).astype(np.float32))
        for top_p in (1.0, 0.95):
            sampling = engine_request.Sampling(max_tokens=1, temperature=1.0, top_k=0, top_p=top_p)
            pairs = [
                (_ms(draw_from_all, rows, sampling), _ms(draw_sorting, rows, sampling)) for _ in range(options.rounds)
            ]
            _show(f"spread {spread:g}, top_p {top_p:g}", pairs)


def _show(name: str, pairs: Sequence[tuple[float, float]]) -> None:
    ratios = [drawn / by_sort for drawn, by_sort in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    drawn, by_sort = (statistics.median(values) for values in zip(*pairs, strict=True))
    print(f"{name:24} {middle:.2f} ({low:.2f} to {high:.2f}): {drawn:.1f} against {by_sort:.1f} ms")


if __name__ == "__main__":
    main()
