"""The flags of `tokenbus bench`, and the plan they describe."""

import argparse
import os
from pathlib import Path

from tokenbus.cli.console import session
from tokenbus.cli.console.arguments import real, several, whole
from tokenbus.replay import generators, traces
from tokenbus.replay.load.points import LoadKind, LoadPoint, Plan
from tokenbus.replay.load.workload import MIN_VOCABULARY, RandomTokens, RepeatedText, TraceWorkload, Workload

_MAX_POINTS = 64
_MAX_CLIENTS = 16_384
TO_STANDARD_OUTPUT = Path("-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds all flags except those of the connection to the broker."""
    session.add_model_flag(parser)
    flag = parser.add_argument
    group = parser.add_argument_group("load", "one run for each number")
    load = group.add_argument
    clients = several(whole(1, _MAX_CLIENTS), _MAX_POINTS)
    factors = several(real(0.001, 100_000), _MAX_POINTS)
    load("--concurrency", metavar="N,N", type=clients, help="clients that each wait for their answer (1)")
    load("--rate", metavar="R,R", type=factors, help="requests per second, however many are in flight")
    load("--speedup", metavar="X,X", type=factors, help="how many times faster than in the trace (1)")
    load("--burst", type=whole(1, 10_000), default=1, help="with --rate: requests sent at once (%(default)s)")
    in_flight = "with --rate or --speedup: requests beyond this many are counted as not sent (%(default)s)"
    load("--max-in-flight", type=whole(1, _MAX_CLIENTS), default=1_024, help=in_flight)
    load("--requests", metavar="N", type=whole(1, 10**9), help="requests of each run (100, or the whole trace)")
    load("--duration-s", metavar="S", type=real(0.1, 1e6), help="how long each run sends requests")
    load("--warmup", metavar="N", type=whole(0, 10_000), default=1, help="requests before each run (%(default)s)")
    _add_workload(parser.add_argument_group("requests", "random tokens, unless a trace or a prompt is given"))
    flag("--json", metavar="FILE", type=Path, help="write the results as JSON; - writes to standard output")
    flag("--html", metavar="FILE", type=Path, help="write a page of tables and plots")


def _add_workload(group: "argparse._ArgumentGroup") -> None:
    flag = group.add_argument
    flag("--input-tokens", metavar="N", type=whole(1, 10**7), help="tokens of a prompt (128)")
    flag("--output-tokens", metavar="N", type=whole(1, 10**7), help="tokens of an answer (64)")
    flag("--trace", help=f"a file in Mooncake's format, or one of {', '.join(generators.DEFAULTS)}[:SETTING=VALUE,...]")
    flag("--clip", action="store_true", help="clip requests that exceed the model's context instead of skipping them")
    flag("--prompt", metavar="TEXT", help="send this text instead, through the chat template")
    vocabulary = whole(MIN_VOCABULARY, 1 << 24)
    flag("--vocabulary", metavar="N", type=vocabulary, default=400, help="token ids stay below this (%(default)s)")
    flag("--temperature", type=real(0, 100), default=0.0, help="sampling temperature (%(default)s)")
    flag("--timeout-ms", type=real(1, 1e9), help="timeout of each request")
    flag("--seed", type=whole(0, (1 << 32) - 1), default=0, help="seed of prompts, times and workloads (%(default)s)")
    flag("--reuse-cache", action="store_true", help="let a run hit what earlier runs have left in the prefix cache")


def plan_of(options: argparse.Namespace) -> Plan:
    """Returns the plan that the flags describe. Raises ValueError if they contradict each other."""
    workload, points = _workload(options), _points(options)
    if points[0].kind is LoadKind.SPEEDUP and options.trace is None:
        raise ValueError("--speedup needs a --trace")
    if options.burst > 1 and points[0].kind is not LoadKind.RATE:
        raise ValueError("--burst needs --rate")
    most = max(point.value for point in points)
    if points[0].kind is LoadKind.CONCURRENCY and options.requests and options.requests < most:
        raise ValueError(f"--requests {options.requests} is less than --concurrency {most:g}")
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
        return generators.load(text, seed)
    except OSError as error:
        raise ValueError(f"{text} can't be read: {error.strerror}") from error


def _check_writable(path: Path) -> None:
    """Checks in advance that an output file is writable, so that no measurement is wasted."""
    target = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(target, os.W_OK):
        raise ValueError(f"{path} can't be written")
