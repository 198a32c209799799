"""A folder of safetensors is served like its GGUF, and a worker says in words why it can't serve one."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import safetensors_model
from tests.support.exact_client import until_ready
from tests.support.raw_client import PREFIX
from tests.support.system import System, command
from tokenbus import demo
from tokenbus.worker.convert import quantize

PROMPTS = ("What is 12 + 30?", "What is the capital of Avaria?", "Tell me a story about a fox.")


@pytest.fixture
async def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    system = await System.start(tmp_path)
    yield system
    await system.stop()


def refusal(system: System, *arguments: str) -> str:
    """Returns the last words of a worker that refuses its settings."""
    whole = command("worker", "--nats", system.url, *arguments)
    done = subprocess.run(whole, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    return done.stderr


async def test_a_folder_of_safetensors_answers_as_its_gguf(system: System, tmp_path: Path) -> None:
    quantize.quantize(demo.MODEL_PATH, tmp_path / "tiny-Q8_0.gguf", "q8_0", 1, lambda share: None)
    folder = safetensors_model.write_demo(tmp_path / "tiny")
    system.router("router")
    system.worker("gguf", model=tmp_path / "tiny-Q8_0.gguf", served_name="gguf")
    system.worker("folder", "--quantize", "q8_0", model=folder, served_name="folder")
    bare = await system.connect()
    await until_ready(bare, 2, timeout_s=240.0)
    for prompt in PROMPTS:
        request = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 60}
        expected, got = [await bare.ask(request, subject=f"{PREFIX}.generate.{name}") for name in ("gguf", "folder")]
        assert got.text == expected.text != ""
        ends = [answer.terminals[0] for answer in (expected, got)]
        assert [end["finish_reason"] for end in ends] == [ends[0]["finish_reason"]] * 2
        assert ends[0]["usage"]["prompt_tokens"] == ends[1]["usage"]["prompt_tokens"]
    assert len(list((tmp_path / "home").rglob("tiny-*-Q8_0.gguf"))) == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--quantize", "q9"), "--quantize must be one of f32, f16, bf16, q8_0"),
        (("--quantize", "q8_0"), "FalconForCausalLM is not converted here"),
    ],
)
async def test_a_worker_that_can_not_convert_a_model_says_why_and_ends(
    system: System, tmp_path: Path, arguments: tuple[str, ...], problem: str
) -> None:
    folder = safetensors_model.write_demo(tmp_path / "tiny")
    safetensors_model.set_config(folder, architectures=["FalconForCausalLM"])
    assert problem in refusal(system, "--model", str(folder), *arguments)


async def test_a_gguf_that_is_to_be_quantized_is_refused(system: System) -> None:
    refused = refusal(system, "--model", "demo", "--quantize", "q8_0")
    assert "is already a GGUF file; leave --quantize out" in refused
