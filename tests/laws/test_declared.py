"""Every import is declared in pyproject.toml; none relies on another package's dependencies."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest

from deploy import llama_cpp_wheel
from tests.laws.test_architecture import PACKAGES, ROOT, imports

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
ALSO = {
    "protocol": ("router", "traces"),
    "worker": ("worker", "worker-onnx", "onnx-gpu"),
    "router": ("router",),
    "gateway": ("gateway", "oidc"),
    "auth": ("gateway",),
    "replay": ("bench",),
    "cli": ("server",),
}
"""Extras with which a package is used. tests/laws/test_extras.py looks at what each command imports."""
FOLDERS = ("bench", "deploy", "tests", "tools")
ELSEWHERE = ROOT / "tests/third_party/clients"
"""Scripts that run in environments of their own, whose packages are pinned beside them."""
NOT_INSTALLED = {"dynamo": "ai-dynamo-runtime", "zmq": "pyzmq", "onnxruntime_genai": "onnxruntime-genai"}
"""Distributions of modules that are installed on some machines only."""
STANDARD = {*sys.stdlib_module_names, "compression"}
"""The modules of the standard library, also of later versions."""
DISTRIBUTIONS = importlib.metadata.packages_distributions()


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    found = (re.match(r"[\w.-]+", one) for one in requirements)
    return {normal(match.group()) for match in found if match}


def of_extra(extra: str) -> list[str]:
    """Returns an extra's requirements, with those of the extras that it names."""
    found = []
    for one in EXTRAS[extra]:
        if others := re.fullmatch(r"tokenbus\[(.*)\]", one):
            found += [requirement for other in others.group(1).split(",") for requirement in of_extra(other)]
        else:
            found.append(one)
    return found


def modules(folder: str) -> set[str]:
    """Returns the top-level names of the third-party modules that a folder imports."""
    files = [path for path in (ROOT / folder).rglob("*.py") if path.parent != ELSEWHERE]
    found = {name for path in files for name in imports(path)}
    return found - STANDARD - {*PACKAGES, *FOLDERS}


def undeclared(folder: str, declared: set[str]) -> set[str]:
    return {
        module
        for module in modules(folder)
        if not declared & {normal(one) for one in DISTRIBUTIONS.get(module, [NOT_INSTALLED.get(module, module)])}
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_imports_is_a_dependency(package: str) -> None:
    extras = [one for extra in ALSO.get(package, ()) for one in of_extra(extra)]
    assert not undeclared(package, names([*PROJECT["dependencies"], *extras]))


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_tests_and_benchmarks_import_is_in_an_extra(folder: str) -> None:
    extras = [one for extra in EXTRAS.values() for one in extra]
    assert not undeclared(folder, names([*PROJECT["dependencies"], *extras]))


def test_every_dependency_has_its_version_in_the_constraints() -> None:
    pinned = names(Path(ROOT / "constraints.txt").read_text().splitlines())
    assert names([*PROJECT["dependencies"], *of_extra("all"), *of_extra("onnx-gpu")]) <= pinned


def test_the_llama_cpp_that_is_compiled_is_the_one_in_the_constraints() -> None:
    assert f"llama_cpp_python=={llama_cpp_wheel.VERSION}\n" in (ROOT / "constraints.txt").read_text()
