"""Serves Ollama's read-only calls."""

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokenbus.gateway.http import body
from tokenbus.gateway.http.body_memory import BodyMemory
from tokenbus.gateway.models.catalog import Listing
from tokenbus.gateway.ollama import model_info

_MAX_BODY_BYTES = 64 * 1024
_CLIENT_GONE = 499
_encoder = msgspec.json.Encoder()


class OllamaRoutes:
    """`list_models` returns the models visible to a request. It raises ApiError and RequestError."""

    def __init__(self, list_models: Callable[[Request], Awaitable[Listing]], bodies: BodyMemory) -> None:
        self._list_models = list_models
        self._bodies = bodies

    def __repr__(self) -> str:
        return f"<OllamaRoutes {self._bodies!r}>"

    def routes(self) -> list[Route]:
        return [
            Route("/api/version", self.version),
            Route("/api/tags", self.tags),
            Route("/api/ps", self.running),
            Route("/api/show", self.show, methods=["POST"]),
        ]

    async def version(self, request: Request) -> Response:
        """Serves `GET /api/version`, which needs no key: clients use it to identify the server."""
        return _json(model_info.Version())

    async def tags(self, request: Request) -> Response:
        """Serves `GET /api/tags`."""
        return _json(model_info.to_list((await self._list_models(request)).models))

    async def running(self, request: Request) -> Response:
        """Serves `GET /api/ps`."""
        return _json(model_info.to_running((await self._list_models(request)).models))

    async def show(self, request: Request) -> Response:
        """Serves `POST /api/show`."""
        listing = await self._list_models(request)
        try:
            with self._bodies.holding() as held:
                name = model_info.parse_show(await body.read(request, _MAX_BODY_BYTES, held))
        except body.ClientDisconnectedError:
            return Response(status_code=_CLIENT_GONE)  # nobody reads it
        model = listing.find(model_info.named(name, {one.id: one for one in listing.models}))
        return _json(model_info.to_shown(model, listing.features.get(model.root, ())))


def _json(value: msgspec.Struct) -> Response:
    return Response(_encoder.encode(value), media_type="application/json")
