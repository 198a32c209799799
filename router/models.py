"""Answers `models`: what is being served, and what this router knows of it."""

import time

from msgspec import UNSET, UnsetType

from tokenbus.protocol.wire import codec, messages
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.requests.placement_queue import PlacementQueue

_MAX_UNSERVED = 256
"""Names of models that nobody serves, in one reply."""


class Models:
    """Shows the fleet of one router."""

    def __init__(self, fleet: Fleet, queue: PlacementQueue, router_id: str, max_request_bytes: int) -> None:
        self._fleet = fleet
        self._queue = queue
        self._router_id = router_id
        self._limits = messages.ServerLimits(max_request_bytes=max_request_bytes)

    def __repr__(self) -> str:
        return f"<Models of {self._fleet!r}>"

    def answer(self, encoding: codec.Encoding, max_bytes: int) -> bytes:
        """The reply, without its workers where it would be too large with them."""
        payload = codec.encode(self._reply(with_workers=True), encoding)
        return payload if len(payload) <= max_bytes else codec.encode(self._reply(with_workers=False), encoding)

    def _reply(self, *, with_workers: bool) -> messages.ModelsReply:
        served = [
            messages.ServedModel(
                model=model,
                context_length=min(worker.card.context_length for worker in workers),
                features=sorted(set.intersection(*(set(worker.card.features) for worker in workers))),
                workers=[self._fleet.card_view(worker) for worker in workers] if with_workers else UNSET,
            )
            for model, workers in self._fleet.models()
        ]
        now = time.monotonic()
        unserved = self._unserved(now)
        if not with_workers:
            return messages.ModelsReply(models=served, limits=self._limits, truncated=True, unserved=unserved)
        view = self._fleet.router_view(self._router_id, len(self._queue), now)
        return messages.ModelsReply(models=served, limits=self._limits, router=view, unserved=unserved)

    def _unserved(self, now: float) -> list[str] | UnsetType:
        unserved = self._fleet.unserved(now)
        return UNSET if unserved is None or len(unserved) > _MAX_UNSERVED else unserved
