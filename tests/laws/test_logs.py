"""docs/logs.md lists exactly the events and keys that are logged."""

import ast
import re

from tests.laws.syntax import syntax_of
from tests.laws.test_architecture import ROOT, sources

_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
_BINDS = {"bind_contextvars", "bind"}
PAGE = (ROOT / "docs/logs.md").read_text()


def logged() -> list[ast.Call]:
    return [call for path in sources() for call, method in syntax_of(path).log_calls if method in _METHODS]


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
    bound = [call for path in sources() for call, method in syntax_of(path).log_calls if method in _BINDS]
    keys = {keyword.arg for call in [*logged(), *bound] for keyword in call.keywords}
    assert None not in keys, "a line is made of keys that a reader of the code can see"
    assert keys == table("Keys")
