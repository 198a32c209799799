"""The HTTP routes of the gateway, and its error responses (decision 0031)."""

import asyncio
import functools
import importlib.metadata
from collections.abc import Sequence
from typing import Any

import msgspec
import structlog
from msgspec import UNSET
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokenbus.client import Client
from tokenbus.gateway import openapi
from tokenbus.gateway.admission.endpoint import Endpoint, Services
from tokenbus.gateway.anthropic import count_tokens, messages_request, model_list
from tokenbus.gateway.anthropic import error_bodies as anthropic_errors
from tokenbus.gateway.calls.dialect import CallDialect
from tokenbus.gateway.calls.embed import embed
from tokenbus.gateway.calls.endpoint import CallEndpoint
from tokenbus.gateway.cohere import rerank
from tokenbus.gateway.error_forms import form_of
from tokenbus.gateway.generation.dialect import Dialect
from tokenbus.gateway.generation.endpoint import GenerationEndpoint
from tokenbus.gateway.http import http_errors
from tokenbus.gateway.http.http_errors import ApiError
from tokenbus.gateway.models.catalog import Catalog, Catalogs, Listing
from tokenbus.gateway.ollama.routes import OllamaRoutes
from tokenbus.gateway.openai import chat_request, embeddings, error_bodies, schemas
from tokenbus.gateway.openai.completions import request as completions_request
from tokenbus.gateway.openai.responses import input_tokens
from tokenbus.gateway.openai.responses import request as responses_request
from tokenbus.gateway.openai.responses.response import STREAMED_ERRORS
from tokenbus.gateway.vllm import token_calls
from tokenbus.protocol.wire import errors

_READY_TIMEOUT_S = 1.0
_encoder = msgspec.json.Encoder()


class Routes:
    """The endpoints for models and health."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._catalog = Catalog(services.tenants.gateway_client.models)
        """The listing that tells the gateway itself whether a router answers."""
        self._catalogs = Catalogs()

    def __repr__(self) -> str:
        return f"<Routes {self._services!r}>"

    async def models(self, request: Request) -> Response:
        """Serves `GET /v1/models`, in the form of the API used."""
        listing = await self.listing(request)
        if model_list.is_wanted(request.headers):
            return _json(model_list.to_page(listing.models))
        return _json(schemas.ModelList(data=listing.models))

    async def model(self, request: Request) -> Response:
        """Serves `GET /v1/models/{id}`."""
        listing = await self.listing(request)
        model = listing.find(request.path_params["model"].removesuffix("/"))
        return _json(model_list.to_info(model) if model_list.is_wanted(request.headers) else model)

    async def livez(self, request: Request) -> Response:
        """Serves `GET /livez`: 200 while this process runs."""
        return Response("ok\n", media_type="text/plain")

    async def readyz(self, request: Request) -> Response:
        """Serves `GET /readyz`: 200 while requests can be served, else 503 and the reason."""
        reason = await self.unready_reason()
        return Response(f"{reason or 'ok'}\n", status_code=503 if reason else 200, media_type="text/plain")

    async def health(self, request: Request) -> Response:
        """Serves `GET /health`, used by clients of other servers: `/readyz` in JSON."""
        reason = await self.unready_reason()
        told = schemas.Health(status="unavailable" if reason else "ok", reason=reason or UNSET)
        return Response(_encoder.encode(told), status_code=503 if reason else 200, media_type="application/json")

    async def openapi(self, request: Request) -> Response:
        """Serves `GET /openapi.json`, which describes all endpoints."""
        return Response(_openapi(has_default_model=bool(self._services.aliases.default)), media_type="application/json")

    async def unready_reason(self) -> str:
        """Returns why requests can't be served, or an empty string if they can."""
        if self._services.limit.is_draining:
            return "shutting down"
        if not self._services.broker.is_connected:
            return "there is no connection to the broker"
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await self._catalog.listing()
        except errors.RequestError as error:
            return error.error.message
        except TimeoutError:
            return "no router answers"
        return ""

    async def listing(self, request: Request) -> Listing:
        """Returns the models visible to a request, and their aliases. Raises ApiError and RequestError."""
        name, client = self._services.tenants.authenticate(request)
        listing = await self._catalogs.of(name, client.models).listing()
        return listing.with_aliases(self._services.aliases)


CALLS: dict[str, CallDialect[Any, Any]] = {
    "/v1/embeddings": CallDialect(embeddings.parse, embed, error_bodies.encode, usage_of=embeddings.usage_of),
    "/v1/rerank": CallDialect(rerank.parse, Client.rerank, error_bodies.encode, usage_of=rerank.usage_of),
    "/tokenize": CallDialect(token_calls.parse_tokenize, Client.tokenize, error_bodies.encode),
    "/detokenize": CallDialect(token_calls.parse_detokenize, Client.detokenize, error_bodies.encode),
    "/v1/responses/input_tokens": CallDialect(input_tokens.parse, Client.tokenize, error_bodies.encode),
    "/v1/messages/count_tokens": CallDialect(
        count_tokens.parse, Client.tokenize, anthropic_errors.encode, status_of=anthropic_errors.status_of
    ),
}
"""The endpoints with a single reply that generate nothing, by path."""
GENERATING: dict[str, Dialect] = {
    "/v1/chat/completions": Dialect(chat_request.parse, error_bodies.encode),
    "/v1/completions": Dialect(completions_request.parse, error_bodies.encode),
    "/v1/responses": Dialect(
        responses_request.parse, error_bodies.encode, streamed_errors=STREAMED_ERRORS, repeats_logprobs=True
    ),
    "/v1/messages": Dialect(messages_request.parse, anthropic_errors.encode, anthropic_errors.status_of),
}
"""The endpoints that generate, by path."""


def make_app(services: Services, routes: Routes, allowed_origins: Sequence[str]) -> Starlette:
    """Returns the ASGI application. Web pages from the allowed origins may use it."""
    endpoints: dict[str, Endpoint] = {path: GenerationEndpoint(services, one) for path, one in GENERATING.items()}
    endpoints |= {path: CallEndpoint(services, one) for path, one in CALLS.items()}
    app = Starlette(
        routes=[
            *(
                Route(path + slash, endpoint, methods=["POST"])
                for path, endpoint in endpoints.items()
                for slash in ("", "/")
            ),
            Route("/v1/models", routes.models),
            Route("/v1/models/", routes.models),
            Route("/v1/models/{model:path}", routes.model),
            *OllamaRoutes(routes.listing, services.bodies).routes(),
            Route("/openapi.json", routes.openapi),
            Route("/livez", routes.livez),
            Route("/readyz", routes.readyz),
            Route("/health", routes.health),
        ],
        middleware=_cors(allowed_origins),
        exception_handlers=dict.fromkeys((ApiError, errors.RequestError, HTTPException, Exception), _on_error),
    )
    # A redirect would go to the host named by the client, bypassing the TLS of a proxy in front.
    app.router.redirect_slashes = False
    return app


@functools.cache
def _openapi(*, has_default_model: bool) -> bytes:
    version = importlib.metadata.version("tokenbus")
    return _encoder.encode(openapi.document(version, has_default_model=has_default_model))


async def _on_error(request: Request, error: Exception) -> Response:
    match error:
        case ApiError():
            response = error.response
        case errors.RequestError():
            response = http_errors.from_error(error.error)
        case HTTPException():
            response = http_errors.unknown_path(error.status_code, request.method, request.scope["path"])
        case _:
            structlog.get_logger().error("request_failed", exc_info=error)
            response = http_errors.INTERNAL_ERROR
    form, headers = form_of(request.scope["path"], request.headers), response.headers
    if isinstance(error, HTTPException):
        headers |= error.headers or {}  # the methods that the path has
    body, status = form.error_body(response), form.status_of(response)
    return Response(body, status, headers, media_type="application/json")


def _cors(allowed_origins: Sequence[str]) -> list[Middleware]:
    if not allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after", "x-should-retry"],
        )
    ]


def _json(value: msgspec.Struct) -> Response:
    return Response(_encoder.encode(value), media_type="application/json")
