"""Folders import each other in one direction, so that each can be read without those above it."""

import functools
import graphlib
import statistics

import pytest

from tests.laws.syntax import Syntax, syntax_of
from tests.laws.test_architecture import ROOT, name, sources

MAX_LINES_P99 = 440
"""Cohesion decides what is a file; only a module in a hundred may be longer than this."""


@functools.cache
def modules() -> frozenset[str]:
    return frozenset(name(path) for path in sources())


def imports_of_ours(syntax: Syntax) -> set[str]:
    """The paths of our modules that code imports, anywhere in it."""
    ours = (one.removeprefix("tokenbus.") for one in syntax.names if one.startswith("tokenbus."))
    return {module_of(one.replace(".", "/")) for one in ours}


def module_of(path: str) -> str:
    """The file of a module, of a package, or of the module or package that a name is imported from."""
    parent = path.rpartition("/")[0]
    candidates = (f"{path}.py", f"{path}/__init__.py", f"{parent}.py", f"{parent}/__init__.py")
    return next(one for one in candidates if one in modules())


def rooms(imported: dict[str, set[str]]) -> dict[str, set[str]]:
    """The folders that each folder imports, from the modules that each module imports."""
    graph: dict[str, set[str]] = {}
    for path, others in imported.items():
        room = path.rpartition("/")[0]
        graph.setdefault(room, set()).update(other.rpartition("/")[0] for other in others)
    return {room: others - {room} for room, others in graph.items()}


def assert_in_one_direction(graph: dict[str, set[str]]) -> None:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"each imports the one before it: {', '.join(error.args[1])}")


@functools.cache
def imported() -> dict[str, set[str]]:
    return {name(path): imports_of_ours(syntax_of(path)) for path in sources()}


def test_a_knot_of_rooms_is_found() -> None:
    knot = rooms({"a/one.py": {"b/two.py"}, "b/two.py": set(), "b/three.py": {"a/four.py"}, "a/four.py": set()})
    with pytest.raises(pytest.fail.Exception, match=r"one before it: (a, b, a|b, a, b)"):
        assert_in_one_direction(knot)


def test_rooms_import_each_other_in_one_direction() -> None:
    assert_in_one_direction(rooms(imported()))


def test_modules_import_each_other_in_one_direction() -> None:
    assert any(imported().values()), "no import was understood"
    assert_in_one_direction({path: others - {path} for path, others in imported().items()})


def test_the_drawing_of_the_folders_reads_from_top_to_bottom() -> None:
    drawing = (ROOT / "docs/architecture.md").read_text().partition("## Folders")[2].split("```")[1]
    places = {room: place for place, room in enumerate(drawn(drawing))}
    upward = [
        f"{room} imports {other}"
        for room, others in rooms(imported()).items()
        for other in others
        if room.partition("/")[0] == other.partition("/")[0]
        and room in places
        and other in places
        and places[room] > places[other]
        and not f"{room}/".startswith(f"{other}/")  # what subfolders share may lie in the folder itself
    ]
    assert not upward


def drawn(drawing: str) -> list[str]:
    """The folders of a drawing in their order, as paths, by the indentation of their names."""
    found: list[str] = []
    parents: list[tuple[int, str]] = []
    for line in drawing.splitlines():
        text = line.lstrip()
        first = text.partition(" ")[0]
        if not first.endswith("/"):
            continue
        indent = len(line) - len(text)
        parents = [parent for parent in parents if parent[0] < indent]
        room = "/".join([*(parent[1] for parent in parents[-1:]), first.rstrip("/")])
        parents.append((indent, room))
        found.append(room)
    return found


def test_a_drawing_is_read_by_its_indentation() -> None:
    assert drawn("a/   the first\n  b/ c/ two\n     more text\n    d/  deep\ne/") == ["a", "a/b", "a/b/d", "e"]


def test_hardly_any_module_is_long() -> None:
    lines = [len(path.read_text().splitlines()) for path in sources()]
    assert statistics.quantiles(lines, n=100)[-1] <= MAX_LINES_P99
