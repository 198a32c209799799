"""Modules stay short, folders stay shallow, and docstrings are sentences."""

import ast
import re
import statistics
from pathlib import Path

import pytest

from tests.laws.test_architecture import ROOT, name, sources

MAX_LINES = 500
MAX_LINES_P90 = 260
MAX_MODULES = 18
FRAGMENT = re.compile(r"(?:Of|What|How|As|Likewise|Instead)\b")
"""First words of a docstring that is no sentence, or that doesn't name its subject."""


_DEF = ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(code: str) -> list[str]:
    """Docstrings of a module and of its classes and functions, and the strings below attributes that explain them."""
    bodies = [node.body for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Module | ast.ClassDef | _DEF)]
    return [
        statement.value.value.strip()
        for body in bodies
        for statement in body
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    ]


def imports_of_ours(code: str) -> set[str]:
    """The paths of our modules that code imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for module in names:
            path = module.removeprefix("tokenbus.").replace(".", "/") + ".py"
            if module.startswith("tokenbus.") and (ROOT / path).exists():
                found.add(path)
    return found


def cycles(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Pairs of modules that import each other."""
    return [(one, other) for one in graph for other in graph[one] if one < other and one in graph.get(other, ())]


@pytest.mark.parametrize(
    "code",
    [
        '"""Of one wait."""',
        'def late() -> None:\n    """How late it is."""',
        'class Wait:\n    """What waits."""',
        'class Wait:\n    since: float\n    """As in the request."""',
    ],
)
def test_a_docstring_that_is_no_sentence_is_found(code: str) -> None:
    assert any(FRAGMENT.match(text) for text in docstrings(code))


def test_docstrings_begin_with_their_subject_or_verb() -> None:
    found = [
        f"{name(path)}: {text.splitlines()[0]}"
        for path in sources()
        for text in docstrings(path.read_text())
        if FRAGMENT.match(text)
    ]
    assert not found


def test_modules_are_short() -> None:
    lines = {name(path): len(path.read_text().splitlines()) for path in sources()}
    assert not {path: count for path, count in lines.items() if count > MAX_LINES}
    assert statistics.quantiles(lines.values(), n=10)[-1] <= MAX_LINES_P90


def test_a_folder_holds_few_modules() -> None:
    folders: dict[Path, int] = {}
    for path in sources():
        folders[path.parent] = folders.get(path.parent, 0) + 1
    assert not {name(folder): count for folder, count in folders.items() if count > MAX_MODULES}


def test_modules_that_import_each_other_are_found() -> None:
    assert cycles({"a": {"b", "c"}, "b": {"a"}, "c": set()}) == [("a", "b")]


def test_no_two_modules_import_each_other() -> None:
    graph = {name(path): imports_of_ours(path.read_text()) for path in sources()}
    assert any(graph.values()), "no import was understood"
    assert not cycles(graph)
