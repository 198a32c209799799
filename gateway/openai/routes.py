"""The short answers: which models there are, and how the gateway is."""

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenbus.gateway.catalog import Catalog, Listing
from tokenbus.gateway.concurrency_limit import ConcurrencyLimit
from tokenbus.gateway.openai import schemas
from tokenbus.gateway.tenants import Tenants
from tokenbus.protocol.bus.bus import Bus
from tokenbus.protocol.wire import errors

_READY_TIMEOUT_S = 1.0
_encoder = msgspec.json.Encoder()


class Routes:
    """Each method answers one path."""

    def __init__(self, concurrency_limit: ConcurrencyLimit, tenants: Tenants, broker: Bus, catalog: Catalog) -> None:
        self._concurrency_limit = concurrency_limit
        self._tenants = tenants
        self._catalog = catalog
        self._broker = broker

    def __repr__(self) -> str:
        return f"<Pages {self._concurrency_limit!r}>"

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        listing = await self._listing(request)
        return _json(schemas.ModelList(data=listing.models))

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{id}`."""
        listing = await self._listing(request)
        return _json(listing.find(request.path_params["model"].removesuffix("/")))

    async def livez(self, request: Request) -> Response:
        """Whether this process runs."""
        return Response("ok\n", media_type="text/plain")

    async def readyz(self, request: Request) -> Response:
        """Whether requests have a chance: the broker is there, and a router answers."""
        problem = await self.unready_reason()
        return Response(f"{problem or 'ok'}\n", status_code=503 if problem else 200, media_type="text/plain")

    async def unready_reason(self) -> str:
        """Empty while requests have a chance."""
        if self._concurrency_limit.is_draining:
            return "shutting down"
        if not self._broker.is_connected:
            return "the broker is away"
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await self._catalog.listing()
        except errors.RequestError as error:
            return error.error.message
        except TimeoutError:
            return "no router answers"
        return ""

    async def _listing(self, request: Request) -> Listing:
        """Raises ApiError, and RequestError when no router answers."""
        self._tenants.authenticate(request)
        return await self._catalog.listing()


def _json(value: msgspec.Struct) -> Response:
    return Response(_encoder.encode(value), media_type="application/json")
