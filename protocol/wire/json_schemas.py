"""Bounds the JSON schemas of a request, since an engine compiles them."""

from collections.abc import Sequence

from tokenbus.protocol.wire import limits
from tokenbus.protocol.wire.errors import invalid_field

_PROPERTIES = ("properties", "$defs", "definitions")
_PATTERNS = ("patternProperties",)


def check_members(value: object, path: str, max_properties: int) -> None:
    """Raises RequestError for a schema, or a list of them, with too many properties or patterns."""
    for names, most in ((_PROPERTIES, max_properties), (_PATTERNS, limits.MAX_SCHEMA_PATTERNS)):
        count = _count_members(value, names)
        if count > most:
            raise invalid_field(path, f"must have at most {most} {' and '.join(names)}, got {count}")


def _count_members(value: object, names: Sequence[str]) -> int:
    """Counts the members of all objects that have one of these names."""
    if isinstance(value, list):
        return sum(_count_members(child, names) for child in value)
    if not isinstance(value, dict):
        return 0
    own = sum(len(value[name]) for name in names if isinstance(value.get(name), dict))
    return own + sum(_count_members(child, names) for child in value.values())
