"""Docstrings are sentences, and a class is found by its name."""

import ast
import re

import pytest

from tests.laws.test_architecture import name, sources

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


def test_no_two_public_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name(path))
    assert {one: paths for one, paths in homes.items() if len(paths) > 1} == {}
