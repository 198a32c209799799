"""The HTTP routes of the gateway, and its answers to errors."""

import asyncio

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokenbus.gateway.catalog import Catalog, Listing
from tokenbus.gateway.chat import ChatCompletions
from tokenbus.gateway.concurrency_limit import ConcurrencyLimit
from tokenbus.gateway.openai import error_responses, schemas
from tokenbus.gateway.openai.error_responses import ApiError, ErrorResponse
from tokenbus.gateway.tenants import Tenants
from tokenbus.protocol.bus.bus import Bus
from tokenbus.protocol.wire import errors

_READY_TIMEOUT_S = 1.0
_encoder = msgspec.json.Encoder()


class Routes:
    """The endpoints that answer in one piece: models and health."""

    def __init__(self, limit: ConcurrencyLimit, tenants: Tenants, broker: Bus, catalog: Catalog) -> None:
        self._limit = limit
        self._tenants = tenants
        self._catalog = catalog
        self._broker = broker

    def __repr__(self) -> str:
        return f"<Routes {self._limit!r}>"

    async def models(self, request: Request) -> Response:
        """Serves `GET /v1/models`."""
        listing = await self._listing(request)
        return _json(schemas.ModelList(data=listing.models))

    async def model(self, request: Request) -> Response:
        """Serves `GET /v1/models/{id}`."""
        listing = await self._listing(request)
        return _json(listing.find(request.path_params["model"].removesuffix("/")))

    async def livez(self, request: Request) -> Response:
        """Serves `GET /livez`: 200 while this process runs."""
        return Response("ok\n", media_type="text/plain")

    async def readyz(self, request: Request) -> Response:
        """Serves `GET /readyz`: 200 while requests can be served, else 503 and the reason."""
        reason = await self.unready_reason()
        return Response(f"{reason or 'ok'}\n", status_code=503 if reason else 200, media_type="text/plain")

    async def unready_reason(self) -> str:
        """Returns why requests can't be served, or an empty string if they can."""
        if self._limit.is_draining:
            return "shutting down"
        if not self._broker.is_connected:
            return "there is no connection to the broker"
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await self._catalog.listing()
        except errors.RequestError as error:
            return error.error.message
        except TimeoutError:
            return "no router answers"
        return ""

    async def _listing(self, request: Request) -> Listing:
        self._tenants.authenticate(request)
        return await self._catalog.listing()


def make_app(chat: ChatCompletions, routes: Routes) -> Starlette:
    """Returns the ASGI application."""
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/chat/completions/", chat, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/v1/models/", routes.models),
            Route("/v1/models/{model:path}", routes.model),
            Route("/livez", routes.livez),
            Route("/readyz", routes.readyz),
        ],
        exception_handlers=dict.fromkeys((ApiError, errors.RequestError, HTTPException, Exception), _on_error),
    )
    # A redirect would go to the host that the client names, and leave the TLS of a proxy in front.
    app.router.redirect_slashes = False
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    match error:
        case ApiError():
            response = error.response
        case errors.RequestError():
            response = error_responses.from_error(error.error)
        case HTTPException():
            response = error_responses.unknown_path(error.status_code, request.method, request.scope["path"])
        case _:
            structlog.get_logger().error("request_failed", exc_info=error)
            response = error_responses.INTERNAL_ERROR
    return _response(response)


def _response(response: ErrorResponse) -> Response:
    return Response(response.body, response.status, response.headers, media_type="application/json")


def _json(value: msgspec.Struct) -> Response:
    return Response(_encoder.encode(value), media_type="application/json")
