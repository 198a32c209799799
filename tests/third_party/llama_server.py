"""The tests of llama.cpp's server, as they are published, against gateways that serve other models.

They take a server that runs already, which they don't start with the options of each test. Tests that are about such
options, or about a model that can only be fetched from the Hub, are among the skips."""

import contextlib
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.support.models import random_encoder
from tests.support.system import running_gateway, running_worker
from tests.third_party import packages
from tests.third_party.judging import Outcome
from tests.third_party.junit import from_junit
from tests.third_party.running import run
from tests.third_party.serving import Served, wait_for

_TESTS = "vendor/llama.cpp/tools/server/tests"
_KEY = "sk-this-is-the-secret-key"
_GENERATING = ("gpt-3.5-turbo", "gpt-3.5-turbo-instruct", "gpt-4.1", "davinci-002", "codellama70b", "test")
_CONTEXT = 512
"""The context of the encoders in these tests, in tokens."""


class _Group(NamedTuple):
    """Files of tests, and the gateway for them."""

    files: tuple[str, ...]
    model: str
    """The model of requests that name none."""
    settings: tuple[str, ...] = ()


_GROUPS = (
    _Group(
        (
            "basic",
            "chat_completion",
            "compat_anthropic",
            "compat_oai_responses",
            "completion",
            "ignore_eos",
            "infill",
            "tokenize",
            "tool_call",
        ),
        "demo",
    ),
    _Group(("embedding",), "long-embedder"),
    _Group(("rerank",), "long-reranker"),
    _Group(("security",), "demo", ("--api-key", _KEY, "--allowed-origin", "*")),
)
_LEFT_OUT = {
    "compat_gcp": "the HTTP interface of a Vertex AI container, which an option of llama-server turns on",
    "ctx_shift": "an option of llama-server that cuts prompts: a prompt that is too long is refused here",
    "kv_keep_only_active": "an option about llama-server's slots",
    "lora": "adapters that are read from the Hub, and scaled by requests to llama-server",
    "mcp_servers": "llama-server as a client of MCP servers",
    "metrics": "metrics under llama-server's names",
    "proxy": "llama-server behind another program",
    "router": "llama-server that starts others of its kind, with models from the Hub",
    "sleep": "an option that unloads the model: models on demand have tests of their own",
    "slot_save": "files of llama-server's slots",
    "speculative": "options for a draft model from the Hub",
    "stream": "streams that llama-server keeps for clients that come back",
    "template": "an option for another chat template",
    "tools_builtin": "tools that llama-server runs itself",
    "vision_api": "images",
}
"""The files that are not run, and what they are about."""


def run_tests(served: Served) -> list[Outcome]:
    """Runs all groups, each against a gateway of its own."""
    tests = packages.source("llama-cpp-python", "llama-cpp-python", _TESTS) / _TESTS
    known = {path.stem.removeprefix("test_") for path in (tests / "unit").glob("test_*.py")}
    listed = {*_LEFT_OUT}.union(*(group.files for group in _GROUPS))
    found = [Outcome(name, False, "the file is new, or no longer there") for name in sorted(known ^ listed)]
    found += [Outcome(name, None, reason) for name, reason in _LEFT_OUT.items()]
    python = str(packages.environment("llama-server") / "python")
    aliases = [flag for name in _GENERATING for flag in ("--alias", f"{name}=demo")]
    aliases += ["--alias", "text-embedding-3-small=long-embedder"]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        for pooling in ("mean", "rank"):
            stack.enter_context(_encoder(served, folder, pooling))
        for group in _GROUPS:
            arguments = (*aliases, "--default-model", group.model, *group.settings)
            gateway = stack.enter_context(running_gateway(served.nats, folder, *arguments))
            wait_for(f"{gateway.url}/models/{group.model}", 401 if group.settings else 200)
            report = folder / f"{group.files[0]}.xml"
            pytest = [python, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", f"--junitxml={report}"]
            port = gateway.url.removesuffix("/v1").rpartition(":")[2]
            files = [f"unit/test_{one}.py" for one in group.files]
            run([*pytest, "--tb=line", *files], {"DEBUG_EXTERNAL": "1", "PORT": port}, tests)
            found += from_junit(report.read_bytes(), "unit.test_")
    return found


def _encoder(served: Served, folder: Path, pooling: str) -> contextlib.AbstractContextManager[None]:
    path = folder / f"{pooling}.gguf"
    random_encoder.write(path, random_encoder.EncoderShape("bert", pooling, context=_CONTEXT))
    name = {"mean": "long-embedder", "rank": "long-reranker"}[pooling]
    return running_worker(served.nats, "--model", str(path), "--served-name", name, "--threads", "1")
