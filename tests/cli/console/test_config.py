"""Settings come from flags, variables and a file under the same names, and unknown ones are refused."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenbus.cli import main
from tokenbus.cli.console import catalog, config
from tokenbus.cli.console.flags import UsageError

FILE = """
[nats]
url = "nats://there:4222"
user = "worker-demo"

[worker]
model = ["a.gguf", "b.gguf"]
max-num-seqs = 32
priority-s = 1.5
metrics-port = "9100-9110"

[router]
tenant-limit = "8,600,100000"
tenant-limit-for = ["acme=1,2,3"]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokenbus.toml"
    path.write_text(FILE)
    return path


def test_a_file_sets_what_no_flag_does(file: Path) -> None:
    options = main.parse(["worker", "--config", str(file), "--priority-s", "2"])
    assert options.nats == "nats://there:4222"
    assert options.nats_user == "worker-demo"
    assert options.model == ["a.gguf", "b.gguf"]
    assert (options.max_num_seqs, options.priority_s) == (32, 2.0)
    assert options.metrics_port == range(9100, 9111)
    router = main.parse(["router", "--config", str(file)])
    assert router.tenant_limit == (8, 600.0, 100_000.0)
    assert router.tenant_limit_for == [("acme", (1, 2.0, 3.0))]


def test_a_flag_for_the_file_without_one_is_a_mistake_like_any_other() -> None:
    with pytest.raises(UsageError, match=r"^--config needs a value"):
        main.parse(["router", "--config"])


def test_a_list_of_flags_takes_the_place_of_the_file_s(file: Path) -> None:
    assert main.parse(["worker", "--config", str(file), "--model", "c.gguf"]).model == ["c.gguf"]


def test_a_variable_goes_before_the_file_and_a_flag_before_the_variable(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENBUS_WORKER_MAX_NUM_SEQS", "64")
    monkeypatch.setenv("TOKENBUS_NATS_USER", "somebody")
    monkeypatch.setenv("TOKENBUS_CONFIG", str(file))
    options = main.parse(["worker"])
    assert (options.max_num_seqs, options.nats_user) == (64, "somebody")
    assert main.parse(["worker", "--max-num-seqs", "5"]).max_num_seqs == 5


def test_without_a_file_everything_is_as_it_was() -> None:
    assert main.parse(["router"]).max_queued_requests == 1_024
    assert main.parse(["worker", "--model", "a.gguf"]).served_name == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[worker]\nmax-num-seq = 3", "max-num-seq is not a setting of [worker]; did you mean max-num-seqs?"),
        ("[worker]\nmax-model-len = 3", "max-model-len is not a setting of [worker]; it is called context-length here"),
        ("[nats]\nurls = 3", "urls is not a setting of [nats]; known settings"),
        ("[wroker]\n", "unknown table [wroker]"),
        ("worker = 3", "worker must be a table"),
        ('[worker]\nmax-num-seqs = "many"', "max-num-seqs must be a whole number, got 'many'"),
        ("[worker]\nmax-num-seqs = 1.5", "max-num-seqs must be a whole number, got '1.5'"),
        ("[worker]\nmax-num-seqs = [1]", "max-num-seqs must be a single value"),
        ('[worker]\nmetrics-port = "70000"', "must be 0 to 65535"),
        ("[worker", "Expected"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as refusal:
        main.parse(["worker", "--config", str(path)])
    assert complaint in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_what_is_shown_can_be_read_again(file: Path, tmp_path: Path) -> None:
    shown = "\n".join(shown_settings(name, file) for name in ("worker", "router"))
    again = tmp_path / "again.toml"
    again.write_text(shown)
    for name in ("worker", "router"):
        asked = vars(main.parse([name, "--config", str(again)]))
        expected = vars(main.parse([name, "--config", str(file)]))
        assert {key: value for key, value in asked.items() if key not in ("config", "run", "reload", "reloads")} == {
            key: value for key, value in expected.items() if key not in ("config", "run", "reload", "reloads")
        }


def shown_settings(name: str, file: Path) -> str:
    parser = catalog.make_parser(name)
    return config.show(parser, name, config.apply(parser, name, config.read(file), str(file)))


def test_the_command_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text("[router]\npolice = 1")
    command = [sys.executable, "-m", "tokenbus.cli.start", "config", "check", "--file", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()})
    assert done.returncode == 2
    assert done.stderr.startswith(f"tokenbus: {path}: police is not a setting of [router]")
    assert done.stderr.count("\n") == 1


def test_a_key_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "secret.toml"
    path.write_text('[gateway]\napi-key = ["sk-very-secret=acme"]\n')
    shown = shown_settings("gateway", path)
    assert 'api-key = ["..."]' in shown
    assert "very-secret" not in shown


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[router]\npolicy = "nobody"', "--policy must be one of"),
        ('[router]\notlp-traces-endpoint = "ftp://u:secret@host"', "--otlp-traces-endpoint must be a URL"),
        ('[gateway]\napi-key = ["no-tenant="]', "must be key=tenant"),
        ("[gateway]\nmax-requests = 0", "max-requests must be 1 or more"),
        ('[worker]\nmodel = ["demo"]\ngrace-s = nan', "grace-s must be 0 to 86,400, got nan"),
        ('[worker]\nmodel = ["demo"]\nthreads = -1', "threads must be 0 to 4,096"),
        ("[worker]\nmax-num-seqs = 4", "--model"),
        ('[nats]\ncreds = "/nowhere"\n[router]\n', "/nowhere"),
    ],
)
def test_a_check_finds_what_a_process_would_not_start_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, complaint: str
) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    assert main._run(["config", "check", "--file", str(path)]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert "secret" not in said.replace(str(path), "")
    assert said.count("\n") == 1


def test_a_check_needs_no_password(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "right.toml"
    path.write_text('[nats]\nuser = "someone"\n[auth]\nkeys = "bucket"\n[router]\n')
    assert main._run(["config", "check", "--file", str(path)]) == 0, capsys.readouterr().err


def test_every_mistake_in_a_file_and_in_the_variables_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenbus.toml"
    path.write_text('[worker]\nmodel = ["a"]\nnonsense = 3\nmax-num-seqs = "x"\n[other]\na = 1\n')
    done = run("config", "check", "--file", str(path), TOKENBUS_WORKER_THREADS="many")
    assert done.returncode == 2
    for part in (
        "nonsense is not a setting of [worker]",
        "max-num-seqs must be a whole number",
        "unknown table [other]",
    ):
        assert done.stderr.count(part) == 1
    assert "TOKENBUS_WORKER_THREADS must be a whole number" in done.stderr
    assert all(line.startswith("tokenbus: ") for line in done.stderr.splitlines())


def test_a_file_that_is_not_utf_8_is_refused_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "tokenbus.toml"
    path.write_bytes(b"[worker]\n\xff")
    done = run("config", "check", "--file", str(path))
    assert (done.returncode, done.stderr) == (2, f"tokenbus: {path}: is not UTF-8 (byte 10)\n")


@pytest.mark.parametrize(
    ("arguments", "variable", "meant"),
    [
        (("config", "show", "worker"), "TOKENBUS_WORKER_MAX_NUM_SEQ", "TOKENBUS_WORKER_MAX_NUM_SEQS"),
        (("config", "show", "worker"), "TOKENBUS_GATEWAY_MAX_REQUEST", "TOKENBUS_GATEWAY_MAX_REQUESTS"),
        (("generate", "--model", "a", ""), "TOKENBUS_NATS_PASWORD", "TOKENBUS_NATS_PASSWORD"),
        (("generate", "--model", "a", ""), "TOKENBUS_NATS_URL", "TOKENBUS_NATS"),
        (("config", "show", "worker"), "TOKENBUS_ACME_PASSWORD", ""),
    ],
)
def test_a_variable_that_is_nearly_one_is_told_of(arguments: tuple[str, ...], variable: str, meant: str) -> None:
    said = run(*arguments, **{variable: "1"}).stderr
    assert (f"the variable {variable} is unknown: did you mean {meant}?" in said) == bool(meant)
    assert (variable in said) == bool(meant)


def test_the_keys_in_the_gateway_s_variable_are_counted_and_not_shown() -> None:
    said = run("config", "show", "gateway", TOKENBUS_API_KEYS="secret=a,other=b").stdout
    assert "# 2 more API keys are in the variable TOKENBUS_API_KEYS" in said
    assert "secret" not in said


def test_the_version_is_told() -> None:
    assert run("--version").stdout == f"tokenbus {importlib.metadata.version('tokenbus')}\n"


def test_an_argument_that_is_not_utf_8_is_refused_in_a_line() -> None:
    done = run("generate", "--model", "demo", os.fsdecode(b"a\xff"))
    assert (done.returncode, done.stderr) == (2, "tokenbus: argument 4 is not UTF-8: 'a\\udcff'\n")


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenbus.cli.start", *arguments]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", [("config", "show"), ("help", "worker"), ("--version",)])
def test_a_full_disk_is_one_line_and_a_status(command: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "tokenbus.cli.start", *command]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = "tokenbus: the output can't be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_pipe_without_a_reader_ends_a_command_in_silence() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-m", "tokenbus.cli.start", "config", "show"]
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ((), 0, ""),
        (("help",), 0, ""),
        (("help", "chat"), 0, ""),
        (("generat",), 2, "tokenbus: no such command generat; did you mean generate? `tokenbus help` lists all"),
        (("help", "xyz"), 2, "tokenbus: no such command xyz; `tokenbus help` lists all"),
        (("-x",), 2, "tokenbus: options follow the command: tokenbus COMMAND -x; `tokenbus help` lists all"),
        (("session", "s"), 2, "tokenbus session: needs --keep-s or --end; `tokenbus session --help` lists all"),
        (("config", "foo"), 2, "tokenbus config: ACTION must be check or show, got foo"),
        (("generate",), 2, "tokenbus generate: needs PROMPT; `tokenbus generate --help` lists all"),
    ],
)
def test_a_mistake_in_a_command_is_one_line_with_status_2(
    arguments: tuple[str, ...], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main._run([*arguments]) == status
    said = capsys.readouterr()
    assert said.err == (f"{says}\n" if says else "")
    assert bool(said.out) == (not says)
