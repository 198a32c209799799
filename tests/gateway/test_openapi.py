"""The OpenAPI document names every endpoint, and says of bodies what the endpoints accept."""

import json
import re
from typing import Any

import jsonschema
import pytest

from tests.gateway.test_calls import get, post
from tokenbus.gateway import dialects, openapi
from tokenbus.gateway.serving.dialect import UnnamedModelError
from tokenbus.protocol.wire import errors

DOCUMENT = openapi.document("1")
ENDPOINTS = {one.path: one for dialect in dialects.DIALECTS for one in dialect.endpoints}
SAID = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": SAID,
        "max_tokens": 1,
        "n": 128,
        "temperature": 100,
        "top_p": None,
        "thinking_token_budget": -1,
        "reasoning": {"max_tokens": 0, "effort": "low"},
    },
    "/v1/completions": {"model": "m", "prompt": [[1], [2**32 - 1]], "logprobs": 20, "logit_bias": {"5": 1, "6": None}},
    "/v1/embeddings": {"model": "m", "input": ["a"], "dimensions": 1, "encoding_format": "base64"},
    "/v1/rerank": {"model": "m", "query": "q", "documents": ["a", {"text": "b"}], "top_n": 1},
    "/detokenize": {"model": "m", "tokens": []},
}
BAD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": None}),
    ("/v1/chat/completions", {"n": 129}),
    ("/v1/chat/completions", {"temperature": -0.1}),
    ("/v1/chat/completions", {"top_p": 0}),
    ("/v1/chat/completions", {"max_completion_tokens": -1}),
    ("/v1/chat/completions", {"top_logprobs": 21, "logprobs": True}),
    ("/v1/chat/completions", {"stop": 5}),
    ("/v1/chat/completions", {"thinking_budget_tokens": -2}),
    ("/v1/chat/completions", {"reasoning": {"max_tokens": "9"}}),
    ("/v1/completions", {"prompt": ""}),
    ("/v1/completions", {"prompt": ["a", 1]}),
    ("/v1/completions", {"prompt": [[1], []]}),
    ("/v1/completions", {"prompt": [2**32]}),
    ("/v1/completions", {"max_tokens": -1}),
    ("/v1/completions", {"seed": 2**63}),
    ("/v1/embeddings", {"input": None}),
    ("/v1/embeddings", {"input": [""]}),
    ("/v1/embeddings", {"dimensions": 0}),
    ("/v1/embeddings", {"timeout_ms": 0}),
    ("/v1/rerank", {"documents": []}),
    ("/v1/rerank", {"query": ""}),
    ("/v1/rerank", {"top_n": 0}),
    ("/detokenize", {"tokens": None}),
    ("/detokenize", {"tokens": ["a"]}),
    ("/detokenize", {"tokens": [-1]}),
]


def schema_of(path: str, method: str = "post") -> dict[str, Any]:
    operation = DOCUMENT["paths"][path][method]
    found = operation["requestBody"] if method == "post" else operation["responses"]["200"]
    return {**found["content"]["application/json"]["schema"], "components": DOCUMENT["components"]}


def is_valid(path: str, body: object) -> bool:
    return bool(jsonschema.Draft202012Validator(schema_of(path)).is_valid(body))


def is_taken(path: str, body: object, default_model: str = "m") -> bool:
    try:
        ENDPOINTS[path].parse(json.dumps(body).encode(), {}, "r", default_model)
    except errors.RequestError:
        return False
    return True


def test_every_endpoint_is_in_the_document() -> None:
    paths = {
        one.path for dialect in dialects.DIALECTS for one in (*dialect.resources, *dialect.records, *dialect.reports)
    }
    assert ENDPOINTS.keys() | paths | {"/", "/health", "/livez", "/readyz"} == DOCUMENT["paths"].keys()


def test_every_reference_leads_to_a_schema() -> None:
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(DOCUMENT)))
    assert names
    assert names <= DOCUMENT["components"]["schemas"].keys()
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("path", GOOD)
def test_a_good_body_is_valid_and_taken(path: str) -> None:
    assert is_valid(path, GOOD[path])
    assert is_taken(path, GOOD[path])
    for name in DOCUMENT["components"]["schemas"][schema_of(path)["$ref"].rpartition("/")[2]]["required"]:
        body = {other: value for other, value in GOOD[path].items() if other != name}
        assert not is_valid(path, body)
        assert not is_taken(path, body)


@pytest.mark.parametrize("path", GOOD)
def test_a_body_without_a_model_is_valid_and_taken_with_a_default(path: str) -> None:
    unnamed = {name: value for name, value in GOOD[path].items() if name != "model"}
    for body in (unnamed, unnamed | {"model": None}, unnamed | {"model": ""}):
        assert is_valid(path, body)
        assert is_taken(path, body, "m")
        with pytest.raises(UnnamedModelError):
            is_taken(path, body, "")
    assert not is_valid("/api/show", {})


@pytest.mark.parametrize(("path", "change"), BAD)
def test_a_body_that_the_document_forbids_is_refused(path: str, change: dict[str, Any]) -> None:
    assert not is_valid(path, GOOD[path] | change)
    assert not is_taken(path, GOOD[path] | change)


@pytest.mark.parametrize("path", [path for path, one in ENDPOINTS.items() if one.method == "POST"])
def test_a_field_that_may_be_left_out_may_be_null(path: str) -> None:
    assert not not_nullable(schema_of(path), set())


def not_nullable(schema: Any, seen: set[str]) -> list[str]:
    """The properties below a schema that need no value and don't allow null, which counts as none."""
    if isinstance(schema, list):
        return [found for one in schema for found in not_nullable(one, seen)]
    if not isinstance(schema, dict):
        return []
    name = schema.get("$ref", "").rpartition("/")[2]
    if not name:
        inner = [value for key, value in schema.items() if key != "components"]
        return not_nullable(inner, seen)
    if name in seen:
        return []
    seen.add(name)
    referred = DOCUMENT["components"]["schemas"][name]
    optional = {key: one for key, one in referred["properties"].items() if key not in referred.get("required", ())}
    found = [f"{name}.{key}" for key, one in optional.items() if {"type": "null"} not in one.get("anyOf", ())]
    return found + not_nullable(list(referred["properties"].values()), seen)


def test_answers_are_as_the_document_says(base_url: str) -> None:
    assert json.loads(get(base_url, "/openapi.json"))["paths"].keys() == DOCUMENT["paths"].keys()
    prompts = {"messages": SAID, "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
    for path, body in (
        ("/v1/chat/completions", prompts),
        ("/v1/completions", {"prompt": "12 + 30 =", "max_tokens": 2, "logprobs": 1}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [5]}),
        ("/api/show", {}),
    ):
        status, answer = post(base_url, path, {"model": "demo"} | body)
        assert status == 200, answer
        response = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(answer, response | {"components": DOCUMENT["components"]})
    for path in ("/v1/models", "/api/version", "/api/tags", "/api/ps", "/health"):
        jsonschema.validate(json.loads(get(base_url, path)), schema_of(path, "get"))
