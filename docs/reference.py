"""Writes docs/wire.md from docs/wire.in.md and the docstrings of protocol/: `python -m docs.reference`.

A line `{{fields NAME}}` becomes a table of a message's fields, `{{errors}}` the table of error codes, and `{{limits}}`
the table of fixed limits."""

import ast
import re
import sys
from pathlib import Path
from types import ModuleType

from tokenbus.protocol.wire import errors, internal, limits, messages

FOLDER = Path(__file__).parent
TARGET = FOLDER / "wire.md"
_DIRECTIVE = re.compile(r"^\{\{(\w+)(?: (\w+))?\}\}$", re.MULTILINE)
_TYPES = (
    ("UnsetType | ", ""),
    (" | UnsetType", ""),
    (" | None", " or null"),
    ("errors.", ""),
    ("public.", ""),
    ("codec.", ""),
    (" | ", " or "),
)


def render(source: str) -> str:
    """Returns the text with every directive replaced. Raises KeyError for an unknown one."""
    return _DIRECTIVE.sub(lambda match: _table(match[1], match[2]), source)


def _table(kind: str, name: str | None) -> str:
    match kind, name:
        case "fields", str(message):
            return _fields(message)
        case "errors", None:
            return _errors()
        case "limits", None:
            return _limits()
    raise KeyError(f"{kind} {name}")


def _fields(name: str) -> str:
    rows = [
        f"| `{field}` | {_type_of(annotation)} | {_one_line(text)} |"
        for field, annotation, text in _notes(_home_of(name))[name]
    ]
    return "\n".join(["| field | type | meaning |", "|---|---|---|", *rows])


def _home_of(name: str) -> ModuleType:
    """Returns the module that defines a message."""
    message = vars(messages).get(name) or vars(internal)[name]
    return sys.modules[message.__module__]


def _type_of(annotation: str) -> str:
    for before, after in _TYPES:
        annotation = annotation.replace(before, after)
    return annotation.replace("|", "or")


def _notes(module: ModuleType) -> dict[str, list[tuple[str, str, str]]]:
    """Returns name, type and docstring of each field, by class."""
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    return {node.name: list(_documented(node.body)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _documented(body: list[ast.stmt]) -> list[tuple[str, str, str]]:
    """Returns the annotated names in a class or module, each with its docstring or an empty text."""
    found = []
    for here, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name):
            found.append((here.target.id, ast.unparse(here.annotation), _text_of(after)))
    return found


def _text_of(statement: ast.stmt) -> str:
    match statement:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return text
    return ""


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _errors() -> str:
    rows = [
        f"| `{code}` | {info.http} | {'yes' if info.retryable else 'no'} | {info.message} |"
        for code, info in errors.CODES.items()
    ]
    return "\n".join(["| code | HTTP | try again | when |", "|---|---|---|---|", *rows])


def _limits() -> str:
    assert limits.__file__ is not None
    body = ast.parse(Path(limits.__file__).read_text()).body
    rows = []
    for here, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(here, ast.Assign) and isinstance(here.targets[0], ast.Name):
            name = here.targets[0].id
            rows.append(f"| `{name}` | {getattr(limits, name):,} | {_one_line(_text_of(after))} |")
    return "\n".join(["| name | value | |", "|---|---|---|", *rows])


def main() -> None:
    TARGET.write_text(render((FOLDER / "wire.in.md").read_text()))


if __name__ == "__main__":
    main()
