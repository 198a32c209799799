"""The command line, used like by a person or a script."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import broken_models
from tests.support.doc_samples import sample, skeleton
from tests.support.system import command
from tokenbus import demo
from tools.demo_model import tool_definitions

as_users_do = pytest.mark.usefixtures("executed")
"""Python is executed, and not forked."""


def tokenbus(url: str, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TOKENBUS_NATS": url}
    return subprocess.run(
        command(*arguments), env=environment, input=stdin, capture_output=True, text=True, timeout=60, check=False
    )


@as_users_do
def test_generate_prints_the_answer_and_its_end_apart(url: str) -> None:
    done = tokenbus(url, "generate", "--model", "demo", "--temperature", "0", "What is 20 + 22?")
    assert done.returncode == 0
    assert done.stdout == "20 + 22 = 42.\n"
    assert done.stderr.startswith("[stop, 14 + 12 tokens, first after ")


def test_generate_reads_the_prompt_from_standard_input(url: str) -> None:
    arguments = ["generate", "--model", "demo", "--raw", "--temperature", "0", "--max-tokens", "3", "-"]
    assert tokenbus(url, *arguments, stdin="12 + 30 =").stdout == " 42\n"


def test_generate_json_prints_the_raw_messages(url: str) -> None:
    done = tokenbus(url, "generate", "--model", "demo", "--json", "--max-tokens", "4", "hello")
    chunks = [json.loads(line) for line in done.stdout.splitlines()]
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1]["usage"]["completion_tokens"] == 4


def test_generate_prints_calls_as_lines_and_reasoning_apart(url: str, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([tool_definitions.definition("get_weather")]))
    arguments = ("generate", "--model", "demo", "--temperature", "0", "--tools", str(tools))
    done = tokenbus(url, *arguments, "--thinking", "on", "What is the weather in Limora?")
    called = json.loads(done.stdout)
    assert (called["name"], json.loads(called["arguments"])) == ("get_weather", {"city": "Limora"})
    reasoning, end = done.stderr.splitlines()
    assert reasoning == "I need the weather in Limora, so I call get_weather."
    assert end.startswith("[tool_calls, ")


def test_generate_follows_a_schema_in_a_file(url: str, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["red", "green"]}')
    done = tokenbus(url, "generate", "--model", "demo", "--schema", str(schema), "Which color?")
    assert done.stdout in ('"red"\n', '"green"\n')
    schema.write_text('{"enum": [')
    done = tokenbus(url, "generate", "--model", "demo", "--schema", str(schema), "Which color?")
    assert done.returncode == 1
    assert done.stderr.startswith(f"tokenbus: {schema} is not JSON: ")


def test_trace_tells_where_a_request_went_and_lists_the_last_ones(url: str) -> None:
    done = tokenbus(url, "generate", "--model", "demo", "--json", "--max-tokens", "4", "hello")
    last = json.loads(done.stdout.splitlines()[-1])
    told = tokenbus(url, "trace", f"chatcmpl-{last['id']}").stdout.splitlines()
    assert told[0] == f"{last['id']}, a request for demo"
    assert told[-1].startswith("- It ended after ")
    assert any(last["worker_id"] in line for line in told)
    newest = json.loads(tokenbus(url, "trace", "--json", "--limit", "1").stdout)
    assert newest["id"] == last["id"]
    assert newest["completion_tokens"] == 4
    assert last["id"] in tokenbus(url, "trace").stdout
    unknown = tokenbus(url, "trace", "never-was")
    assert unknown.returncode == 1
    assert unknown.stderr.startswith("tokenbus: no router knows this request of the tenant default")
    assert tokenbus(url, "trace", "--failed", "never-was").returncode == 2


def test_an_empty_prompt_is_refused_before_it_is_asked(url: str) -> None:
    done = tokenbus(url, "generate", "--model", "demo", "")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "tokenbus: the prompt is empty\n")


def test_an_error_is_one_line_and_a_status(url: str) -> None:
    done = tokenbus(url, "generate", "--model", "nobody", "hello")
    assert done.returncode == 1
    assert done.stderr.splitlines() in (
        ["tokenbus: no_worker: nothing serves 'nobody' now; served models: demo"],
        ["tokenbus: model_not_found: no worker has ever served 'nobody'; served models: demo"],
    )


@as_users_do
def test_no_broker_is_one_line_that_says_what_to_do() -> None:
    done = tokenbus("nats://127.0.0.1:1", "models")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "no NATS broker at nats://127.0.0.1:1" in line
    assert "--nats" in line


def test_models_lists_what_is_served(url: str) -> None:
    expected = [skeleton(line.removesuffix("...")) for line in sample("operations.md", "tokenbus models")]
    missing, until = expected, time.monotonic() + 10
    while missing and time.monotonic() < until:  # its memory is told a moment after a worker is ready
        said = [*map(skeleton, tokenbus(url, "models").stdout.splitlines())]
        missing = [line for line in expected if not any(printed.startswith(line) for printed in said)]
    assert missing == []
    reply = json.loads(tokenbus(url, "models", "--json").stdout)
    assert [served["model"] for served in reply["models"]] == ["demo"]


@as_users_do
def test_ctrl_c_cancels_the_request(url: str) -> None:
    arguments = [
        "generate",
        "--model",
        "demo",
        "--json",
        "--id",
        "interrupted",
        "--raw",
        "--max-tokens",
        "1900",
        "Once",
    ]
    process = subprocess.Popen(
        command(*arguments), env=os.environ | {"TOKENBUS_NATS": url}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    process.send_signal(signal.SIGINT)
    lines += process.stdout.readlines()
    process.stdout.close()
    assert process.wait(timeout=60) == 130
    assert json.loads(lines[-1])["finish_reason"] == "cancelled"


def test_cancel_of_an_unknown_id_says_so(url: str) -> None:
    done = tokenbus(url, "cancel", "nobody")
    assert done.returncode == 1
    assert done.stderr == "tokenbus: no worker or router has a request nobody\n"


def unknown_architecture() -> bytes:
    whole = demo.MODEL_PATH.read_bytes()
    return whole.replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0zzzzz", 1)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (unknown_architecture(), "unknown model architecture: 'zzzzz'; llama-cpp-python"),
        (demo.MODEL_PATH.read_bytes()[:900_000], "fetch the file again"),
        (None, "there is no such file"),
        (b"", "can't be read"),
        (b"not a model at all", "not a GGUF file"),
        (b"GGUF\x03\0\0\0" + b"\0" * 8 + b"\xff" * 30, "corrupt or cut short"),
    ],
    ids=["architecture", "cut short", "missing", "empty", "something else", "corrupt"],
)
def test_up_with_a_bad_model_stops_with_one_line(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    done = subprocess.run(
        command("up", "--port", "0", "--json", "--no-gateway", "--workers", "1", "--model", str(path)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"tokenbus: {path}: ")
    assert reason in last
    # what can be seen without loading is said before anything is started
    is_loaded = bool(content) and content.startswith(b"GGUF")  # type: ignore[union-attr]
    assert done.stderr.startswith("starting; logs: ") == is_loaded


def test_up_gives_up_a_model_whose_engines_die_and_says_why(tmp_path: Path) -> None:
    path = broken_models.with_value(tmp_path / "model.gguf", *broken_models.TOO_MANY_BLOCKS)
    arguments = ("up", "--port", "0", "--json", "--workers", "1", "--no-gateway", "--model", str(path))
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "the engine died 3 times before it could serve" in done.stderr.splitlines()[-1]
    assert "GGML_ASSERT(hparams.n_layer_all > 0" in done.stderr.splitlines()[-1]


def test_up_says_so_when_its_port_is_taken(url: str) -> None:
    port = url.rpartition(":")[2]
    done = subprocess.run(command("up", "--port", port), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "--port 0" in done.stderr.splitlines()[-1]


def test_a_wrong_setting_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tokenbus.cli.start", "up", "--workers", "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--workers" in done.stderr


@as_users_do
def test_chat_keeps_the_conversation_and_starts_over_when_asked(url: str) -> None:
    lines = "What is 20 + 22?\n\n/nonsense\n/new\nWhat is 10 + 3?\n/undo\n"
    done = tokenbus(url, "chat", "--model", "demo", "--temperature", "0", stdin=lines)
    assert done.returncode == 0
    assert done.stdout.startswith("20 + 22 = 42.\n10 + 3 = 13.\n")
    assert "there is no command /nonsense" in done.stderr


def test_chat_with_a_model_that_nobody_serves_says_so(url: str) -> None:
    done = tokenbus(url, "chat", "--model", "nobody", stdin="hello\nhello\n")
    said = "tokenbus: no_worker: nothing serves 'nobody' now; served models: demo\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


def test_top_shows_each_worker_once(url: str) -> None:
    assert "worker-1" in tokenbus(url, "top", "--once", "--interval-s", "0.1").stdout
    (row, other) = json.loads(tokenbus(url, "top", "--json", "--interval-s", "0.1").stdout)
    assert (row["worker_id"], row["model"], row["state"], row["running"]) == ("worker-1", "demo", "ready", 0)
    assert row["total_blocks"] > 0
    assert other["worker_id"] == "worker-2"


def test_input_that_is_not_utf_8_is_refused_in_a_line(url: str) -> None:
    for arguments, what in (
        (("generate", "--model", "demo", "-"), "standard input"),
        (("embed", "--model", "demo", "-"), "standard input"),
        (("chat", "--model", "demo"), "the line"),
    ):
        environment = os.environ | {"TOKENBUS_NATS": url}
        done = subprocess.run(
            command(*arguments), env=environment, input=b"a\xff\n", capture_output=True, timeout=60, check=False
        )
        said = f"tokenbus: {what} is not UTF-8: byte 2 of it is 0xff\n".encode()
        assert (done.returncode, done.stdout, done.stderr) == (1, b"", said)
