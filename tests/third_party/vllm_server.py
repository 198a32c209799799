"""vLLM's tests of its HTTP API, as they are published, against a gateway.

They start `vllm serve` by a class of their own. A plugin gives them a class that names the gateway instead, and mocks
for all else of vLLM (`clients/vllm_stand_in.py`)."""

import tempfile
from pathlib import Path

from tests.support.system import running_gateway
from tests.third_party import packages
from tests.third_party.judging import Outcome
from tests.third_party.junit import from_junit
from tests.third_party.running import run
from tests.third_party.serving import SCRIPTED, Served, wait_for

_CLIENTS = Path(__file__).parent / "clients"
_TESTS = "tests/entrypoints"
_FILES = (
    "anthropic/test_messages.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_thinking_token_budget.py",
    "openai/completion/test_completion.py",
    "openai/models/test_models.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "serve/tokenize/test_tokenization.py",
)
"""The files whose tests use a server of texts. Others have images, sound, adapters, or call vLLM's own code."""
_BY_CHANCE = (
    "openai/chat_completion/test_chat.py::test_response_format_json_object",
    "openai/chat_completion/test_chat.py::test_response_format_json_schema",
    "openai/chat_completion/test_chat.py::test_structured_outputs_choice_chat",
    "openai/chat_completion/test_chat.py::test_structured_outputs_json_chat",
    "openai/chat_completion/test_completion_with_function_calling.py::test_function_tool_use",
    "openai/chat_completion/test_completion_with_function_calling.py::test_named_tool_use",
    "openai/chat_completion/test_include_reasoning.py::test_default_includes_reasoning",
    "openai/chat_completion/test_include_reasoning.py::test_include_reasoning_true_non_streaming",
    "openai/chat_completion/test_include_reasoning.py::test_include_reasoning_true_streaming",
    "openai/chat_completion/test_thinking_token_budget.py::test_thinking_token_budget_limits_reasoning",
    "openai/completion/test_completion.py::test_completion_streaming",
    "openai/completion/test_completion.py::test_parallel_no_streaming",
    "openai/completion/test_completion.py::test_parallel_streaming",
)
"""Tests that pass or not by what the demo model answers: it is too small for their questions. They are not run."""
_MODELS = (
    "HuggingFaceH4/zephyr-7b-beta",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "Qwen/Qwen2-1.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen3-0.6B",
    "zephyr-lora",
)


def run_tests(served: Served) -> list[Outcome]:
    """Runs the files. The plugin is not part of the source, which stays as it was published."""
    source = packages.source("vllm", "vllm-source", "tests/")
    python = str(packages.environment("vllm-tests") / "python")
    aliases = [flag for name in _MODELS for flag in ("--alias", f"{name}=demo")]
    aliases += ["--alias", f"claude-3-7-sonnet-latest={SCRIPTED}"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running_gateway(served.nats, folder, *aliases, "--default-model", "demo") as gateway:
            wait_for(f"{gateway.url}/models/{_MODELS[0]}", 200)
            report = folder / "report.xml"
            pytest = [python, "-m", "pytest", "-q", "-p", "vllm_stand_in", "-p", "no:cacheprovider", "--tb=line"]
            pytest += ["-o", "addopts=", "--rootdir", ".", "--confcutdir", _TESTS, f"--junitxml={report}"]
            variables = {"ROOT_URL": gateway.url.removesuffix("/v1"), "PYTHONPATH": str(_CLIENTS)}
            pytest += [option for name in _BY_CHANCE for option in ("--deselect", f"{_TESTS}/{name}")]
            run([*pytest, *(f"{_TESTS}/{file}" for file in _FILES)], variables, source)
            found = from_junit(report.read_bytes(), f"{_TESTS.replace('/', '.')}.")
            return [*(Outcome(name, None) for name in _BY_CHANCE), *found]
