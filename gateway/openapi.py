"""The gateway's OpenAPI document, made from the structs of its endpoints' requests and responses."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from tokenbus.gateway.dialects import DIALECTS
from tokenbus.gateway.openai import fields, sampling_fields
from tokenbus.gateway.serving import seeds
from tokenbus.gateway.serving.dialect import ApiEndpoint, Dialect, RecordResource, Report, Resource
from tokenbus.protocol.wire import internal, limits, messages, params

Json = dict[str, Any]
_REFS = "#/components/schemas/{name}"
_ANY_OF = "anyOf"
_RANGES = (
    dict(params.ranges_of(messages.GenerateRequest))
    | dict(params.ranges_of(internal.Embed))
    | dict(params.ranges_of(messages.RerankRequest))
    | {
        "seed": seeds.SEEDS,
        "random_seed": seeds.SEEDS,
        "n": params.Range(1, sampling_fields.MAX_CHOICES),
        "top_logprobs": params.Range(0, limits.MAX_LOGPROBS),
        "max_completion_tokens": params.COUNT,
    }
    | dict.fromkeys(fields.BUDGETS, fields.ALLOWED_BUDGETS)
)
"""The ranges of numbers, by field name, for names shared by the wire and the endpoints."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether requests can be served. Not OpenAI's."""

    status: str
    """`ok` or `unavailable`."""
    reason: str | UnsetType = UNSET
    """Why they can't be served."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Says what this server is. Not OpenAI's."""

    name: str = "Tokenbus"
    version: str
    description: str = (
        "The APIs of OpenAI (/v1/chat/completions, /v1/responses, /v1/completions, /v1/embeddings), "
        "Anthropic (/v1/messages) and Ollama (/api/chat), and reranking (/v1/rerank)."
    )
    links: tuple[str, ...] = ("/console/", "/v1/models", "/health", "/openapi.json")


_PROBES: Mapping[str, tuple[str, type[msgspec.Struct] | None]] = {
    "/": ("What this server is", About),
    "/health": ("Whether requests can be served", Health),
    "/livez": ("Whether the process runs", None),
    "/readyz": ("Whether requests can be served", None),
}
"""Summaries and responses; None is a line of plain text."""


def document(version: str) -> Json:
    """Returns the document."""
    # Resources that a header asks for have the paths of others, which are described.
    resources = [(one, dialect) for dialect in DIALECTS if not dialect.header for one in dialect.resources]
    types: set[Any] = {About, Health, *(dialect.errors.schema for dialect in DIALECTS)}
    types |= {one.response for one, _ in resources} | {one.body for one, _ in resources if one.body}
    types |= {one.response for dialect in DIALECTS for one in dialect.records}
    types |= {one.response for dialect in DIALECTS for one in dialect.reports}
    for dialect in DIALECTS:
        types.update(kind for one in dialect.endpoints for kind in (one.body, one.response, one.event) if kind)
    ordered = sorted(types, key=repr)
    found, components = msgspec.json.schema_components(ordered, ref_template=_REFS)
    refs: dict[Any, Json] = dict(zip(ordered, found, strict=True))
    paths: Json = {path: {"get": _probe(*one, refs)} for path, one in _PROBES.items()}
    for dialect in DIALECTS:
        for endpoint in dialect.endpoints:
            paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, dialect, refs)
    for resource, dialect in resources:
        paths[resource.path] = {"post" if resource.body else "get": _resource(resource, dialect, refs)}
    for dialect in DIALECTS:
        for record in dialect.records:
            paths.setdefault(record.path, {})[record.method.lower()] = _record(record, dialect, refs)
        for report in dialect.reports:
            paths[report.path] = {"get": _report(report, dialect, refs)}
    for endpoint in {one.body: one for dialect in DIALECTS for one in dialect.endpoints}.values():
        schema = _schema(endpoint.body, refs, components)
        _narrow(schema, endpoint.required, endpoint.may_be_empty, endpoint.one_of)
        for name, unserved in endpoint.unserved.items():
            values = [one for one in unserved.harmless if one is not None]
            kinds: list[Json] = [{"enum": values}] if values else []
            owner, _, inner = name.rpartition(".")
            holder = components[_first_ref(schema["properties"][owner.removesuffix("[]")])] if owner else schema
            holder["properties"][inner] = {_ANY_OF: [*kinds, {"type": "null"}], "default": None}
    for body in {one.body for one, _ in resources if one.body is not None}:
        _narrow(_schema(body, refs, components), ("model",))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tokenbus", "version": version},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _first_ref(schema: Any) -> str:
    """Returns the name of the first component that a schema refers to; empty if there is none."""
    if isinstance(schema, dict) and "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    return next((name for one in inner if (name := _first_ref(one))), "")


def _operation(one: ApiEndpoint[Any], dialect: Dialect, refs: Mapping[type, Json]) -> Json:
    answer = _described("The answer", refs[one.response])
    if one.event is not None:
        answer["content"][one.event_type] = {"schema": {"type": "string", "contentSchema": refs[one.event]}}
    told: Json = {"summary": one.summary, "responses": {"200": answer, "default": _error(dialect, refs)}}
    if one.method == "GET":
        names = [field.encode_name for field in msgspec.structs.fields(one.body)]
        told["parameters"] = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in names]
    else:
        told["requestBody"] = {"required": True, "content": _in_json(refs[one.body])}
    return told


def _resource(one: Resource, dialect: Dialect, refs: Mapping[type, Json]) -> Json:
    told: Json = {
        "summary": one.summary,
        "responses": {
            "200": _described("The answer", refs[one.response]),
            "default": _error(dialect, refs),
        },
    }
    if one.body is not None:
        told["requestBody"] = {"required": True, "content": _in_json(refs[one.body])}
    if "{model}" in one.path:
        told["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return told


def _record(one: RecordResource, dialect: Dialect, refs: Mapping[Any, Json]) -> Json:
    named: list[Json] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return _report(one, dialect, refs, named)


def _report(
    one: RecordResource | Report, dialect: Dialect, refs: Mapping[Any, Json], named: Sequence[Json] = ()
) -> Json:
    asked = [{"name": name, "in": "query", "schema": msgspec.json.schema(kind)} for name, kind in one.query.items()]
    return {
        "summary": one.summary,
        "parameters": [*named, *asked],
        "responses": {"200": _described("The answer", refs[one.response]), "default": _error(dialect, refs)},
    }


def _probe(summary: str, response: type[msgspec.Struct] | None, refs: Mapping[type, Json]) -> Json:
    content = {"text/plain": {"schema": {"type": "string"}}} if response is None else _in_json(refs[response])
    unserved = {"description": "Requests can't be served", "content": content}
    return {
        "summary": summary,
        "responses": {"200": {"description": "The answer", "content": content}, "503": unserved},
    }


def _error(dialect: Dialect, refs: Mapping[type, Json]) -> Json:
    return _described("An error", refs[dialect.errors.schema])


def _described(description: str, schema: Json) -> Json:
    return {"description": description, "content": _in_json(schema)}


def _in_json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _schema(kind: type, refs: Mapping[type, Json], components: Json) -> Json:
    found: Json = components[refs[kind]["$ref"].rpartition("/")[2]]
    return found


def _narrow(
    schema: Json, required: tuple[str, ...], may_be_empty: tuple[str, ...] = (), one_of: tuple[str, ...] = ()
) -> None:
    """Adds what a body's types do not express: required fields, the ranges of numbers, and that null means absent in
    maps too."""
    schema["required"] = list(required)
    if one_of:
        present = {"type": "array", "minItems": 1}
        schema["oneOf"] = [{"required": [name], "properties": {name: present}} for name in one_of]
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
