"""The short answers: which models there are, and how the gateway is."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway import failures, shapes
from gateway.door import Door
from gateway.tenants import Tenants
from protocol import errors, messages, subjects
from protocol.bus import Bus

_READY_TIMEOUT_S = 1.0
_encoder = msgspec.json.Encoder()


class Pages:
    """Each method answers one path."""

    def __init__(self, door: Door, tenants: Tenants, broker: Bus) -> None:
        self._door = door
        self._tenants = tenants
        self._broker = broker

    def __repr__(self) -> str:
        return f"<Pages {self._door!r}>"

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return _json(shapes.ModelList(data=await self._served(request)))

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{id}`."""
        name = request.path_params["model"]
        for model in await self._served(request):
            if model.id == name:
                return _json(model)
        raise failures.FailedError(failures.unknown_model(name))

    async def livez(self, request: Request) -> Response:
        """Whether this process runs."""
        return Response("ok\n", media_type="text/plain")

    async def readyz(self, request: Request) -> Response:
        """Whether requests have a chance: the broker is there, and a router answers."""
        problem = await self._problem()
        return Response(f"{problem or 'ok'}\n", status_code=503 if problem else 200, media_type="text/plain")

    async def _problem(self) -> str | None:
        if self._door.is_closed:
            return "shutting down"
        if not self._broker.is_connected:
            return "the broker is away"
        try:
            await self._tenants.own.models(timeout_s=_READY_TIMEOUT_S)
        except errors.RequestError as error:
            return error.error.message
        return None

    async def _served(self, request: Request) -> list[shapes.Model]:
        """Raises FailedError, and RequestError when no router answers."""
        self._tenants.of(request)
        reply = await self._tenants.own.models()
        return [_model(served) for served in reply.models]


def _model(served: messages.ServedModel) -> shapes.Model:
    born_ms = [subjects.epoch_order(card.epoch)[0] for card in served.workers or []]
    return shapes.Model(id=served.model, created=min(born_ms, default=0) // 1_000, context_length=served.context_length)


def _json(value: msgspec.Struct) -> Response:
    return Response(_encoder.encode(value), media_type="application/json")
