"""Answers `models` requests with the models that are served and what this router knows about their workers: everything
in one message if it fits, or page by page.

A page names where the next one begins by the model and the worker at its end, so that any router can continue, and no
router keeps anything between two pages. Workers are ordered by model and name: one that stays is in exactly one page,
whatever comes and goes meanwhile."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from tokenbus.protocol.parts.receiver import PartsReceiver
from tokenbus.protocol.wire import codec, errors, limits, messages, subjects
from tokenbus.protocol.wire.checks import validation
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.placement.adapters import visible
from tokenbus.router.requests.flights.worker_client import workers_for
from tokenbus.router.requests.queueing.placement_queue import PlacementQueue
from tokenbus.router.workers.worker import Worker

_MAX_UNSERVED = 256
"""If more models than this are no longer served, a reply names none of them."""
_PAGE_WORKERS = 256
"""Workers in a page that has no `limit`: encoding their cards takes a few milliseconds."""
_ITEM_BYTES = 8
"""Bytes that a card or a model takes in a list beyond its own."""


class PageEnd(NamedTuple):
    """The end of a page: a worker, or a model with all its workers."""

    model: str
    worker_id: str | None

    @property
    def token(self) -> str:
        name = subjects.encode_name(self.model)
        return name if self.worker_id is None else f"{name}.{subjects.encode_name(self.worker_id)}"


class _Page(NamedTuple):
    """Some of the models and workers."""

    models: list[messages.ServedModel]
    end: PageEnd | None
    """The last place in it if there is more; None if there is not."""


class ModelCatalog:
    """Lists the models of one router's fleet."""

    def __init__(
        self,
        fleet: Fleet,
        queue: PlacementQueue,
        router_id: str,
        max_request_bytes: int,
        patterns: tuple[str, ...] = (),
    ) -> None:
        """`patterns` are those of the models that the router serves; none if it serves all."""
        self._patterns = patterns
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

    def page(
        self, asked: messages.ModelsRequest, encoding: codec.Encoding, max_bytes: int, parts: PartsReceiver, tenant: str
    ) -> messages.ModelsReply:
        """Returns a reply for a tenant of at most `max_bytes` in that encoding. `parts` receives clients' large
        requests. Raises RequestError for a request that is not allowed, and for a model that is not served."""
        after = self.check(asked)
        writer = _PageWriter(self._fleet, tenant, encoding)
        served = [(name, workers) for name, workers in self._fleet.models() if asked.model in (None, name)]
        base = self._base(served, max_bytes, parts, is_first=after is None)
        room = max_bytes - len(codec.encode(base, encoding))
        if room < max_bytes // 2:  # names and reasons that others have chosen leave too little for the rest
            base = codec.replace(base, router=UNSET, unserved=UNSET)
            room = max_bytes - len(codec.encode(base, encoding))
        if asked == messages.ModelsRequest():
            page = writer.write(served, None, None, room)
            if page.end is not None:
                page = writer.write(served, None, 0, room)
                base = codec.replace(base, truncated=True)
        else:
            page = writer.write(served, after, _PAGE_WORKERS if asked.limit is None else asked.limit, room)
        end = UNSET if page.end is None else page.end.token
        return codec.replace(base, models=page.models, next=end)

    def stats(self, now: float) -> messages.RouterStats:
        """Returns the router's state."""
        view = self._fleet.router_view(self._router_id, len(self._queue), now)
        return codec.replace(view, models=list(self._patterns))

    def refusal(self, error: errors.Error, max_bytes: int) -> messages.ModelsReply:
        """Returns a reply with an error."""
        return messages.ModelsReply(models=[], limits=self._limits(max_bytes), error=error)

    def served_names(self) -> list[str]:
        """Returns the models of this router's fleet, ordered by name."""
        return [model for model, _ in self._fleet.models()]

    def check(self, asked: messages.ModelsRequest, *, knows_model: bool = False) -> PageEnd | None:
        """Returns the place after which a page begins. Raises RequestError for a request that is not allowed, and,
        unless another router `knows_model`, for a model that is not served."""
        validation.check_ranges(asked)
        if asked.model is not None:
            try:
                subjects.encode_name(asked.model)
            except ValueError as error:
                raise errors.invalid_field("model", str(error)) from error
            if not knows_model and not self._fleet.workers_of(asked.model):
                workers_for(self._fleet, asked.model, time.monotonic())
        if asked.after is None:
            return None
        try:
            model, *worker_id = map(subjects.decode_name, asked.after.split("."))
            place = PageEnd(model, *worker_id or (None,))
        except (TypeError, ValueError) as error:
            raise errors.invalid_field("after", "must be the `next` of a page") from error
        if asked.model not in (None, place.model):
            raise errors.invalid_field("after", f"belongs to the model {place.model!r}, not to {asked.model!r}")
        return place

    def _limits(self, max_bytes: int) -> messages.ServerLimits:
        most = self._max_request_bytes
        fitting = min(most, max_bytes - limits.MESSAGE_RESERVE_BYTES)
        return messages.ServerLimits(max_request_bytes=fitting, max_upload_bytes=most)

    def _base(
        self, served: Sequence[tuple[str, list[Worker]]], max_bytes: int, parts: PartsReceiver, *, is_first: bool
    ) -> messages.ModelsReply:
        """Returns a reply without models."""
        base = messages.ModelsReply(models=[], limits=self._limits(max_bytes))
        if not is_first:
            return base
        now = time.monotonic()
        names = self._fleet.unserved(now)
        counts = _count((worker for _, workers in served for worker in workers), now)
        return codec.replace(
            base,
            router=codec.replace(self.stats(now), uploads=parts.num_uploads, upload_bytes=parts.held_bytes),
            summary=messages.FleetCounts(models=len(served), **msgspec.structs.asdict(counts)),
            unserved=UNSET if names is None or len(names) > _MAX_UNSERVED else names,
        )


class _PageWriter:
    """Writes pages for one tenant in one encoding."""

    def __init__(self, fleet: Fleet, tenant: str, encoding: codec.Encoding) -> None:
        self._fleet = fleet
        self._tenant = tenant
        self._encoding = encoding
        self._now = time.monotonic()

    def write(
        self, served: Sequence[tuple[str, list[Worker]]], after: PageEnd | None, limit: int | None, room: int
    ) -> _Page:
        """Returns the models, ordered by name, that come after a place, with at most `limit` workers in `room` bytes.

        With a limit of 0 they have no workers; without a limit, all. A card, or a model's adapters, that would take
        more than half the room are left out: the first model and its first worker always fit."""
        models: list[messages.ServedModel] = []
        end, most, left = after, room, limit
        for name, workers in served:
            if after is not None and (name < after.model or (name == after.model and after.worker_id is None)):
                continue
            begun = after.worker_id if after is not None and after.model == name else None
            model = self._model(name, workers, is_continued=begun is not None)
            if self._size(model) > most // 2:
                model = codec.replace(model, adapters=[])
            room -= self._size(model)
            if room < 0 or (left == 0 and limit):
                return _Page(models, end)
            if limit == 0:
                models.append(model)
                end = PageEnd(name, None)
                continue
            cards: list[messages.Card] = []
            models.append(codec.replace(model, workers=cards))
            for worker in _after(workers, begun):
                card = self._card(worker)
                size = self._size(card)
                if size > most // 2:
                    continue
                if size > room or left == 0:
                    return _Page(models if cards else models[:-1], end)
                cards.append(card)
                end = PageEnd(name, worker.card.worker_id)
                room -= size
                left = None if left is None else left - 1
        return _Page(models, None)

    def _size(self, item: messages.ServedModel | messages.Card) -> int:
        return len(codec.encode(item, self._encoding)) + _ITEM_BYTES

    def _model(self, name: str, workers: Sequence[Worker], *, is_continued: bool) -> messages.ServedModel:
        # the card of a worker that has never loaded the model says little about it
        loaded = [worker for worker in workers if not worker.is_loadable]
        cards = [worker.card for worker in loaded or workers]
        model = messages.ServedModel(
            model=name,
            context_length=min(card.context_length for card in cards),
            features=sorted(set.intersection(*(set(card.features) for card in cards))),
            loadable=UNSET if loaded else True,
            adapters=sorted({name for card in cards for name in visible(card, self._tenant)}),
        )
        if is_continued:
            return model
        taken = [worker.health.engine_bytes for worker in workers if worker.health is not None]
        return codec.replace(
            model,
            summary=_count(workers, self._now),
            engines=sorted({worker.card.engine for worker in workers}),
            engine_bytes=max(taken, default=UNSET),
            since_ms=min(subjects.epoch_sort_key(worker.card.epoch)[0] for worker in workers),
        )

    def _card(self, worker: Worker) -> messages.Card:
        """Returns a worker's card as the tenant sees it."""
        seen = visible(worker.card, self._tenant)
        own = [messages.CardAdapter(name=name, digest=one) for name, one in seen.items()]
        return codec.replace(self._fleet.card_view(worker, self._now), adapters=own)


def _after(workers: Iterable[Worker], worker_id: str | None) -> Iterator[Worker]:
    """Returns the workers after one, ordered by name."""
    left = (worker for worker in workers if worker_id is None or worker.card.worker_id > worker_id)
    return iter(sorted(left, key=lambda worker: worker.card.worker_id))


def _count(workers: Iterable[Worker], now: float) -> messages.WorkerCounts:
    counted = list(workers)
    return messages.WorkerCounts(
        workers=len(counted),
        states=dict(Counter(worker.shown_state(now) for worker in counted)),
        running=sum(worker.load.running for worker in counted),
        waiting=sum(worker.load.waiting for worker in counted),
        generated_tokens=sum(worker.load.generated_tokens for worker in counted),
    )
