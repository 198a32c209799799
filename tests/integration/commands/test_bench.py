"""`tokenbus bench` against a running system, used like by a person or a script."""

import asyncio
import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import structlog

from tests.support.exact_client import cards, until_idle
from tests.support.raw_client import RawClient
from tests.support.system import command
from tokenbus.cli import main


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Bench = Callable[..., Done]


@pytest.fixture
def bench(url: str, capsys: pytest.CaptureFixture[str]) -> Iterator[Bench]:
    """Runs the command in this process, since starting one would take longer than most benchmarks here."""

    def run_here(*arguments: str) -> Done:
        status = main._run(["bench", "--nats", url, "--model", "demo", *arguments])
        return Done(status, *capsys.readouterr())

    yield run_here
    structlog.reset_defaults()


def runs(done: Done) -> list[dict[str, Any]]:
    """Returns the runs in the JSON output."""
    found: list[dict[str, Any]] = json.loads(done.stdout)["runs"]
    return found


def test_a_sweep_of_clients_is_measured_printed_and_written(bench: Bench, tmp_path: Path) -> None:
    numbers, page = tmp_path / "numbers.json", tmp_path / "page.html"
    files = ["--json", str(numbers), "--html", str(page)]
    done = bench("--concurrency", "1,3", "--requests", "6", "--output-tokens", "5", *files)
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 at a time" in done.stdout
    assert "time to first token" in done.stdout
    report = json.loads(numbers.read_bytes())
    assert [(run["load"], run["value"]) for run in report["runs"]] == [("concurrency", 1.0), ("concurrency", 3.0)]
    for one in report["runs"]:
        assert (one["sent"], one["finished"], one["finish_reasons"]) == (6, 6, {"length": 6})
        assert (one["peak_in_flight"], one["output_tokens"]) == (one["value"], 30)
        assert (one["prompt_tokens"], sum(one["workers"].values())) == (6 * 128, 6)
        assert 0 < one["accept_ms"]["p50"] <= one["ttft_ms"]["max"] <= one["e2e_ms"]["max"]
        assert one["ttft_ms"]["p50"] <= one["ttft_ms"]["p99"] <= one["ttft_ms"]["max"]
    assert page.read_text().count("<svg") >= 9


def test_open_loop_does_not_wait_and_counts_what_it_could_not_send(bench: Bench) -> None:
    (one,) = runs(bench("--json", "-", "--rate", "2000", "--burst", "10", "--max-in-flight", "4", "--requests", "20"))
    assert (one["sent"] + one["not_sent"], one["peak_in_flight"]) == (20, 4)
    assert one["not_sent"] >= 6
    assert one["finished"] == one["sent"]


def test_a_trace_shares_prefixes_within_a_run_and_with_no_earlier_one(bench: Bench) -> None:
    trace = "shared:requests=6,groups=1,shared_tokens=256,prompt_tokens=16,output_tokens=2,rate=50"
    same = ("--json", "-", "--trace", trace, "--concurrency", "1,1", "--warmup", "0")
    for one in runs(bench(*same)):
        assert one["finished"] == 6
        assert 0 < one["cached_tokens"] <= one["prompt_tokens"] - 256
    assert runs(bench(*same, "--reuse-cache"))[1]["cached_share"] > 0.9


def test_a_text_is_asked_until_its_time_is_over(bench: Bench) -> None:
    (one,) = runs(bench("--json", "-", "--prompt", "What is 20 + 22?", "--duration-s", "0.3"))
    assert one["finish_reasons"] == {"stop": one["sent"]}
    assert one["duration_s"] > 0.2


def test_errors_are_counted_by_code_and_fail_the_command(bench: Bench) -> None:
    done = bench("--json", "-", "--timeout-ms", "1", "--requests", "2", "--output-tokens", "900")
    (one,) = runs(done)
    assert (done.returncode, one["errors"]) == (1, {"deadline_exceeded": 2})
    assert (one["finished"], one["failed"], one["e2e_ms"]["mean"]) == (0, 2, None)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--vocabulary", "100000"), "the first request was refused: invalid_request: token_ids["),
        (("--input-tokens", "5000"), "--input-tokens 5000 and --output-tokens 64 do not fit the model's context of "),
        (("--model", "nobody"), "no worker serves 'nobody'; served models: demo"),
    ],
)
def test_what_can_not_be_measured_is_said_in_one_line(bench: Bench, arguments: tuple[str, ...], line: str) -> None:
    done = bench(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"tokenbus: {line}")
    assert len(done.stderr.splitlines()) == 1


def test_loads_that_exclude_each_other_are_a_mistake_of_the_command_line(bench: Bench) -> None:
    said = "tokenbus: --concurrency and --rate exclude each other\n"
    assert bench("--rate", "1", "--concurrency", "1") == (2, "", said)


async def until_busy(bare: RawClient) -> None:
    async with asyncio.timeout(60):
        while not any(card["load"]["running"] for card in await cards(bare)):
            await asyncio.sleep(0.02)


async def test_ctrl_c_cancels_what_is_in_flight_and_prints_what_was_measured(
    url: str, bare: RawClient, tmp_path: Path
) -> None:
    arguments = ["--output-tokens", "1500", "--concurrency", "4", "--duration-s", "60", "--warmup", "0"]
    numbers = tmp_path / "numbers.json"
    await until_idle(bare)  # else what an earlier test has left would be taken for the requests of this command
    process = subprocess.Popen(
        command("bench", "--model", "demo", "--nats", url, *arguments, "--json", str(numbers)),
        stdout=subprocess.PIPE,
        text=True,
    )
    await until_busy(bare)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in printed
    (one,) = json.loads(numbers.read_bytes())["runs"]
    assert one["interrupted"]
    assert one["sent"] == one["finished"] + one["cancelled"]
    await until_idle(bare)
