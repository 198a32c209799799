"""The flags of `tokenbus bench`, and the plan they describe."""

import argparse
import os
from pathlib import Path

from tokenbus.cli.console import session
from tokenbus.cli.console.arguments import PATH, SWITCH, TEXT, real, several, text, whole
from tokenbus.cli.console.flags import Parser
from tokenbus.replay import generators, traces
from tokenbus.replay.load.points import LoadKind, LoadPoint, Plan
from tokenbus.replay.load.workload import MIN_VOCABULARY, RandomTokens, RepeatedText, TraceWorkload, Workload

_MAX_POINTS = 64
_MAX_CLIENTS = 16_384
TO_STANDARD_OUTPUT = Path("-")


_CLIENTS = several(whole(1, _MAX_CLIENTS), _MAX_POINTS)
_FACTORS = several(real(0.001, 100_000), _MAX_POINTS)
_TOKENS = whole(1, 10**7)


def add_flags(parser: Parser) -> None:
    """Adds all flags except those of the connection to the broker."""
    flag = parser.group("run")
    flag.add(session.MODEL)
    flag("--json", PATH, "write the results as JSON; - writes to standard output")
    flag("--html", PATH, "write a page of tables and plots")
    flag = parser.group("load (one run for each number)")
    flag("--concurrency --max-concurrency", _CLIENTS, "clients that each wait for their answer", unset="1")
    flag("--rate --request-rate", _FACTORS, "requests per second, however many are in flight")
    flag("--speedup", _FACTORS, "how many times faster than in the trace", unset="1")
    flag("--burst", whole(1, 10_000), "with --rate: requests sent at once", 1)
    in_flight = "with --rate or --speedup: requests beyond this many are counted as not sent"
    flag("--max-in-flight", whole(1, _MAX_CLIENTS), in_flight, 1_024)
    flag("--requests --num-prompts", whole(1, 10**9), "requests of each run", unset="100, or the whole trace")
    flag("--duration-s", real(0.1, 1e6, "SECONDS"), "how long each run sends requests", unset="no limit")
    flag("--warmup --num-warmups", whole(0, 10_000), "requests before each run", 1)
    flag = parser.group("requests (random tokens by default)")
    flag("--input-tokens --random-input-len", _TOKENS, "tokens of a prompt", unset="128")
    flag("--output-tokens --random-output-len", _TOKENS, "tokens of an answer", unset="64")
    trace = f"a file in Mooncake's format, or one of {', '.join(generators.DEFAULTS)}[:SETTING=VALUE,...]"
    flag("--trace", text("TRACE"), trace)
    flag("--clip", SWITCH, "clip requests that exceed the model's context instead of skipping them")
    flag("--prompt -p", TEXT, "send this text instead, through the chat template")
    flag("--vocabulary", whole(MIN_VOCABULARY, 1 << 24), "token ids stay below this", 400)
    flag("--temperature --temp", real(0, 100), "sampling temperature", 0.0)
    flag("--timeout-ms", real(1, 1e9, "MS"), "timeout of each request")
    flag("--seed -s", whole(0, (1 << 32) - 1), "seed of prompts, times and workloads", 0)
    flag("--reuse-cache", SWITCH, "let a run hit what earlier runs have left in the prefix cache")


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


def _trace(spec: str, seed: int) -> list[traces.TracedRequest]:
    try:
        return generators.load(spec, seed)
    except OSError as error:
        raise ValueError(f"{spec} can't be read: {error.strerror}") from error


def _check_writable(path: Path) -> None:
    """Checks in advance that an output file is writable, so that no measurement is wasted."""
    target = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(target, os.W_OK):
        raise ValueError(f"{path} can't be written")
