"""The rules of the architecture: which package may import which, and what pure code may not touch."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.laws.syntax import Syntax, parsed, syntax_of

ROOT = Path(__file__).parents[2]
PACKAGES = ("protocol", "worker", "router", "client", "gateway", "auth", "replay", "conformance", "cli", "demo")
ALLOWED = {
    "protocol": set(),
    "demo": set(),
    "worker": {"protocol"},
    "router": {"protocol"},
    "client": {"protocol"},
    "gateway": {"protocol", "client"},
    "auth": {"protocol"},
    "replay": {"protocol", "worker", "router", "client"},
    "conformance": {"protocol"},
    "cli": {"protocol", "client", "gateway", "auth", "worker", "router", "replay", "conformance", "demo"},
}
PURE = (
    "protocol/wire/*.py",
    "protocol/access/key_ring.py",
    "protocol/access/keys.py",
    "protocol/parts/assembly.py",
    "protocol/wire/internal/*.py",
    "protocol/wire/checks/*.py",
    "protocol/prompt/token_bound.py",
    "protocol/telemetry/long_waits.py",
    "protocol/http/connection_table.py",
    "protocol/http/http_parser.py",
    "protocol/http/refusals.py",
    "protocol/averages.py",
    "protocol/ttl_cache.py",
    "router/access/key_checks.py",
    "protocol/access/usage.py",
    "protocol/access/audit.py",
    "router/access/limits.py",
    "router/access/slots.py",
    "router/access/windows.py",
    "router/fleet/*.py",
    "router/workers/*.py",
    "router/placement/*.py",
    "router/requests/queueing/fair_queue.py",
    "router/requests/flights/completion.py",
    "router/requests/flights/flight.py",
    "router/requests/flights/way.py",
    "router/usage/broker_clock.py",
    "router/usage/counters.py",
    "router/usage/folding.py",
    "worker/broker/fence.py",
    "worker/broker/event_log.py",
    "worker/broker/replica_state.py",
    "worker/chat_format/*.py",
    "worker/chat_format/parsing/*.py",
    "worker/contract/*.py",
    "worker/engine_client/detokenizer.py",
    "worker/engine_client/reader.py",
    "worker/streams/replay_buffer.py",
    "worker/streams/holds.py",
    "worker/streams/router_reach.py",
    "worker/streams/early_cancels.py",
    "worker/streams/run_request.py",
    "worker/engine_client/admission.py",
    "worker/engine_client/engine_faults.py",
    "worker/engine/device/draws.py",
    "worker/on_demand/load_plan.py",
    "worker/engine/memory/fit.py",
    "worker/engine/scheduling/*.py",
    "worker/engine/kv/*.py",
    "worker/engine/onnx/kv_cache.py",
    "worker/engine/onnx/dynamic_cache.py",
    "worker/engine/onnx/static_cache.py",
    "client/wire/continuation.py",
    "client/wire/reassembler.py",
    "client/wire/resync_timer.py",
    "auth/nats_keys.py",
    "auth/jwt.py",
    "auth/grants.py",
    "auth/callout_requests.py",
    "auth/answers.py",
    "gateway/admission/keys.py",
    "gateway/admission/aliases.py",
    "gateway/openapi.py",
    "gateway/http/http_errors.py",
    "gateway/dialects.py",
    "gateway/serving/answer_events.py",
    "gateway/serving/conversation.py",
    "gateway/serving/dialect.py",
    "gateway/anthropic/*.py",
    "gateway/openai/*.py",
    "gateway/openai/responses/*.py",
    "gateway/vllm.py",
    "gateway/usage.py",
    "gateway/rerank.py",
    "gateway/ollama/*.py",
    "replay/*.py",
)
"""Files that decide: values and the time go in, values come out."""
IMPURE = {"asyncio", "time", "nats", "prometheus_client", "threading", "socket", "structlog"}
ONLY_IN = {
    "llama_cpp": ("worker/engine/gguf/", "worker/tokenizers/gguf_tokenizer.py", "worker/convert/quantize.py"),
    "onnxruntime": ("worker/engine/onnx/",),
    "onnx": ("worker/engine/onnx/",),
    "starlette": ("gateway/", "protocol/http/status_server.py", "protocol/http/http_server.py"),
    "uvicorn": ("gateway/", "protocol/http/http_server.py"),
    "h11": ("protocol/http/http_parser.py", "protocol/http/http_server.py"),
    "opentelemetry": ("protocol/telemetry/tracing.py", "protocol/telemetry/span_exporter.py"),
    "gguf": ("worker/convert/gguf_file.py",),
}
FORBIDDEN = {"pickle", "marshal", "shelve"}


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Returns everything a file imports: the names of our packages, and the top-level names of all others."""
    return frozenset(package_of(module) for module in syntax_of(path).modules)


def package_of(module: str) -> str:
    """Returns a module's package: `worker` for `tokenbus.worker.engine`, `nats` for `nats.aio`."""
    first, _, rest = module.partition(".")
    return rest.partition(".")[0] if first == "tokenbus" and rest else first


def old_names(syntax: Syntax) -> list[str]:
    """Returns our modules that code names without `tokenbus.`, which would load them twice."""
    bare = [module for module in syntax.modules if module.partition(".")[0] in PACKAGES]
    return bare + [one for one in syntax.strings if is_bare_module(one)]


def is_bare_module(text: str) -> bool:
    """Returns whether a string names one of our modules the way `python -m` and `import_module` take it."""
    first, _, rest = text.partition(".")
    if first not in PACKAGES or not rest.replace(".", "").isidentifier():
        return False
    return (ROOT / text.replace(".", "/")).with_suffix(".py").exists()


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    "code",
    [
        "from worker.engine import blocks",
        "import protocol.errors",
        "def late():\n    import cli",
        "command = ['-m', 'worker.engine.process.main']",
    ],
)
def test_a_package_called_by_its_bare_name_is_found(code: str) -> None:
    assert old_names(parsed(code))


def test_everything_is_imported_through_the_one_public_name() -> None:
    everything = [
        *sources(),
        *(path for folder in ("tests", "bench", "tools", "deploy") for path in (ROOT / folder).rglob("*.py")),
    ]
    for path in everything:
        if path != Path(__file__):
            assert not old_names(syntax_of(path)), name(path)
    assert not re.search(rf"-m ({'|'.join(PACKAGES)})\b", (ROOT / "Makefile").read_text())


def test_the_public_name_is_one_package_of_links_that_loads_nothing_until_it_is_used() -> None:
    package = ROOT / "tokenbus"
    assert {path.name for path in package.iterdir() if path.is_symlink()} == set(PACKAGES)
    assert all((package / one).resolve() == ROOT / one for one in PACKAGES)
    code = "import sys; before = set(sys.modules); import tokenbus; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = {module for module in done.stdout.split() if module.partition(".")[0] not in sys.stdlib_module_names}
    assert loaded == {"tokenbus"}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_refuses_to_be_loaded_by_its_bare_name(package: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True, text=True, cwd=ROOT)
    assert f"ImportError: import tokenbus.{package}" in done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_those_it_may(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        others = imports(path) & set(PACKAGES) - {package}
        assert others <= ALLOWED[package], f"{name(path)} imports {others}"


def test_files_that_decide_touch_no_clock_loop_broker_or_log() -> None:
    for pattern in PURE:
        matched = list(ROOT.glob(pattern))
        assert matched, f"nothing is called {pattern}"
        for path in matched:
            touched = imports(path) & IMPURE
            assert not touched, f"{name(path)} imports {touched}"


def test_an_engine_library_is_imported_only_by_its_runner() -> None:
    for path in sources():
        for library, homes in ONLY_IN.items():
            if library in imports(path):
                assert name(path).startswith(homes), f"{name(path)} imports {library}"


def test_nothing_imports_what_executes_data() -> None:
    for path in sources():
        assert not imports(path) & FORBIDDEN, name(path)


def test_connections_between_processes_carry_bytes_and_no_pickles() -> None:
    for path in sources():
        if "multiprocessing" in imports(path):
            assert not re.search(r"\.(send|recv)\(", path.read_text()), f"{name(path)} pickles: send_bytes, recv_bytes"


def test_one_module_starts_tasks_so_that_none_dies_in_silence() -> None:
    for path in sources():
        if name(path) == "protocol/tasks.py":
            continue
        assert {one.rpartition(".")[0] for one in syntax_of(path).tasks} <= {"group"}, name(path)


def test_no_child_process_that_computes_inherits_credentials() -> None:
    starts = re.compile(r"\b(?:Popen|create_subprocess_exec|create_subprocess_shell|subprocess\.run)\(")
    for path in sources():
        if path.relative_to(ROOT).parts[0] in ("worker", "router", "protocol", "gateway"):
            text = path.read_text()
            for found in starts.finditer(text):
                call = text[found.end() :].partition("\n        )")[0].partition("\n    )")[0]
                assert re.search(r"env=.*child_environment\(", call), f"{path}: {call[:80]}"


def test_no_file_is_named_like_a_module_of_the_standard_library() -> None:
    clashes = [name(path) for path in sources() if path.stem in sys.stdlib_module_names and path.stem != "__init__"]
    assert not clashes


def test_no_broad_except_without_its_reason() -> None:
    for path in sources():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if "except Exception" in line or "suppress(Exception)" in line:
                assert "#" in line, f"{name(path)}:{number} says not why"


def test_every_module_and_public_class_says_what_it_is() -> None:
    for path in sources():
        assert syntax_of(path).has_docstring, f"{name(path)} has no docstring"


def test_only_the_subjects_module_puts_subjects_together() -> None:
    for path in sources():
        if name(path) in ("protocol/wire/subjects.py", "cli/console/screen.py"):
            continue
        assert "tokenbus.v1" not in path.read_text(), name(path)


CATALOG = (
    "from tokenbus.cli import main; from tokenbus.cli.console import catalog; [catalog.make_parser(one) for one in"
)


def imported_by(code: str, before: str = "tokenbus.protocol.process.lean_imports") -> set[str]:
    """Returns the modules that a new process has imported after running `code`, ours without `tokenbus.`."""
    whole = f"import sys, {before}; {code}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return {module.removeprefix("tokenbus.") for module in done.stdout.split()}


@pytest.mark.parametrize(
    ("modules", "unused"),
    [
        ("cli.commands.worker, tokenbus.worker.serve", {"numpy", "jinja2", "tokenizers", "rich"}),
        ("cli.commands.router, tokenbus.router.serve", {"rich", "uvicorn", "llguidance"}),
        ("cli.commands.gateway, tokenbus.gateway.serve", {"rich", "numpy", "jinja2", "tokenizers"}),
        ("worker.engine.process.main", {"rich", "nats", "prometheus_client", "jinja2"}),
    ],
)
def test_a_process_imports_nothing_that_it_does_not_use(modules: str, unused: set[str]) -> None:
    loaded = imported_by(f"import tokenbus.{modules}")
    assert not unused & loaded


def test_no_command_waits_for_an_engine_or_a_web_server_before_it_has_read_its_flags() -> None:
    heavy = {"llama_cpp", "onnx", "onnxruntime", "uvicorn", "starlette", "huggingface_hub", "torch"}
    assert not imported_by(f"{CATALOG} catalog.COMMANDS]") & heavy


def test_neither_help_nor_a_command_that_only_asks_waits_for_what_it_hardly_ever_needs() -> None:
    assert not imported_by("from tokenbus.cli import main", "os") & {"structlog", "nats", "asyncio"}
    asking = (
        "generate",
        "embed",
        "rerank",
        "models",
        "chat",
        "top",
        "keys",
        "usage",
        "audit",
        "load",
        "unload",
        "trace",
    )
    assert "structlog" not in imported_by(f"{CATALOG} {asking}]", "os")


def test_a_command_that_only_asks_waits_for_nothing_that_serves_or_measures() -> None:
    heavy = {
        "numpy",
        "cli.commands.worker",
        "cli.commands.bench",
        "worker.contract.contract",
        "router.fleet",
        "gateway.admission.settings",
    }
    asking = ("generate", "embed", "models", "chat", "top", "health", "cancel", "load", "unload")
    assert not imported_by(f"{CATALOG} {asking}]") & heavy
    assert heavy <= imported_by(f"{CATALOG} catalog.COMMANDS]")
