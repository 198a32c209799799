"""The laws of the architecture: who may import whom, and what pure code may not touch."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("protocol", "worker", "router", "client", "gateway", "replay", "cli", "demo")
ALLOWED = {
    "protocol": set(),
    "demo": set(),
    "worker": {"protocol"},
    "router": {"protocol"},
    "client": {"protocol"},
    "gateway": {"protocol", "client"},
    "replay": {"protocol", "worker", "router", "client"},
    "cli": {"protocol", "client", "gateway", "worker", "router", "replay", "demo"},
}
PURE = (
    "protocol/subjects.py",
    "protocol/blocks.py",
    "protocol/fewest.py",
    "protocol/request.py",
    "protocol/errors.py",
    "protocol/codec.py",
    "protocol/traces.py",
    "worker/engine/blocks.py",
    "worker/engine/sequence.py",
    "worker/engine/plan.py",
    "worker/engine/scheduler.py",
    "worker/engine/pace.py",
    "worker/front/completion.py",
    "router/fleet.py",
    "router/heard.py",
    "router/holders.py",
    "router/seen.py",
    "router/placement.py",
    "router/flight.py",
    "worker/front/fence.py",
    "worker/front/admission.py",
    "worker/front/history.py",
    "worker/front/presence.py",
    "worker/front/snapshot.py",
    "router/eventlog.py",
    "router/index.py",
    "router/predictions.py",
    "router/overlap.py",
    "router/columns.py",
    "router/scheme.py",
    "router/explain.py",
    "router/served.py",
    "router/worker.py",
    "router/allowance.py",
    "router/backlog.py",
    "router/fading.py",
    "router/speed.py",
    "router/tally.py",
    "router/shown.py",
    "worker/engine/sim/faults.py",
    "worker/front/blame.py",
    "worker/engine/tree.py",
    "worker/engine/moves.py",
    "worker/engine/waiting.py",
    "worker/engine/sim/timing.py",
    "protocol/recent.py",
    "replay/generators.py",
    "replay/machine.py",
    "replay/traces.py",
    "replay/world.py",
    "client/order.py",
    "client/patience.py",
    "gateway/asked.py",
    "gateway/failures.py",
    "gateway/keys.py",
    "gateway/shapes.py",
    "gateway/told.py",
)
IMPURE = {"asyncio", "time", "nats", "prometheus_client", "threading", "socket", "structlog"}
ONLY_IN = {
    "llama_cpp": ("worker/engine/gguf/",),
    "onnxruntime": ("worker/engine/onnx/",),
    "onnx": ("worker/engine/onnx/", "demo/"),
    "starlette": ("gateway/", "protocol/status_server.py", "protocol/http_server.py"),
    "uvicorn": ("gateway/", "protocol/http_server.py"),
    "h11": ("protocol/http_parser.py", "protocol/http_server.py"),
    "opentelemetry": ("protocol/otel.py",),
    "torch": ("demo/train.py",),
    "gguf": ("demo/",),
}
FORBIDDEN = {"pickle", "marshal", "shelve"}


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Top-level names of all modules that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return frozenset(names)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_those_it_may(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        others = imports(path) & set(PACKAGES) - {package}
        assert others <= ALLOWED[package], f"{name(path)} imports {others}"


def test_files_that_decide_touch_no_clock_loop_broker_or_log() -> None:
    for relative in PURE:
        touched = imports(ROOT / relative) & IMPURE
        assert not touched, f"{relative} imports {touched}"


def test_an_engine_library_is_imported_only_by_its_runner() -> None:
    for path in sources():
        for library, homes in ONLY_IN.items():
            if library in imports(path):
                assert name(path).startswith(homes), f"{name(path)} imports {library}"


def test_nothing_imports_what_executes_data() -> None:
    for path in sources():
        assert not imports(path) & FORBIDDEN, name(path)


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
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), f"{name(path)} has no docstring"


def test_only_the_subjects_module_puts_subjects_together() -> None:
    for path in sources():
        if name(path) in ("protocol/subjects.py", "cli/screen.py"):
            continue
        assert "tokenbus.v1" not in path.read_text(), name(path)


def imported_by(code: str) -> set[str]:
    """The modules that a fresh process has imported after that."""
    whole = f"import sys; from tokenbus.cli import main; {code}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_no_command_waits_for_an_engine_or_a_web_server_before_it_has_read_its_flags() -> None:
    heavy = {"llama_cpp", "onnx", "onnxruntime", "uvicorn", "starlette", "huggingface_hub", "torch"}
    assert not imported_by("main._parser()") & heavy


def test_a_command_that_only_asks_waits_for_nothing_that_serves_or_measures() -> None:
    heavy = {"numpy", "cli.servers", "cli.measurers", "worker.contract", "router.fleet", "gateway.settings"}
    assert not imported_by("from tokenbus.cli import askers; main._parser(askers.FLAGS)") & heavy
    assert heavy <= imported_by("main._parser()")
