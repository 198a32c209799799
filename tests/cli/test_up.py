"""The settings of `tokenbus up`: what its processes are started with, and which mistakes are found before."""

import argparse
import socket
from pathlib import Path

import pytest

from tokenbus.cli.commands import up, worker
from tokenbus.cli.console import catalog, config
from tokenbus.cli.console.supervisor import StartError
from tokenbus.demo import MODEL_PATH, ONNX_PATH


def settings(*words: str) -> up.SystemSettings:
    return up.settings_of(catalog.make_parser("up").parse_args(list(words)))


def worker_options(*words: str) -> argparse.Namespace:
    """The options of a worker as its process reads them."""
    command, *arguments = settings(*words).arguments.worker
    return config.parse(catalog.make_parser(command), command, arguments)


def test_models_are_positional_or_flags_and_the_default_is_the_demo() -> None:
    assert settings(str(MODEL_PATH)).names == ["demo"]
    assert worker_options(str(MODEL_PATH), "--workers", "1", str(ONNX_PATH)).model == [str(MODEL_PATH), str(ONNX_PATH)]
    assert worker_options("--model", "demo", "-a", "name").served_name == ["name"]
    assert (settings().names, worker_options().model) == (["demo"], [str(MODEL_PATH)])
    assert worker_options("--engine", "onnx").model == [str(ONNX_PATH)]


def test_settings_of_workers_reach_them() -> None:
    options = worker_options(
        "-c", "512", "-ngl", "0", "--max-num-seqs", "3", "--cache-type-k", "q8_0", "--threads", "2"
    )
    assert (options.context_length, options.gpu_layers, options.max_num_seqs) == (512, 0, 3)
    assert (options.cache_type_k, options.threads) == ("q8_0", 2)


def test_an_audit_log_is_that_of_workers_and_router_and_needs_somewhere_to_be_kept() -> None:
    found = settings("--audit", "--audit-days=30", "--keys").arguments
    for arguments in (found.worker, found.router):
        assert {"--audit", "--audit-days=30"} <= {*arguments}
    assert "--audit" not in settings("--keys").arguments.router
    assert "--audit" in settings("--audit", "--nats=nats://elsewhere:4222").arguments.router
    with pytest.raises(ValueError, match="--audit needs a broker with JetStream"):
        settings("--audit")


def test_workers_share_the_machine_and_stop_soon_unless_told_otherwise() -> None:
    options = worker_options("--workers", "4", "--prefill-workers", "1")
    assert (options.memory_share, options.grace_s, options.handover_s) == (0.25, 10, 3)
    assert worker_options("--memory-share", "1", "--grace-s", "30").memory_share == 1
    assert (settings().grace_s, settings().stop_s) == (10, 18)
    assert (settings("--grace-s", "30").grace_s, settings("--grace-s", "30").stop_s) == (30, 38)


def test_a_file_has_settings_of_all_processes_and_flags_override_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tokenbus.toml"
    file.write_text(
        f'[worker]\nmodel = ["{MODEL_PATH}"]\nserved-name = ["file"]\nmax-num-seqs = 5\ngrace-s = 20\n'
        '[gateway]\nport = 8123\nhost = "0.0.0.0"\n[router]\nhold-s = 7\n'
    )
    found = settings("--config", str(file))
    assert (found.names, found.port, found.host, found.grace_s) == (["file"], 8123, "0.0.0.0", 20)
    assert f"--config={file}" in found.arguments.router
    assert worker_options("--config", str(file)).max_num_seqs == 5
    assert worker_options("--config", str(file)).grace_s == 20
    default = str(worker_options().max_num_seqs)
    assert worker_options("--config", str(file), "--max-num-seqs", default).max_num_seqs == int(default)
    monkeypatch.setenv("TOKENBUS_WORKER_MAX_NUM_SEQS", "6")
    assert worker_options("--config", str(file)).max_num_seqs == 6
    asked = settings("--config", str(file), "--gateway-port", "0", "--host", "::1")
    assert (asked.port, asked.host) == (0, "::1")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--workers", "1", "--prefill-workers", "1"], "--prefill-workers must be less"),
        (["--pin", "other", "--idle-unload-s", "5"], "--pin other: is not served here"),
        (["--devices", "a", "--devices", "b"], "--devices was given 2 times"),
        (["--config", "/nothing.toml"], "/nothing.toml: "),
        (["--otlp-traces-endpoint", "ftp://x"], "ftp://x"),
    ],
)
def test_wrong_settings_are_found_before_anything_is_started(words: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        settings(*words)


def test_every_mistake_in_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tokenbus.toml"
    file.write_text("[gateway]\nprot = 1\n")
    with pytest.raises(ValueError, match=r"prot is not a setting of \[gateway\]; did you mean port\?"):
        settings("--config", str(file))


def test_models_and_adapters_are_looked_for_before_anything_is_started(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"no adapter")
    for words, problem in (
        (["nothing.gguf"], "nothing.gguf: there is no such file"),
        (["--lora", "a=/nothing"], "--lora a: /nothing: there is no such file or folder"),
        (["--lora", f"a={tmp_path}/no.gguf"], "not a GGUF file"),
        (["--lora-dir", "/nothing@acme"], "--lora-dir: /nothing is not a folder"),
    ):
        with pytest.raises(StartError, match=problem):
            settings(*words)


def test_what_the_system_chooses_is_no_flag() -> None:
    for flag in ("--role", "--worker-id", "--inbox-prefix"):
        assert flag.removeprefix("--") in catalog.make_parser("worker").flags
        with pytest.raises(ValueError, match=f"no such option {flag}"):
            settings(flag, "x")


def test_without_a_port_the_first_free_one_is_taken_and_said() -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as other:
        candidates = (taken.getsockname()[1], other.getsockname()[1], 0)
        with up.listen_on("127.0.0.1", None, said.append, candidates) as listening:
            assert listening.getsockname()[1] not in candidates
        assert said == [f"port {candidates[0]} is taken: the HTTP API is on port 0"]
        with pytest.raises(StartError, match=f"the ports {candidates[0]} to {candidates[1]} are taken"):
            up.listen_on("127.0.0.1", None, said.append, candidates[:2])
        with pytest.raises(StartError, match="--gateway-port 0 for a free port"):
            up.listen_on("127.0.0.1", candidates[0], said.append)
        with up.listen_on("127.0.0.1", None, said.append, (0,)):
            assert len(said) == 1


def test_a_worker_alone_keeps_its_own_defaults() -> None:
    parser = catalog.make_parser("worker")
    options = parser.parse_args(["--model", "demo"])
    assert (options.memory_share, options.grace_s) == (1, 30)
    assert worker.names_of(options) == ["demo"]
