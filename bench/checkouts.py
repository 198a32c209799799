"""Compares another checkout of Tokenbus with this one: the same benchmarks, run in turn (A B A B).

Run: .venv/bin/python -m bench.checkouts ../other [--pairs 7] [--only frontend_cpu choice]

The other checkout needs its own environment (`make .venv/.ready` there) and benchmarks of the same file names, in any
folder of bench/. Figures are read from a benchmark's output. Ratios are costs, this checkout / the other; rates are
inverted, so that above 1 always means that this checkout is worse. `worse` and `better` appear only if both quartiles
are more than 3 % away from 1. Generating tokens and computing prompts are compared by `bench.serving.versions`."""

import re
import statistics
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from bench import flags
from bench.paired import quartiles

HERE = Path(__file__).parents[1]
MARGIN = 0.03


class Figure(NamedTuple):
    """A number in a benchmark's output, found by the first group of a pattern."""

    name: str
    pattern: str
    is_rate: bool = False


BENCHMARKS: dict[str, tuple[tuple[str, ...], tuple[Figure, ...]]] = {
    "first_chunk": (
        ("--pairs", "41"),
        (Figure("first chunk, ms over the bare engine", r"difference +([\d.]+)"),),
    ),
    "frontend_cpu": (
        ("--rounds", "3"),
        (
            Figure("frontend CPU, µs a token", r"front[\w, ]* +([\d.]+)"),
            Figure("client CPU, µs a token", r"client[\w, ]* +([\d.]+)"),
        ),
    ),
    "frontend_cpu:8": (
        ("--streams", "8", "--rounds", "6"),
        (Figure("frontend CPU, 8 streams, µs a token", r"front[\w, ]* +([\d.]+)"),),
    ),
    "choice": (
        ("--workers", "64"),
        (
            Figure("choice, 1,024 tokens, µs", r"1024 tokens: median ([\d.]+)"),
            Figure("choice, 8,192 tokens, µs", r"8192 tokens: median ([\d.]+)"),
        ),
    ),
    "ingest": (
        ("--pairs", "3"),
        (
            Figure("blocks stored, thousand/s", r"stored +([\d,.]+)", is_rate=True),
            Figure("stored and removed, thousand/s", r"mixed +([\d,.]+)", is_rate=True),
        ),
    ),
    "index_memory": (
        ("--times", "1", "--blocks", "260000"),
        (Figure("index, bytes a block", r"\d{3},\d{3} +(\d+)"),),
    ),
    "overhead": (
        ("--pairs", "5", "--rounds", "5"),
        (Figure("gateway CPU, µs a token", r"gateway +([\d.]+) us"),),
    ),
    "router_cost": (
        ("--rounds", "2", "--requests", "400"),
        (
            Figure("router CPU, µs a request of ids", r"CPU of a request of token ids +([\d.]+)"),
            Figure("router CPU, µs of text beyond encode", r"CPU of text beyond that +(-?[\d.]+)"),
            Figure("added p50, ids, ms", r"added p50, ids +(-?[\d.]+)"),
        ),
    ),
}
"""The flags and figures of each benchmark. What follows a colon tells two runs of the same one apart."""


def run(checkout: Path, name: str) -> dict[str, float]:
    """Runs a benchmark in a checkout and returns its figures as costs. Raises SystemExit if it fails."""
    flags, figures = BENCHMARKS[name]
    (path,) = (checkout / "bench").rglob(f"{name.partition(':')[0]}.py")
    command = (".".join(path.relative_to(checkout).with_suffix("").parts), *flags)
    python = checkout / ".venv/bin/python"
    done = subprocess.run([python, "-m", *command], cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed in {checkout}:\n{done.stdout}{done.stderr}")
    costs = {}
    for figure in figures:
        found = re.search(figure.pattern, done.stdout)
        if not found:
            raise SystemExit(f"{' '.join(command)} in {checkout} prints no {figure.name!r}:\n{done.stdout}")
        seen = float(found[1].replace(",", ""))
        costs[figure.name] = 1 / seen if figure.is_rate else seen
    return costs


def verdict(low: float, high: float) -> str:
    if low > 1 + MARGIN:
        return "worse"
    return "better" if high < 1 - MARGIN else ""


def compare(other: Path, name: str, pairs: int) -> None:
    columns: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(pairs):
        theirs, ours = run(other, name), run(HERE, name)
        for label in ours:
            columns[label].append((theirs[label], ours[label]))
    for figure in BENCHMARKS[name][1]:
        seen = columns[figure.name]
        before, after = (statistics.median(column) for column in zip(*seen, strict=True))
        low, middle, high = quartiles([new / old for old, new in seen])
        if figure.is_rate:
            before, after = 1 / before, 1 / after
        spread = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        print(f"{figure.name:40}{before:10.2f}{after:10.2f}    {spread:24}{verdict(low, high)}", flush=True)


def main() -> None:
    parser = flags.parser(__doc__, pairs=7)
    parser.add_argument("other", type=Path)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    options = parser.parse_args()
    print(f"{'':40}{'other':>10}{'this':>10}    cost, this / other (quartiles), {options.pairs} pairs")
    for name in options.only:
        compare(options.other.resolve(), name, options.pairs)


if __name__ == "__main__":
    main()
