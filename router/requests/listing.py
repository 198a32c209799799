"""Answers `models` requests for the whole system, of which this router may serve a part.

A router that serves all models answers by itself. One that serves a part asks routers of the other parts, on a subject
with a model's name, to which those that serve it listen. The names come from the cards of all workers.

    a page           comes from one part: this router's, or the one that serves the next model in order
    everything else  is collected: one answer of each part, until every known model is in some answer"""

import asyncio
import functools
from collections import Counter
from collections.abc import Collection, Sequence

from msgspec import UNSET
from nats.aio.msg import Msg

from tokenbus.protocol import tasks
from tokenbus.protocol.bus.bus import Bus, NoRespondersError, Outgoing, PayloadTooLargeError, Subscription
from tokenbus.protocol.bus.reply_sender import ReplySender
from tokenbus.protocol.parts.receiver import PartsReceiver
from tokenbus.protocol.wire import codec, errors, internal, messages, subjects
from tokenbus.router.fleet.model_part import ModelPart
from tokenbus.router.requests.flights.worker_client import WorkerClient
from tokenbus.router.requests.models import ModelCatalog

_requests = codec.Decoder(internal.ListingRequest)
_replies = codec.Decoder(messages.ModelsReply)
_ANSWER_S = 0.5
"""A router that does not answer for this long is not waited for."""
_TRIES = 2
_RESERVE_BYTES = 512
"""Room for what a router adds to another one's page."""
_MAX_ASKING = 256
"""Listings that wait for other routers; further ones have this router's part only."""


class SystemListing:
    """The listings of one router's clients, and of the other routers that ask for its part."""

    def __init__(
        self,
        bus: Bus,
        replies: ReplySender,
        names: subjects.Subjects,
        catalog: ModelCatalog,
        part: ModelPart,
        workers: WorkerClient,
    ) -> None:
        self._bus = bus
        self._replies = replies
        self._names = names
        self._catalog = catalog
        self._part = part
        self._workers = workers
        self.parts: PartsReceiver | None = None
        """Receives clients' large requests."""
        self._asking: set[asyncio.Task[None]] = set()
        self._subscriptions: list[Subscription] = []

    def __repr__(self) -> str:
        return f"<SystemListing of {self._part!r}, {len(self._asking)} asking>"

    async def open(self) -> None:
        """Listens to other routers, if this one serves all models."""
        if self._part.is_whole:
            await self._hear(self._names.listing(None))

    async def hear(self, model: str) -> None:
        """Listens to routers that do not serve this model."""
        await self._hear(self._names.listing(model))

    async def close(self) -> None:
        """Stops listening."""
        while self._subscriptions:
            await self._bus.unsubscribe(self._subscriptions.pop())

    async def _hear(self, subject: str) -> None:
        self._subscriptions.append(await self._bus.subscribe(subject, self._on_listing, queue="router"))

    def answer(self, reply: str, asked: messages.ModelsRequest, encoding: codec.Encoding, tenant: str) -> None:
        """Answers a client, soon if other routers have to be asked. Raises RequestError for a request that is not
        allowed, and for a model that is not served."""
        others = [] if self._part.is_whole else [one for one in self._part.others if asked.model in (None, one)]
        most = self._bus.max_payload
        if not others or len(self._asking) >= _MAX_ASKING:
            self._replies.send(reply, codec.encode(self._own(asked, encoding, tenant, most), encoding))
            return
        self._catalog.check(asked, knows_model=True)
        work = self._collect(reply, asked, encoding, tenant, others)
        refuse = functools.partial(self.refuse, reply, encoding, errors.make_error(errors.Code.INTERNAL))
        task = tasks.background("list models", work, lambda _: refuse())
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    def refuse(self, reply: str, encoding: codec.Encoding, error: errors.Error) -> None:
        """Answers a client with an error."""
        self._replies.send(reply, codec.encode(self._catalog.refusal(error, self._bus.max_payload), encoding))

    def _own(
        self, asked: messages.ModelsRequest, encoding: codec.Encoding, tenant: str, most: int
    ) -> messages.ModelsReply:
        assert self.parts is not None
        return self._catalog.page(asked, encoding, most, self.parts, tenant)

    async def _collect(
        self,
        reply: str,
        asked: messages.ModelsRequest,
        encoding: codec.Encoding,
        tenant: str,
        others: Sequence[str],
    ) -> None:
        most = self._bus.max_payload - _RESERVE_BYTES
        try:
            if asked == messages.ModelsRequest() or asked.limit == 0:
                listing = await self._all(asked, encoding, tenant, others, most)
            else:
                listing = await self._page(asked, encoding, tenant, others, most)
        except errors.RequestError as error:
            self.refuse(reply, encoding, error.error)
        else:
            self._replies.send(reply, codec.encode(listing, encoding))

    async def _all(
        self,
        asked: messages.ModelsRequest,
        encoding: codec.Encoding,
        tenant: str,
        others: Sequence[str],
        most: int,
    ) -> messages.ModelsReply:
        """Returns the models of all parts, without workers if they do not fit or none are wanted."""
        wanted = codec.replace(asked, after=None)
        found = await self._pages(None, wanted, encoding, tenant, most) if asked.model is None else []
        missing = dict.fromkeys(others)
        while missing:
            model = next(iter(missing))
            del missing[model]
            part = await self._pages(model, wanted, encoding, tenant, most)
            found += part
            covered = {served.model for one in found for served in one.models}
            if part and model not in covered:  # its last worker has left; the card of another will name it again
                self._part.others.pop(model, None)
            for one in covered:
                missing.pop(one, None)
        whole = _joined(found)
        if whole is None:
            raise errors.request_error(errors.Code.NO_WORKER, f"no router serves {asked.model!r} now")
        end = self._catalog.check(asked, knows_model=True)
        models = [one for one in whole.models if end is None or one.model > end.model]
        if asked == messages.ModelsRequest() and (
            any(one.truncated for one in found) or len(codec.encode(whole, encoding)) > most
        ):
            models = [codec.replace(one, workers=UNSET) for one in models]
            whole = codec.replace(whole, truncated=True)
        return _fitting(codec.replace(whole, models=[], next=UNSET), models, encoding, most)

    async def _pages(
        self, model: str | None, asked: messages.ModelsRequest, encoding: codec.Encoding, tenant: str, most: int
    ) -> list[messages.ModelsReply]:
        """Returns what a router that serves a model serves, or this one without a model: several pages if its models do
        not fit in a message, none if it does not answer."""
        pages: list[messages.ModelsReply] = []
        while not pages or pages[-1].next is not UNSET:
            page = await self._ask(model, asked, encoding, tenant, most)
            if page is None or page.next == asked.after:
                break
            pages.append(page)
            asked = messages.ModelsRequest(model=asked.model, after=page.next or None, limit=0)
        return pages

    async def _page(
        self,
        asked: messages.ModelsRequest,
        encoding: codec.Encoding,
        tenant: str,
        others: Sequence[str],
        most: int,
    ) -> messages.ModelsReply:
        """Returns a page of workers, which all belong to one part."""
        own = [] if asked.model is not None else self._catalog.served_names()
        end = self._catalog.check(asked, knows_model=True)
        after = "" if end is None else end.model
        left = sorted({*own, *others})
        left = [one for one in left if one > after or (one == after and end is not None and end.worker_id is not None)]
        for place, model in enumerate(left):
            wanted = codec.replace(asked, model=model, after=asked.after if model == after else None)
            page = await self._ask(None if model in own else model, wanted, encoding, tenant, most)
            if page is None or (not page.models and page.next is UNSET):
                continue
            if page.next is UNSET and place + 1 < len(left) and asked.model is None:
                page = codec.replace(page, next=subjects.encode_name(model))
            if asked.after is None and asked.model is None:
                whole = await self._all(messages.ModelsRequest(limit=0), encoding, tenant, others, most)
                page = codec.replace(page, summary=whole.summary, unserved=whole.unserved)
            return page
        return codec.replace(self._own(messages.ModelsRequest(limit=0), encoding, tenant, most), models=[], next=UNSET)

    async def _ask(
        self, model: str | None, asked: messages.ModelsRequest, encoding: codec.Encoding, tenant: str, most: int
    ) -> messages.ModelsReply | None:
        """Returns the answer of a router that serves a model, or of this one without a model; None if there is none, or
        it does not answer."""
        if model is None:
            try:
                return self._own(asked, encoding, tenant, most)
            except errors.RequestError:  # the last worker has just left
                return None
        request = internal.ListingRequest(asked=asked, tenant=tenant, encoding=encoding, max_bytes=most)
        outgoing = Outgoing(self._names.listing(model), codec.encode(request))
        for _ in range(_TRIES):
            try:
                answer = await self._workers.request(outgoing, _ANSWER_S)
                reply = _replies.decode(answer.data)
            except TimeoutError:  # it went to a router that has just died: another may serve the model too
                continue
            except (NoRespondersError, ConnectionError, PayloadTooLargeError, errors.RequestError):
                return None
            return reply if reply.error is UNSET else None
        return None

    def _on_listing(self, message: Msg) -> None:
        """Answers another router."""
        if not self._workers.is_router(message.reply):
            return
        try:
            request = _requests.decode(message.data)
            most = min(request.max_bytes, self._bus.max_payload - _RESERVE_BYTES)
            reply = self._own(request.asked, request.encoding, request.tenant, most)
        except errors.RequestError as error:
            reply = self._catalog.refusal(error.error, self._bus.max_payload)
        self._replies.send(message.reply, codec.encode(reply))


def _joined(found: Sequence[messages.ModelsReply]) -> messages.ModelsReply | None:
    """Returns the models of several parts, ordered by name, with all workers counted."""
    if not found:
        return None
    models = {served.model: served for one in reversed(found) for served in one.models}
    unserved = {name for one in found for name in one.unserved or []} - models.keys()
    return codec.replace(
        found[0],
        models=[models[name] for name in sorted(models)],
        summary=_sum(models.values()),
        unserved=UNSET if any(one.unserved is UNSET for one in found) else sorted(unserved),
        truncated=UNSET,
    )


def _sum(models: Collection[messages.ServedModel]) -> messages.FleetCounts:
    """Counts the workers of all models, each once: several parts may have it."""
    counts = [one.summary for one in models if one.summary is not UNSET]
    states: Counter[str] = Counter()
    for one in counts:
        states.update(one.states)
    return messages.FleetCounts(
        models=len(models),
        workers=sum(one.workers for one in counts),
        states=dict(states),
        running=sum(one.running for one in counts),
        waiting=sum(one.waiting for one in counts),
        generated_tokens=sum(one.generated_tokens for one in counts),
    )


def _fitting(
    base: messages.ModelsReply, served: Sequence[messages.ServedModel], encoding: codec.Encoding, most: int
) -> messages.ModelsReply:
    """Returns a listing with as many of the models as fit, and where the next page begins."""
    room = most - len(codec.encode(base, encoding))
    models: list[messages.ServedModel] = []
    for one in served:
        room -= len(codec.encode(one, encoding)) + 1
        if room < 0:
            return codec.replace(base, models=models, next=subjects.encode_name(models[-1].model) if models else UNSET)
        models.append(one)
    return codec.replace(base, models=models)
