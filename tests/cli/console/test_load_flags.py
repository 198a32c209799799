"""The flags of `tokenbus bench` together: what they mean, and the errors for combinations that make no sense."""

import argparse
from pathlib import Path

import pytest

from tokenbus.cli.console.flags import Parser, UsageError
from tokenbus.cli.console.load_flags import add_flags, plan_of
from tokenbus.replay.load.points import LoadKind, LoadPoint, Plan
from tokenbus.replay.load.workload import RandomTokens, RepeatedText, TraceWorkload


def parsed(*arguments: str) -> argparse.Namespace:
    parser = Parser("bench")
    add_flags(parser)
    options: argparse.Namespace = parser.parse_args(["--model", "m", *arguments])
    return options


def plan(*arguments: str) -> Plan:
    return plan_of(parsed(*arguments))


def test_without_flags_one_client_sends_random_tokens() -> None:
    made = plan()
    assert made.points == (LoadPoint(LoadKind.CONCURRENCY, 1.0),)
    assert made.workload == RandomTokens(128, 64, 400)
    assert made.requests_at(made.points[0], made.workload) == 100


@pytest.mark.parametrize(
    ("arguments", "points"),
    [
        (("--concurrency", "1,2,8"), [(LoadKind.CONCURRENCY, 1), (LoadKind.CONCURRENCY, 2), (LoadKind.CONCURRENCY, 8)]),
        (("--rate", "0.5,10"), [(LoadKind.RATE, 0.5), (LoadKind.RATE, 10)]),
        (("--trace", "shared"), [(LoadKind.SPEEDUP, 1)]),
        (("--trace", "shared", "--speedup", "2"), [(LoadKind.SPEEDUP, 2)]),
        (("--trace", "shared", "--rate", "3"), [(LoadKind.RATE, 3)]),
    ],
)
def test_each_number_is_a_run(arguments: tuple[str, ...], points: list[LoadPoint]) -> None:
    assert list(plan(*arguments).points) == points


@pytest.mark.parametrize(
    ("arguments", "requests"),
    [
        (("--concurrency", "64"), 640),
        (("--rate", "64"), 100),
        (("--requests", "7"), 7),
        (("--duration-s", "3"), None),
        (("--duration-s", "3", "--requests", "7"), 7),
        (("--trace", "shared:requests=30"), 30),
        (("--trace", "shared:requests=30", "--requests", "7"), 7),
        (("--trace", "shared:requests=30", "--requests", "70"), 30),
    ],
)
def test_the_number_of_requests_of_a_run(arguments: tuple[str, ...], requests: int | None) -> None:
    made = plan(*arguments)
    assert made.requests_at(made.points[0], made.workload) == requests


def test_a_text_or_a_trace_replaces_random_tokens() -> None:
    assert plan("--prompt", "hello", "--output-tokens", "9").workload == RepeatedText("hello", 9)
    traced = plan("--trace", "shared:requests=5", "--vocabulary", "50").workload
    assert isinstance(traced, TraceWorkload)
    assert (traced.num_requests, traced.vocabulary) == (5, 50)


def test_a_trace_can_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [3]}\n')
    assert plan("--trace", str(path)).workload.describe() == "1 requests of trace.jsonl"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--concurrency", "1", "--rate", "1"), "--concurrency and --rate exclude each other"),
        (("--prompt", "x", "--input-tokens", "1"), "--prompt and --input-tokens exclude each other"),
        (("--trace", "shared", "--output-tokens", "1"), "--trace and --output-tokens exclude each other"),
        (("--speedup", "2"), "--speedup needs a --trace"),
        (("--burst", "2"), "--burst needs --rate"),
        (("--concurrency", "4", "--requests", "3"), "--requests 3 is less than --concurrency 4"),
        (("--prompt", ""), "the prompt is empty"),
        (("--trace", "nothing"), "'nothing' is neither a file nor one of the workloads"),
        (("--trace", "shared:x=1"), "shared has no setting 'x'"),
        (("--trace", "/"), "'/' is neither a file nor one of the workloads"),
        (("--json", "/nowhere/at/all.json"), "/nowhere/at/all.json can't be written"),
        (("--html", "/"), "/ can't be written"),
    ],
)
def test_contradicting_flags_are_named(arguments: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}"):
        plan(*arguments)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--concurrency", "0"), "--concurrency must be 1 to 16,384, got 0"),
        (("--concurrency", "1,1.5"), "--concurrency must be comma-separated numbers, got '1,1.5'"),
        (("--rate", "1,,2"), "--rate must be comma-separated numbers, got '1,,2'"),
        (("--rate", "nan"), "--rate must be 0.001 to 100,000, got nan"),
        (("--rate", ",".join("1" * 65)), "--rate must be at most 64 numbers, got 65"),
        (("--warmup", "-1"), "--warmup must be 0 to 10,000, got -1"),
        (("--duration-s", "inf"), "--duration-s must be 0.1 to 1,000,000, got inf"),
        (("--input-tokens", "x"), "--input-tokens must be a whole number, got 'x'"),
    ],
)
def test_an_invalid_number_is_named(arguments: tuple[str, ...], reason: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parsed(*arguments)
    assert str(refusal.value) == reason
