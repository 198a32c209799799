"""Answers `models` requests with the models that are served and what this router knows about their workers."""

import time
from collections.abc import Sequence

from msgspec import UNSET

from tokenbus.protocol.parts.receiver import PartsReceiver
from tokenbus.protocol.wire import codec, limits, messages, subjects
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.placement.adapters import visible
from tokenbus.router.requests.queueing.placement_queue import PlacementQueue
from tokenbus.router.workers.worker import Worker

_MAX_UNSERVED = 256
"""If more models than this are no longer served, a reply names none of them."""


class ModelCatalog:
    """Lists the models of one router's fleet."""

    def __init__(self, fleet: Fleet, queue: PlacementQueue, router_id: str, max_request_bytes: int) -> None:
        self._fleet = fleet
        self._queue = queue
        self._router_id = router_id
        self._max_request_bytes = max_request_bytes

    def with_adapter(self, address: subjects.ModelAddress) -> tuple[subjects.ModelAddress, str | None]:
        """Returns the model that a name means, and the adapter after a colon in it, if any: a model whose own name has
        the colon takes precedence, and the adapter must be one that the tenant may use."""
        base, colon, adapter = address.model.rpartition(":")
        if not colon or self._fleet.workers_of(address.model):
            return address, None
        if not any(adapter in visible(worker.card, address.tenant) for worker in self._fleet.workers_of(base)):
            return address, None
        return address._replace(model=base), adapter

    def reply(self, encoding: codec.Encoding, max_bytes: int, parts: PartsReceiver, tenant: str) -> bytes:
        """Returns an encoded reply for a tenant, without its workers if it would otherwise exceed `max_bytes`, the
        broker's largest message. `parts` receives clients' large requests."""
        payload = codec.encode(self._reply(max_bytes, parts, tenant, with_workers=True), encoding)
        if len(payload) <= max_bytes:
            return payload
        return codec.encode(self._reply(max_bytes, parts, tenant, with_workers=False), encoding)

    def _reply(self, max_bytes: int, parts: PartsReceiver, tenant: str, *, with_workers: bool) -> messages.ModelsReply:
        most = self._max_request_bytes
        server = messages.ServerLimits(
            max_request_bytes=min(most, max_bytes - limits.MESSAGE_RESERVE_BYTES), max_upload_bytes=most
        )
        served = [
            self._served(model, workers, tenant, with_workers=with_workers) for model, workers in self._fleet.models()
        ]
        now = time.monotonic()
        names = self._fleet.unserved(now)
        unserved = UNSET if names is None or len(names) > _MAX_UNSERVED else names
        if not with_workers:
            return messages.ModelsReply(models=served, limits=server, truncated=True, unserved=unserved)
        view = self._fleet.router_view(self._router_id, len(self._queue), now)
        view = codec.replace(view, uploads=parts.num_uploads, upload_bytes=parts.held_bytes)
        return messages.ModelsReply(models=served, limits=server, router=view, unserved=unserved)

    def _served(
        self, model: str, workers: Sequence[Worker], tenant: str, *, with_workers: bool
    ) -> messages.ServedModel:
        # the card of a worker that has never loaded the model says little about it
        loaded = [worker for worker in workers if not worker.is_loadable]
        cards = [worker.card for worker in loaded or workers]
        return messages.ServedModel(
            model=model,
            context_length=min(card.context_length for card in cards),
            features=sorted(set.intersection(*(set(card.features) for card in cards))),
            loadable=UNSET if loaded else True,
            adapters=sorted({name for card in cards for name in visible(card, tenant)}),
            workers=[self._card(worker, tenant) for worker in workers] if with_workers else UNSET,
        )

    def _card(self, worker: Worker, tenant: str) -> messages.Card:
        """Returns a worker's card as a tenant sees it."""
        own = [messages.CardAdapter(name=name, digest=one) for name, one in visible(worker.card, tenant).items()]
        return codec.replace(self._fleet.card_view(worker, time.monotonic()), adapters=own)
