"""Docstrings are sentences, and a class is found by its name."""

import re

import pytest

from tests.laws.syntax import parsed, syntax_of
from tests.laws.test_architecture import name, sources

FRAGMENT = re.compile(r"(?:Of|What|How|As|Likewise|Instead)\b")
"""First words of a docstring that is no sentence, or that doesn't name its subject."""


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
    assert any(FRAGMENT.match(text) for text in parsed(code).docstrings)


def test_docstrings_begin_with_their_subject_or_verb() -> None:
    found = [
        f"{name(path)}: {text.splitlines()[0]}"
        for path in sources()
        for text in syntax_of(path).docstrings
        if FRAGMENT.match(text)
    ]
    assert not found


def test_no_two_public_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for path in sources():
        for one in syntax_of(path).classes:
            if not one.startswith("_"):
                homes.setdefault(one, []).append(name(path))
    assert {one: paths for one, paths in homes.items() if len(paths) > 1} == {}
