"""What is served, as a router says: asked for at most once a second, whoever and however many want to know."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from msgspec import UNSET

from tokenbus.gateway.openai import schemas
from tokenbus.protocol.wire import errors, messages, subjects

_KEEP_S = 1.0
_MAX_NAME = 128


class Listing(NamedTuple):
    """What a router has said."""

    models: list[schemas.Model]
    unserved: frozenset[str] | None
    """Names of those that were served and are not now; None where the router can't tell them from any other name."""

    def find(self, name: str) -> schemas.Model:
        """One model. Raises RequestError as a request for it would end."""
        for model in self.models:
            if model.id == name:
                return model
        if self.unserved is None or name in self.unserved:
            raise errors.request_error(errors.Code.NO_WORKER, f"nothing serves {name[:_MAX_NAME]!r} now")
        raise errors.request_error(errors.Code.MODEL_NOT_FOUND, f"no worker has ever served {name[:_MAX_NAME]!r}")


class Catalog:
    """The models of a system. Those who ask while a question is open share its answer, or its failure."""

    def __init__(
        self, ask: Callable[[], Awaitable[messages.ModelsReply]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`ask` may raise RequestError."""
        self._ask = ask
        self._clock = clock
        self._asking: asyncio.Future[Listing] | None = None
        self._answered_at = 0.0

    def __repr__(self) -> str:
        return f"<Catalog {self._asking}>"

    async def listing(self) -> Listing:
        """All that are served. Raises RequestError when no router answers."""
        asking = self._asking
        if asking is None or (asking.done() and self._clock() - self._answered_at >= _KEEP_S):
            asking = self._asking = asyncio.create_task(self._fetch())
            asking.add_done_callback(self._note)
        return await asyncio.shield(asking)  # one who goes away leaves the others their answer

    async def _fetch(self) -> Listing:
        reply = await self._ask()
        unserved = None if reply.unserved is UNSET else frozenset(reply.unserved)
        return Listing([_model(served) for served in reply.models], unserved)

    def _note(self, asked: "asyncio.Future[Listing]") -> None:
        self._answered_at = self._clock()
        if not asked.cancelled():
            asked.exception()  # all who wanted to know may be gone


def _model(served: messages.ServedModel) -> schemas.Model:
    born_ms = [subjects.epoch_sort_key(card.epoch)[0] for card in served.workers or []]
    return schemas.Model(
        id=served.model, created=min(born_ms, default=0) // 1_000, context_length=served.context_length
    )
