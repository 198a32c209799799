"""Writes docs/wire.md from tools/wire.in.md and from the code of the wire: `python -m tools.wire_page`.

A line `{{fields NAME}}` becomes a table of a message's own fields, `{{errors}}` the table of error codes, `{{limits}}`
that of the fixed limits."""

import ast
import re
import sys
from pathlib import Path

import msgspec

from tokenbus.protocol.wire import errors, internal, limits, messages, params

FOLDER = Path(__file__).parent
TARGET = FOLDER.parent / "docs" / "wire.md"
_DIRECTIVE = re.compile(r"^\{\{(\w+)(?: (\w+))?\}\}$", re.MULTILINE)
_TYPES = (
    (r"UnsetType \| | \| UnsetType", ""),
    (r" \| None", " or null"),
    (r"\b(errors|public|codec)\.", ""),
    (r"\bSequence\b", "list"),
    (r" \| ", " or "),
)


def render(source: str) -> str:
    """Returns the text with every directive replaced. Raises KeyError for a directive that names nothing."""
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
    struct: type[msgspec.Struct] = (vars(params) | vars(internal) | vars(messages))[name]
    ranges = params.ranges_of(struct)
    classes = {node.name: node for node in _body_of(struct.__module__) if isinstance(node, ast.ClassDef)}
    rows = []
    for field, annotation, text in _documented(classes[name].body):
        allowed = _range_text(ranges[field]) if field in ranges else ""
        rows.append(f"| `{field}` | {_type_of(annotation)} | {allowed}{text} |")
    return "\n".join(["| field | type | meaning |", "|---|---|---|", *rows])


def _type_of(annotation: str) -> str:
    for pattern, replacement in _TYPES:
        annotation = re.sub(pattern, replacement, annotation)
    return annotation


def _range_text(allowed: params.Range) -> str:
    if allowed.high not in (limits.MAX_TOKENS, params.TIMEOUT_MS.high):
        return f"{f'Above {allowed.low:,}, up' if allowed.above else f'{allowed.low:,}'} to {allowed.high:,}. "
    if allowed.low < 0:
        return ""
    return f"{'Above' if allowed.above else 'At least'} {allowed.low:,}. "


def _body_of(module: str) -> list[ast.stmt]:
    path = sys.modules[module].__file__
    assert path is not None
    return ast.parse(Path(path).read_text()).body


def _documented(body: list[ast.stmt]) -> list[tuple[str, str, str]]:
    """Returns name, annotation and docstring of each name that a class or module defines."""
    found = []
    for here, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = " ".join(str(after.value.value).split()).replace("|", "\\|")
        match here:
            case ast.AnnAssign(target=ast.Name(name), annotation=kind):
                if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Annotated":
                    kind = kind.slice.elts[0]  # type: ignore[attr-defined]
                found.append((name, ast.unparse(kind), text))
            case ast.Assign(targets=[ast.Name(name)]):
                found.append((name, "", text))
    return found


def documented_fields(struct: type) -> dict[str, str]:
    """Returns the docstrings of a class's own fields."""
    classes = {node.name: node for node in _body_of(struct.__module__) if isinstance(node, ast.ClassDef)}
    return {name: text for name, _, text in _documented(classes[struct.__name__].body)}


def _errors() -> str:
    rows = [
        f"| `{code}` | {info.http} | {'yes' if info.retryable else 'no'} | {info.message} |"
        for code, info in errors.CODES.items()
    ]
    return "\n".join(["| code | HTTP | retry | default message |", "|---|---|---|---|", *rows])


def _limits() -> str:
    rows = [
        f"| `{name}` | {getattr(limits, name):,} | {text} |" for name, _, text in _documented(_body_of(limits.__name__))
    ]
    return "\n".join(["| name | value | |", "|---|---|---|", *rows])


def main() -> None:
    TARGET.write_text(render((FOLDER / "wire.in.md").read_text()))


if __name__ == "__main__":
    main()
