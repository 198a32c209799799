"""`tokenbus replay` is reproducible to the last byte and agrees with real workers."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.system import command, environment

CONVERSATIONS = (
    "conversations:requests=120,rate=10,turns=6,output_tokens=48,think_s=6",
    *("--workers", "3", "--block-size", "16", "--kv-blocks", "2048", "--max-num-seqs", "32"),
)


def replay(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command("replay", *arguments), capture_output=True, text=True, timeout=100, env=environment(), check=False
    )


def test_a_replay_is_the_same_twice_to_the_last_byte_and_draws_its_plots(tmp_path: Path) -> None:
    written = []
    for name, jobs in (("one", "2"), ("two", "1")):
        path = tmp_path / f"{name}.json"
        plots = tmp_path / f"{name}.html"
        chosen = ("--policy", "kv,random", "--jobs", jobs, "--json", str(path), "--html", str(plots))
        done = replay(*CONVERSATIONS, *chosen)
        assert done.returncode == 0, done.stderr
        assert "hit rate" in done.stdout
        assert plots.read_text().count("<svg") == 5
        written.append(path.read_bytes())
    assert written[0] == written[1]
    said = json.loads(written[0])
    assert [run["policy"] for run in said["runs"]] == ["kv", "random"]
    for run in said["runs"]:
        assert sum(run["requests_per_worker"]) == 120
        assert {"mean", "p50", "p99"} <= run["ttft_ms"].keys() & run["itl_ms"].keys()


@pytest.mark.long
def test_offline_and_live_agree_on_the_hit_rate_of_the_same_placements(tmp_path: Path) -> None:
    # what `kv` chooses depends on the waits of the moment, and those on what else the machine does
    found = []
    for mode in ((), ("--live", "--sim-speedup", "12")):
        path = tmp_path / "numbers.json"
        done = replay(*CONVERSATIONS, "--policy", "round_robin", *mode, "--json", str(path))
        assert done.returncode == 0, done.stderr
        (run,) = json.loads(path.read_bytes())["runs"]
        found.append((run["hit_rate"], run["requests_per_worker"]))
    assert found[0][0] == pytest.approx(found[1][0], abs=0.002)
    assert found[0][1] == found[1][1] == [40, 40, 40]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nothing",), "neither a file nor one of the workloads"),
        (("shared", "--policy", "best"), "there is no 'best', only kv, least_loaded, round_robin, random"),
        (("shared", "--workers", "0"), "--workers must be 1 to 4,096, got 0"),
        (("shared", "--kv-blocks", "4", "--block-size", "16"), "more than --kv-blocks x --block-size: 64"),
        (("shared", "--speeds", "1,x"), "--speeds must be comma-separated"),
        (("shared", "--live", "--routers", "2"), "--live runs one router"),
    ],
)
def test_what_can_not_be_replayed_is_one_line_that_says_why(arguments: tuple[str, ...], said: str) -> None:
    done = replay(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
