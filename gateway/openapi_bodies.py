"""Adds to the schemas of bodies what their fields' types do not express."""

from typing import Any

from tokenbus.gateway.openai import reasoning_fields, sampling_fields
from tokenbus.protocol.wire import internal, limits, messages, params

Json = dict[str, Any]
_ANY_OF = "anyOf"
_RANGES = (
    dict(params.ranges_of(messages.GenerateRequest))
    | dict(params.ranges_of(internal.Embed))
    | dict(params.ranges_of(messages.RerankRequest))
    | {
        "n": params.Range(1, sampling_fields.MAX_CHOICES),
        "top_logprobs": params.Range(0, limits.MAX_LOGPROBS),
        "max_completion_tokens": params.COUNT,
    }
    | dict.fromkeys(reasoning_fields.BUDGETS, reasoning_fields.ALLOWED)
)
"""The ranges of numbers, by field name, for names shared by the wire and the endpoints."""


def narrow(schema: Json, required: tuple[str, ...], may_be_empty: tuple[str, ...]) -> None:
    """Adds what a body's types do not express: required fields, the ranges of numbers, and that null means absent in
    maps too."""
    schema["required"] = list(required)
    properties: Json = schema["properties"]
    for name in required:
        found = properties[name]
        del found["default"]
        kinds = [part for kind in found.pop(_ANY_OF) if kind != {"type": "null"} for part in _uniform(kind)]
        for kind in kinds:
            _forbid_empty(kind["items"] if name in may_be_empty else kind)
        properties[name] = found | (kinds[0] if len(kinds) == 1 else {_ANY_OF: kinds})
    for name, allowed in _RANGES.items():
        for kind in properties.get(name, {}).get(_ANY_OF, ()):
            if kind.get("type") in ("integer", "number"):
                kind["exclusiveMinimum" if allowed.above else "minimum"] = allowed.low
                kind["maximum"] = allowed.high
    for described in properties.values():
        for kind in described.get(_ANY_OF, ()):
            if kind.get("additionalProperties"):
                kind["additionalProperties"] = {_ANY_OF: [kind["additionalProperties"], {"type": "null"}]}


def _uniform(schema: Json) -> list[Json]:
    """Splits a list type whose items may be token ids into lists with items of a single kind."""
    kinds = schema.get("items", {}).get(_ANY_OF, [])
    if {"type": "integer"} not in kinds:
        return [schema]
    return [schema | {"items": kind} for kind in kinds]


def _forbid_empty(schema: Json) -> None:
    match schema.get("type"):
        case "string":
            schema["minLength"] = 1
        case "integer":
            schema |= {"minimum": 0, "maximum": limits.MAX_TOKEN_ID}
        case "array":
            schema["minItems"] = 1
            _forbid_empty(schema["items"])
