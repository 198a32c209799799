"""Writes docs/fields.md from tools/fields.in.md and tools/known_fields.toml: `python -m tools.fields_page`.

A line `{{fields PATH}}` becomes a table of the fields that any server knows at that path, and what becomes of them. A
path may be `like` another one: then clients send its fields there too, and the table has those that differ."""

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from tokenbus.gateway.dialects import DIALECTS
from tokenbus.gateway.serving.dialect import ApiEndpoint

FOLDER = Path(__file__).parent
TARGET = FOLDER.parent / "docs" / "fields.md"
KNOWN: dict[str, dict[str, str]] = tomllib.loads((FOLDER / "known_fields.toml").read_text())
ENDPOINTS: dict[str, ApiEndpoint[Any]] = {one.path: one for dialect in DIALECTS for one in dialect.endpoints}
_LIKE = "like"
_DIRECTIVE = re.compile(r"^\{\{fields (\S+)\}\}$", re.MULTILINE)


def servers_of(path: str) -> dict[str, list[str]]:
    """Returns the servers that know each field at a path, by field."""
    found: dict[str, list[str]] = {}
    for server, names in KNOWN[path].items():
        for name in names.split() if server != _LIKE else ():
            found.setdefault(name, []).append(server)
    if other := KNOWN[path].get(_LIKE):
        found = {name: [f"`{other}`"] for name in servers_of(other)} | found
    return dict(sorted(found.items()))


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
    if not fates and name in (field.name for field in msgspec.structs.fields(endpoint.body)):
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
