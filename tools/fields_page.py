"""Writes docs/fields.md from tools/fields.in.md and tools/known_fields.toml: `python -m tools.fields_page`.

A line `{{fields PATH}}` becomes a table of the fields that any server knows at that path, and what becomes of them. A
path may be `like` another one: then clients send its fields there too, and the table has those that differ. Of objects
that are not served as a whole, the fields are not listed."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec

from tokenbus.gateway.dialects import DIALECTS
from tokenbus.gateway.serving.dialect import ApiEndpoint

FOLDER = Path(__file__).parent
TARGET = FOLDER.parent / "docs" / "fields.md"
KNOWN: dict[str, dict[str, str]] = tomllib.loads((FOLDER / "known_fields.toml").read_text())
ENDPOINTS: dict[str, ApiEndpoint[Any]] = {one.path: one for dialect in DIALECTS for one in dialect.endpoints}
_LIKE = "like"
_ELSEWHERE = ("options", "system")
"""Objects whose fields are described on the gateway's page: Ollama's options, and Anthropic's blocks of a text."""
_DIRECTIVE = re.compile(r"^\{\{fields (\S+)\}\}$", re.MULTILINE)


def servers_of(path: str) -> dict[str, list[str]]:
    """Returns the servers that know each field at a path, by field."""
    found: dict[str, list[str]] = {}
    for server, names in KNOWN[path].items():
        for name in names.split() if server != _LIKE else ():
            found.setdefault(name, []).append(server)
    if other := KNOWN[path].get(_LIKE):
        found = {name: [f"`{other}`"] for name in servers_of(other) if is_reached(path, name)} | found
    return dict(sorted(found.items()))


def is_reached(path: str, name: str) -> bool:
    """Returns whether a field is in no object, or in one that is served."""
    endpoint, (root, _, inside) = ENDPOINTS[path], name.partition(".")
    root = root.removesuffix("[]")
    return not inside or (root not in endpoint.unserved and root not in endpoint.ignored)


def fields_of(path: str) -> set[str]:
    """Returns the fields that an endpoint reads, or knows to be unserved or ignored."""
    endpoint = ENDPOINTS[path]
    names = (*_read(endpoint.body), *endpoint.unserved, *endpoint.ignored)
    return {name for name in names if is_reached(path, name)}


def _read(body: type[msgspec.Struct], place: str = "", *, in_list: bool = False) -> Iterator[str]:
    """Yields the names of a struct's fields, and of those of the structs in them, but not in lists of lists."""
    for field in msgspec.structs.fields(body):
        yield place + field.name
        for inner, is_list in _structs_in(field.type) if field.name not in _ELSEWHERE else ():
            if not in_list:
                mark = "[]" if is_list else ""
                yield from _read(inner, f"{place}{field.name}{mark}.", in_list=is_list)


def _structs_in(hint: Any) -> Iterator[tuple[type[msgspec.Struct], bool]]:
    """Yields the structs that a field's type allows, and whether as items of a list."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint, False
    elif get_origin(hint) is list:
        yield from ((one, True) for one, _ in _structs_in(get_args(hint)[0]))
    elif get_origin(hint) in (Union, UnionType, Annotated):
        for one in get_args(hint):
            yield from _structs_in(one)


def fates_of(path: str, name: str) -> list[str]:
    """Returns what becomes of a field: one text, unless the endpoint contradicts itself or does not know it."""
    endpoint = ENDPOINTS[path]
    fates = []
    if name in endpoint.unserved:
        field = endpoint.unserved[name]
        values = [msgspec.json.encode(one).decode() for one in field.harmless if one is not None]
        unless = f" unless it is {' or '.join(f'`{one}`' for one in values)}" if values else ""
        fates.append(f"refused{unless}: {field.problem}")
    if name in endpoint.ignored:
        fates.append(f"ignored: {endpoint.ignored[name]}")
    if not fates and name in fields_of(path):
        fates.append("served")
    return fates


def render(source: str) -> str:
    """Returns the text with every directive replaced."""
    return _DIRECTIVE.sub(lambda match: _table(match[1]), source)


def _table(path: str) -> str:
    other = KNOWN[path].get(_LIKE)
    shared = servers_of(other) if other else {}
    rows = [
        f"| `{name}` | {', '.join(servers)} | {'; '.join(fates_of(path, name))} |"
        for name, servers in servers_of(path).items()
        if other is None or name not in shared or fates_of(other, name) != fates_of(path, name)
    ]
    return "\n".join(["| field | known to | here |", "|---|---|---|", *rows])


if __name__ == "__main__":
    TARGET.write_text(render((FOLDER / "fields.in.md").read_text()))
