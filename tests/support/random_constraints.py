"""Random regexes and schemas that are as costly as they can be for their size."""

import json
import random
from typing import Any

_ATOMS = [
    ".", r"\w", r"\d", r"\s", r"\p{L}", r"\p{Lu}", r"\p{Han}", "[^a]", "[a-z]", "[ab]", "a", "b", "é", "日",
    r"[^\s]", r"\W", "(?i:k)", r"[\p{L}\p{N}]", r"\S", "(?s:.)",
]  # fmt: skip
_COUNTS = ["?", "*", "+", "{0,9}", "{1,99}", "{0,1000}", "{3}", "{50}", "{5,}", "{1,1000}", "??", "*?"]


def regex(rng: random.Random, most: int) -> str:
    """Returns one of at most so many bytes."""
    while True:
        size = rng.choice([10, 30, 80, most])
        kind = rng.random()
        if kind < 0.35:  # the same piece again and again is the costliest
            piece = _regex(rng, rng.randint(1, 20), 0)
            found = piece * (size // len(piece))
        elif kind < 0.5:
            found = "|".join(_regex(rng, rng.randint(2, 12), 0) for _ in range(size // 9 + 1))
        else:
            found = _regex(rng, size, 0)
        if 0 < len(found.encode()) <= most:
            return found


def _regex(rng: random.Random, size: int, depth: int) -> str:
    found = ""
    while len(found) < size:
        kind = rng.random()
        if kind < 0.45 or depth > 6:
            part = rng.choice(_ATOMS)
        elif kind < 0.85:
            several = [_regex(rng, rng.randint(1, max(2, size // 3)), depth + 1) for _ in range(rng.randint(1, 3))]
            part = f"({'|'.join(several)})"
        else:
            part = rng.choice("abcxyz") * rng.randint(1, 4)
        found += part + (rng.choice(_COUNTS) if rng.random() < 0.6 else "")
    return found


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    def several(most: int) -> list[dict[str, Any]]:
        return [schema(rng, depth + 1) for _ in range(rng.randint(1, most))]

    if depth > 3:
        return {"type": "string"}
    count = rng.choice([1, 2, 5, 20 >> 2 * depth or 1])
    match rng.randint(0, 11):
        case 0:
            return {"type": "string", "minLength": rng.choice([0, 100, 5_000]), "maxLength": rng.choice([5_000, 10**7])}
        case 1:
            return {"type": "string", "pattern": regex(rng, 200)} | rng.choice([{}, {"maxLength": 300}])
        case 2:
            return {
                "type": "integer",
                "minimum": rng.choice([-(10**15), 0, 7]),
                "maximum": rng.choice([10**15, 9_999_991]),
            }
        case 3:
            return {"type": "number", "minimum": rng.choice([-1e-200, 0.123456789, -1e300]), "maximum": 7.77777777}
        case 4:
            return {"enum": ["".join(rng.choices('abcé"\\', k=rng.randint(1, 20))) for _ in range(2 * count)]}
        case 5:
            properties = {f"p{n}": one for n, one in enumerate(several(count))}
            required = [name for name in properties if rng.random() < 0.3]
            more = rng.choice([True, False, {"type": "string"}])
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": more}
        case 6:
            return {"type": "array", "items": schema(rng, depth + 1), "minItems": rng.choice([0, 5, 1_000, 10**6])}
        case 7:
            return {rng.choice(["anyOf", "oneOf", "allOf"]): several(count)}
        case 8:
            last = rng.choice([3, 10, 30])
            defs = {
                f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{last}"}]} for n in range(last)
            }
            return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{last}": schema(rng, depth + 1)}}
        case 9:
            return {"type": "string", "format": rng.choice(["date-time", "email", "uuid", "ipv6", "uri", "hostname"])}
        case 10:
            return {"allOf": several(2), "not": schema(rng, depth + 1)}
        case _:
            return {"type": "array", "prefixItems": several(count), "items": rng.choice([False, True])}


def source(rng: random.Random, kind: str, most: int) -> str:
    """Returns a constraint of at most so many bytes."""
    while len((found := regex(rng, most) if kind == "regex" else json.dumps(schema(rng))).encode()) > most:
        pass
    return found
