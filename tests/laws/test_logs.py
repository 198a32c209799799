"""docs/logs.md lists exactly the events and keys that are logged."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.laws.test_architecture import ROOT, sources

_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
_BINDS = {"bind_contextvars", "bind"}
PAGE = (ROOT / "docs/logs.md").read_text()


def calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    """Yields the method calls on objects named like a log, with the method's name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = ast.unparse(node.func.value)
            if "log" in of:
                yield node, node.func.attr


def logged() -> list[ast.Call]:
    return [call for path in sources() for call, method in calls(path) if method in _METHODS]


def table(heading: str) -> set[str]:
    """Returns the names in backticks in the first column of a section's tables."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_every_event_has_a_fixed_name() -> None:
    for call in logged():
        assert isinstance(call.args[0], ast.Constant), ast.unparse(call)
        assert len(call.args) == 1, ast.unparse(call)


def test_every_event_is_on_the_page_and_no_other() -> None:
    assert {ast.literal_eval(call.args[0]) for call in logged()} == table("Events")


def test_every_key_is_on_the_page_and_no_other() -> None:
    bound = [call for path in sources() for call, method in calls(path) if method in _BINDS]
    contextual = [
        call
        for path in sources()
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("bind_contextvars")
    ]
    keys = {keyword.arg for call in [*logged(), *bound, *contextual] for keyword in call.keywords}
    assert None not in keys, "a line is made of keys that a reader of the code can see"
    assert keys == table("Keys")
