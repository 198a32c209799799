"""Writes docs/fields.md from tools/fields.in.md and tools/known_fields.toml: `python -m tools.fields_page`.

A line `{{fields PATH}}` becomes a table of the fields that any server knows at that path, and what becomes of them."""

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
_DIRECTIVE = re.compile(r"^\{\{fields (\S+)\}\}$", re.MULTILINE)


def servers_of(path: str) -> dict[str, list[str]]:
    """Returns the servers that know each field at a path, by field."""
    found: dict[str, list[str]] = {}
    for server, names in KNOWN[path].items():
        for name in names.split():
            found.setdefault(name, []).append(server)
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
    rows = [
        f"| `{name}` | {', '.join(servers)} | {'; '.join(fates_of(path, name))} |"
        for name, servers in servers_of(path).items()
    ]
    return "\n".join(["| field | known to | here |", "|---|---|---|", *rows])


if __name__ == "__main__":
    TARGET.write_text(render((FOLDER / "fields.in.md").read_text()))
