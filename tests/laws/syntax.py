"""The parts of source files that laws are about, read once for all of them."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_DEF = ast.FunctionDef | ast.AsyncFunctionDef


class Syntax(NamedTuple):
    """A file's syntax, without the tree, which would take too much memory for all files."""

    imports: list[ast.Import | ast.ImportFrom]
    """The statements anywhere in it."""
    strings: set[str]
    """Its strings that could name a module."""
    docstrings: list[str]
    """Those of the module, its classes and functions, and the strings below attributes that explain them."""
    has_docstring: bool
    """Whether the module itself has one."""
    classes: list[str]
    log_calls: list[tuple[ast.Call, str]]
    """The method calls on objects named like a log, and calls of `bind_contextvars`, with the method's name."""
    tasks: list[str]
    """Where methods that start tasks are used."""

    @property
    def modules(self) -> Iterator[str]:
        """Yields the modules that it imports, some of them several times."""
        for node in self.imports:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif node.module == "tokenbus":
                yield from (f"tokenbus.{alias.name}" for alias in node.names)
            elif node.module:
                yield node.module

    @property
    def names(self) -> Iterator[str]:
        """Yields the full names of all that it imports."""
        for node in self.imports:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif node.module:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def syntax_of(path: Path) -> Syntax:
    return parsed(path.read_text())


def parsed(code: str) -> Syntax:
    tree = ast.parse(code)
    found = Syntax([], set(), [], ast.get_docstring(tree) is not None, [], [], [])
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | _DEF):
            found.docstrings.extend(_strings_in(node.body))
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.imports.append(node)
        elif isinstance(node, ast.ClassDef):
            found.classes.append(node.name)
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and node.value.replace(".", "").isidentifier():
                found.strings.add(node.value)
        elif isinstance(node, ast.Attribute):
            if node.attr in ("create_task", "ensure_future"):
                found.tasks.append(ast.unparse(node))
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute) and "log" in ast.unparse(function.value):
                found.log_calls.append((node, function.attr))
            elif ast.unparse(function).endswith("bind_contextvars"):
                found.log_calls.append((node, "bind_contextvars"))
    return found


def _strings_in(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        match statement:
            case ast.Expr(ast.Constant(str(text))):
                yield text.strip()
