"""The gateway's OpenAPI document, made from the structs of its endpoints' requests and responses."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from tokenbus.gateway import openapi_bodies
from tokenbus.gateway.anthropic import count_tokens, messages_request
from tokenbus.gateway.anthropic import schemas as anthropic_schemas
from tokenbus.gateway.cohere import rerank
from tokenbus.gateway.ollama import model_info
from tokenbus.gateway.openai import chat_request, embeddings, schemas
from tokenbus.gateway.openai.completions import request as completions_request
from tokenbus.gateway.openai.completions import response as completions_response
from tokenbus.gateway.openai.responses import body as responses_body
from tokenbus.gateway.openai.responses import input_tokens
from tokenbus.gateway.openai.responses import response as responses_response
from tokenbus.gateway.vllm import token_calls

Json = dict[str, Any]
_REFS = "#/components/schemas/{name}"


class ApiOperation(NamedTuple):
    """A POST endpoint."""

    summary: str
    request: type[msgspec.Struct]
    response: type[msgspec.Struct]
    required: tuple[str, ...] = ("model",)
    """Required fields of the body, which may not be null, nor empty unless named in `may_be_empty`."""
    may_be_empty: tuple[str, ...] = ()
    """Lists."""
    event: type[msgspec.Struct] | None = None
    """The data of the events of a streamed response, if there can be one."""
    error: type[msgspec.Struct] = schemas.ErrorBody


class Resource(NamedTuple):
    """A GET endpoint."""

    summary: str
    response: type[msgspec.Struct] | None
    """None for a line of plain text."""
    parameters: tuple[str, ...] = ()
    error: type[msgspec.Struct] = schemas.ErrorBody


OPERATIONS: Mapping[str, ApiOperation] = {
    "/v1/chat/completions": ApiOperation(
        "A chat completion",
        chat_request.ChatRequest,
        schemas.ChatCompletion,
        ("model", "messages"),
        event=schemas.ChatCompletionChunk,
    ),
    "/v1/completions": ApiOperation(
        "Completions of plain prompts",
        completions_request.CompletionRequest,
        completions_response.Completion,
        ("model", "prompt"),
        event=completions_response.Completion,
    ),
    "/v1/responses": ApiOperation(
        "A response, without storage",
        responses_body.ResponsesBody,
        responses_response.Response,
    ),
    "/v1/responses/input_tokens": ApiOperation(
        "The number of tokens of a response's input", input_tokens.CountBody, input_tokens.InputTokens
    ),
    "/v1/messages": ApiOperation(
        "A message",
        messages_request.MessagesRequest,
        anthropic_schemas.AnthropicMessage,
        ("model", "messages", "max_tokens"),
        error=anthropic_schemas.AnthropicErrorBody,
    ),
    "/v1/messages/count_tokens": ApiOperation(
        "The number of tokens of a message's prompt",
        count_tokens.CountTokensRequest,
        anthropic_schemas.MessageTokensCount,
        ("model", "messages"),
        error=anthropic_schemas.AnthropicErrorBody,
    ),
    "/v1/embeddings": ApiOperation(
        "Embeddings", embeddings.EmbeddingRequest, embeddings.EmbeddingList, ("model", "input")
    ),
    "/v1/rerank": ApiOperation(
        "Documents ordered by relevance",
        rerank.RerankBody,
        rerank.RerankResponse,
        ("model", "query", "documents"),
    ),
    "/tokenize": ApiOperation("The tokens of a prompt", token_calls.TokenizeBody, token_calls.TokenizeResponse),
    "/detokenize": ApiOperation(
        "The text of tokens",
        token_calls.DetokenizeBody,
        token_calls.DetokenizeResponse,
        ("model", "tokens"),
        ("tokens",),
    ),
    "/api/show": ApiOperation(
        "One model, in Ollama's form",
        model_info.ShowBody,
        model_info.ShownModel,
        error=model_info.OllamaError,
    ),
}
RESOURCES: Mapping[str, Resource] = {
    "/v1/models": Resource("The models that are served", schemas.ModelList),
    "/v1/models/{model}": Resource("One model", schemas.Model, ("model",)),
    "/api/version": Resource("The version of Ollama that these calls match", model_info.Version),
    "/api/tags": Resource("The models, in Ollama's form", model_info.OllamaModelList, error=model_info.OllamaError),
    "/api/ps": Resource("The loaded models", model_info.RunningModelList, error=model_info.OllamaError),
    "/health": Resource("Whether requests can be served", schemas.Health),
    "/livez": Resource("Whether the process runs", None),
    "/readyz": Resource("Whether requests can be served", None),
}


def document(version: str, *, has_default_model: bool = False) -> Json:
    """Returns the document. With a default model, requests need not name one."""
    every = [*OPERATIONS.values(), *RESOURCES.values()]
    types = {kind for one in every for kind in one if isinstance(kind, type)}
    ordered = sorted(types, key=lambda kind: (kind.__module__, kind.__qualname__))
    found, components = msgspec.json.schema_components(ordered, ref_template=_REFS)
    refs = dict(zip(ordered, found, strict=True))
    paths: Json = {path: {"post": _operation(one, refs)} for path, one in OPERATIONS.items()}
    paths |= {path: {"get": _resource(one, refs)} for path, one in RESOURCES.items()}
    for path, one in OPERATIONS.items():
        may_omit = ("model",) if has_default_model and not path.startswith("/api/") else ()
        required = tuple(name for name in one.required if name not in may_omit)
        openapi_bodies.narrow(components[refs[one.request]["$ref"].rpartition("/")[2]], required, one.may_be_empty)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tokenbus", "version": version},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _operation(one: ApiOperation, refs: Mapping[type, Json]) -> Json:
    content = {"application/json": {"schema": refs[one.response]}}
    if one.event is not None:
        content["text/event-stream"] = {"schema": {"type": "string", "contentSchema": refs[one.event]}}
    return {
        "summary": one.summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": refs[one.request]}}},
        "responses": {"200": {"description": "The answer", "content": content}, "default": _error(one.error, refs)},
    }


def _resource(one: Resource, refs: Mapping[type, Json]) -> Json:
    text: Json = {"text/plain": {"schema": {"type": "string"}}}
    content = text if one.response is None else {"application/json": {"schema": refs[one.response]}}
    unserved = {"description": "Requests can't be served", "content": content}
    found: Json = {"200": {"description": "The answer", "content": content}}
    is_health = one.response in (None, schemas.Health)
    found |= {"503": unserved} if is_health else {"default": _error(one.error, refs)}
    told: Json = {"summary": one.summary, "responses": found}
    if one.parameters:
        told["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in one.parameters
        ]
    return told


def _error(kind: type, refs: Mapping[type, Json]) -> Json:
    return {"description": "An error", "content": {"application/json": {"schema": refs[kind]}}}
