"""Tokenizers that a router has fetched from its workers, one for each model and digest.

A worker's card names the digest of its tokenizer bundle. The router fetches a bundle once, in parts, from the first
worker that offers it, and checks it against the digest. A bundle that turns out to be broken is not fetched again from
the same epoch of that worker."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import structlog
from nats.aio.msg import Msg

from tokenbus.protocol import tasks
from tokenbus.protocol.bus.bus import Bus, OutboundBufferLimitError
from tokenbus.protocol.prompt import prompt, tokenizer_bundle
from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import codec, errors, internal, limits, subjects
from tokenbus.router.fleet.fleet import MAX_WORKERS, Fleet
from tokenbus.router.requests.tokenization.fair_executor import FairExecutor
from tokenbus.router.workers.worker import Worker

_MAX_BUNDLES = 64
"""Tokenizers that are kept; the least recently used one is dropped."""
_KEPT_S = 60.0
"""A tokenizer that no worker has offered for this long is dropped: longer than it takes to replace a worker."""
_PART_TIMEOUT_S = 2.0
"""Longest pause between two parts of a bundle."""
_FETCH_TIMEOUT_S = 30.0
_BROKEN_S = 600.0

_parts = codec.Decoder(internal.TokenizerPart)


class _Key(NamedTuple):
    """The model is part of the key because anyone may claim a digest: a worker can only affect its own model."""

    model: str
    digest: str


class Tokenizer(NamedTuple):
    """A fetched tokenizer."""

    name: str
    """A unique name of this model and tokenizer."""
    builder: prompt.PromptBuilder
    renderer: FairExecutor
    """Renders this model's chats on one thread: a slow template delays only the users of its own model."""


class TokenizerCache:
    """Fetches tokenizer bundles and keeps what is built from them."""

    def __init__(self, bus: Bus, names: subjects.Subjects, fleet: Fleet) -> None:
        self._bus = bus
        self._names = names
        self._fleet = fleet
        self._tokenizers: OrderedDict[_Key, Tokenizer] = OrderedDict()
        self._offered_at: dict[_Key, float] = {}
        """When a worker was last seen to offer each tokenizer."""
        self._fetching: dict[_Key, asyncio.Task[Tokenizer | None]] = {}
        self._broken: TTLCache[bool] = TTLCache(_BROKEN_S, MAX_WORKERS)
        """Epochs of workers whose bundle does not match their card, or can't be used."""
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<TokenizerCache {len(self._tokenizers)} tokenizers>"

    def find_fetched(self, workers: Iterable[Worker]) -> Tokenizer | None:
        """Returns a tokenizer that was fetched and that one of these workers offers."""
        for worker in workers:
            digest = worker.card.tokenizer_digest
            if digest is not None and (key := _Key(worker.card.model, digest)) in self._tokenizers:
                self._tokenizers.move_to_end(key)
                return self._tokenizers[key]
        return None

    async def fetch(self, worker: Worker) -> Tokenizer | None:
        """Returns the tokenizer that a worker offers; None if it offers none, or one that can't be fetched or used."""
        if (digest := worker.card.tokenizer_digest) is None or self.is_broken(worker):
            return None
        found = self.find_fetched([worker])
        # Shielded: a request that gives up must not end the fetch, which others may await.
        return found or await asyncio.shield(self._start_fetch(worker, _Key(worker.card.model, digest)))

    def is_broken(self, worker: Worker) -> bool:
        """Whether what a worker offers has turned out to be unusable."""
        return self._broken.get(worker.incarnation, time.monotonic()) is not None

    def drop_unused(self, now: float) -> None:
        """Drops the tokenizers whose model no worker has any more, and ends their renderers; called periodically."""
        for key in list(self._tokenizers):
            if self._is_offered(key):
                self._offered_at[key] = now
            elif now - self._offered_at[key] >= _KEPT_S:
                self._drop(key)

    def _is_offered(self, key: _Key) -> bool:
        return any(
            worker.has_loaded and worker.card.tokenizer_digest == key.digest
            for worker in self._fleet.workers_of(key.model)
        )

    def _drop(self, key: _Key) -> None:
        dropped = self._tokenizers.pop(key)
        del self._offered_at[key]
        dropped.renderer.close(dropped.builder.close)

    def _start_fetch(self, worker: Worker, key: _Key) -> "asyncio.Task[Tokenizer | None]":
        if key not in self._fetching:
            self._fetching[key] = tasks.awaited(self._fetch(worker, key))
            self._fetching[key].add_done_callback(lambda _: self._fetching.pop(key, None))
        return self._fetching[key]

    async def _fetch(self, worker: Worker, key: _Key) -> Tokenizer | None:
        try:
            parts = await self._receive(worker, key.digest)
            builder = await asyncio.to_thread(_build, parts, key.digest)
        except ValueError as error:
            self._log.error("tokenizer_refused", worker_id=worker.card.worker_id, error=str(error))
            self._broken.put(worker.incarnation, True, time.monotonic())
            return None
        except (OSError, OutboundBufferLimitError, errors.RequestError) as error:  # OSError includes TimeoutError
            self._log.warning("tokenizer_not_fetched", worker_id=worker.card.worker_id, error=str(error))
            return None
        tokenizer = self._tokenizers[key] = Tokenizer(f"{key.model} {key.digest}", builder, FairExecutor(1, "render"))
        self._offered_at[key] = time.monotonic()
        if len(self._tokenizers) > _MAX_BUNDLES:
            self._drop(next(iter(self._tokenizers)))
        self._log.info("tokenizer_fetched", worker_id=worker.card.worker_id, digest=key.digest)
        return tokenizer

    async def _receive(self, worker: Worker, digest: str) -> list[internal.TokenizerPart]:
        """Asks a worker for its bundle. Raises TimeoutError, and RequestError(no_worker) if the worker is gone."""
        parts: dict[int, internal.TokenizerPart] = {}
        complete = asyncio.Event()
        loop = asyncio.get_running_loop()
        timeout, deadline = asyncio.timeout(_PART_TIMEOUT_S), loop.time() + _FETCH_TIMEOUT_S
        inbox = self._bus.new_inbox()

        def take(message: Msg) -> None:
            if not message.data:  # the broker's notice that there are no responders
                complete.set()
                return
            part = _parts.decode(message.data)
            if part.digest == digest and 0 <= part.part < part.parts <= limits.MAX_BUNDLE_BYTES // limits.PART_BYTES:
                parts[part.part] = part
                timeout.reschedule(min(loop.time() + _PART_TIMEOUT_S, deadline))
                if len(parts) == part.parts:
                    complete.set()

        subscription = await self._bus.subscribe(inbox, take)
        try:
            subject = self._names.worker(worker.card.model, worker.card.worker_id, "tokenizer")
            self._bus.publish(subject, b"", reply=inbox)
            async with timeout:
                await complete.wait()
        finally:
            await self._bus.unsubscribe(subscription)
        if not parts or len(parts) < parts[min(parts)].parts:
            self._fleet.mark_no_responders(worker.card)
            raise errors.request_error(errors.Code.NO_WORKER, "the worker is gone")
        return [parts[number] for number in sorted(parts)]


def _build(parts: list[internal.TokenizerPart], digest: str) -> prompt.PromptBuilder:
    builder = prompt.load_builder(tokenizer_bundle.from_parts(parts, digest))
    builder.start()
    return builder
