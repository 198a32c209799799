"""The flags of `tokenbus bench`, and the plan that they make."""

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tokenbus.replay import generators, sources, traces
from tokenbus.replay.load.points import LoadKind, LoadPoint
from tokenbus.replay.load.workload import MIN_VOCABULARY, RandomTokens, RepeatedText, TraceWorkload, Workload

_REQUESTS = 100
_REQUESTS_PER_CLIENT = 10
_MAX_POINTS = 64
_MAX_CLIENTS = 16_384
TO_STANDARD_OUTPUT = Path("-")


class Plan(NamedTuple):
    """What is to be measured."""

    model: str
    points: tuple[LoadPoint, ...]
    workload: Workload
    clip: bool
    requests: int | None
    duration_s: float | None
    warmup: int
    burst: int
    max_in_flight: int
    temperature: float
    timeout_ms: float | None
    seed: int
    reuse_cache: bool
    json: Path | None
    html: Path | None

    def requests_at(self, point: LoadPoint, workload: Workload) -> int | None:
        """How many requests a run sends at most; None: as many as come in its time."""
        if workload.num_requests:
            return min(self.requests or workload.num_requests, workload.num_requests)
        if self.requests or self.duration_s:
            return self.requests
        return (
            max(_REQUESTS, _REQUESTS_PER_CLIENT * int(point.value)) if point.kind is LoadKind.CONCURRENCY else _REQUESTS
        )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Everything but the broker's flags and the command itself."""
    flag = parser.add_argument
    flag("--model", metavar="NAME", required=True, help="the served model")
    load = parser.add_argument_group("load", "one run for each number")
    load.add_argument("--concurrency", metavar="N,N", type=_counts, help="clients that each wait for their answer (1)")
    load.add_argument("--rate", metavar="R,R", type=_numbers, help="requests per second, whatever comes back")
    load.add_argument("--speedup", metavar="X,X", type=_numbers, help="the trace's own times, so many times faster (1)")
    load.add_argument("--burst", type=_whole(1, 10_000), default=1, help="with --rate: so many at once (%(default)s)")
    load.add_argument(
        "--max-in-flight",
        type=_whole(1, _MAX_CLIENTS),
        default=1_024,
        help="with --rate or --speedup: what comes beyond is counted as not sent (%(default)s)",
    )
    load.add_argument("--requests", metavar="N", type=_whole(1, 10**9), help="of each run (100, or the whole trace)")
    load.add_argument("--duration-s", metavar="S", type=_real(0.1, 1e6), help="of each run; then nothing more is sent")
    load.add_argument(
        "--warmup", metavar="N", type=_whole(0, 10_000), default=1, help="requests before each run (%(default)s)"
    )
    _add_workload(parser.add_argument_group("requests", "random tokens, unless a trace or a text is given"))
    flag("--json", metavar="FILE", type=Path, help="write the numbers; - for standard output")
    flag("--html", metavar="FILE", type=Path, help="write tables and plots")


def _add_workload(group: "argparse._ArgumentGroup") -> None:
    flag = group.add_argument
    flag("--input-tokens", metavar="N", type=_whole(1, 10**7), help="tokens of a prompt (128)")
    flag("--output-tokens", metavar="N", type=_whole(1, 10**7), help="tokens of an answer (64)")
    flag("--trace", help=f"a file in Mooncake's format, or one of {', '.join(generators.DEFAULTS)}[:SETTING=VALUE,...]")
    flag("--clip", action="store_true", help="cut what exceeds the model's context instead of leaving it out")
    flag("--prompt", metavar="TEXT", help="ask this instead, through the chat template")
    flag(
        "--vocabulary",
        metavar="N",
        type=_whole(MIN_VOCABULARY, 1 << 24),
        default=400,
        help="token ids stay below it (%(default)s)",
    )
    flag("--temperature", type=_real(0, 100), default=0.0, help="%(default)s")
    flag("--timeout-ms", type=_real(1, 1e9), help="of each request")
    flag("--seed", type=_whole(0, (1 << 32) - 1), default=0, help="of prompts, arrivals and workloads (%(default)s)")
    flag("--reuse-cache", action="store_true", help="let a run find what earlier ones have left in the caches")


def plan_of(options: argparse.Namespace) -> Plan:
    """What the flags say together. Raises ValueError where they contradict each other."""
    workload, points = _workload(options), _points(options)
    if points[0].kind is LoadKind.SPEEDUP and options.trace is None:
        raise ValueError("--speedup is about the times of a --trace")
    if options.burst > 1 and points[0].kind is not LoadKind.RATE:
        raise ValueError("--burst goes with --rate")
    most = max(point.value for point in points)
    if points[0].kind is LoadKind.CONCURRENCY and options.requests and options.requests < most:
        raise ValueError(f"--requests {options.requests} never reach --concurrency {most:g}")
    for path in (options.json, options.html):
        if path is not None and path != TO_STANDARD_OUTPUT:
            _check_writable(path)
    same = {name: getattr(options, name) for name in Plan._fields if name in options}
    return Plan(points=points, workload=workload, **same)


def _points(options: argparse.Namespace) -> tuple[LoadPoint, ...]:
    given = [(kind, values) for kind in LoadKind if (values := getattr(options, kind))]
    if len(given) > 1:
        raise ValueError(f"--{given[0][0]} and --{given[1][0]} exclude each other")
    kind, values = given[0] if given else (LoadKind.SPEEDUP if options.trace else LoadKind.CONCURRENCY, (1.0,))
    return tuple(LoadPoint(kind, value) for value in values)


def _workload(options: argparse.Namespace) -> Workload:
    given = [name for name in ("trace", "prompt", "input_tokens") if getattr(options, name) is not None]
    if len(given) > 1:
        raise ValueError(f"--{given[0]} and --{given[1].replace('_', '-')} exclude each other")
    if options.prompt is not None:
        if not options.prompt:
            raise ValueError("the prompt is empty")
        return RepeatedText(options.prompt, options.output_tokens)
    if options.trace is not None:
        if options.output_tokens is not None:
            raise ValueError("--trace and --output-tokens exclude each other")
        return TraceWorkload(Path(options.trace).name, _trace(options.trace, options.seed), options.vocabulary)
    return RandomTokens(options.input_tokens or 128, options.output_tokens or 64, options.vocabulary)


def _trace(text: str, seed: int) -> list[traces.TracedRequest]:
    try:
        return sources.requests(text, seed)
    except OSError as error:
        raise ValueError(f"{text} can't be read: {error.strerror}") from error


def _check_writable(path: Path) -> None:
    """Before anything is measured, so that nothing is measured in vain."""
    target = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(target, os.W_OK):
        raise ValueError(f"{path} can't be written")


def _whole(low: int, high: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be {low:,} to {high:,}, got {text}")
        return value

    return number


def _real(low: float, high: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and low <= value <= high):
            raise argparse.ArgumentTypeError(f"must be {low:g} to {high:,.0f}, got {text}")
        return value

    return number


def _numbers(text: str) -> tuple[float, ...]:
    return _several(text, _real(0.001, 100_000))


def _counts(text: str) -> tuple[float, ...]:
    return _several(text, _whole(1, _MAX_CLIENTS))


def _several(text: str, number: Callable[[str], float]) -> tuple[float, ...]:
    try:
        values = tuple(float(number(part)) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be numbers with commas, got {text}") from error
    if len(values) > _MAX_POINTS:
        raise argparse.ArgumentTypeError(f"must be at most {_MAX_POINTS} numbers, got {len(values)}")
    return values
