"""Fetches tokenizer bundles from workers, once for each digest, and makes prompts with them."""

import asyncio
import functools
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import structlog
from nats.aio.msg import Msg

from tokenbus.protocol.bus.bus import Bus, NoRespondersError, OutboundBufferLimitError, PayloadTooLargeError
from tokenbus.protocol.prompt import prompt
from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import block_hash, codec, errors, internal, limits, messages, subjects
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.fleet.registry import MAX_WORKERS, incarnation_key
from tokenbus.router.fleet.worker import Worker
from tokenbus.router.requests import worker_replies
from tokenbus.router.requests.fair_executor import FairExecutor
from tokenbus.router.requests.flight import Flight

MAX_BUNDLES = 64
"""Tokenizers kept; the one unused for longest goes first."""
_FETCH_TIMEOUT_S = 2.0
"""From one part to the next."""
_LONGEST_FETCH_S = 30.0
_BROKEN_S = 600.0
_TOKENIZE_TIMEOUT_S = 4.0
_LONG_TEXT = 2_048
"""Characters beyond which a text is tokenized on a thread, in its tenant's turn: half a millisecond of the loop's."""
_MOST_THREADS = 4

_parts = codec.Decoder(internal.TokenizerPart)
_replies = codec.Decoder(internal.TokenizeReply)


class _Name(NamedTuple):
    """A bundle as the workers of one model name it: a digest can be claimed by anyone, and proves nothing to others."""

    model: str
    digest: str


class _CachedTokenizer(NamedTuple):
    """Of one bundle."""

    builder: prompt.PromptBuilder
    desk: FairExecutor
    """Renders its chats: a template that takes long keeps nobody waiting but the users of its own model."""


class TokenizerCache:
    """Makes token ids for any model of the fleet: by its bundle where there is one, else by asking a worker."""

    def __init__(self, connection: Bus, names: subjects.Subjects, fleet: Fleet) -> None:
        self._connection = connection
        self._fleet = fleet
        self._desk = FairExecutor(max(1, min(_MOST_THREADS, (os.cpu_count() or 1) - 1)), "tokenize")
        self._names = names
        self._known: OrderedDict[_Name, _CachedTokenizer] = OrderedDict()
        self._fetching: dict[_Name, asyncio.Task[_CachedTokenizer | None]] = {}
        self._broken: TTLCache[bool] = TTLCache(_BROKEN_S, MAX_WORKERS)
        """Lives of workers whose bundle is not what their card says, or no good."""
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<Vocabularies {len(self._known)} bundles>"

    async def token_ids(self, flight: Flight, workers: list[Worker], most_tokens: int) -> list[int]:
        """The prompt of a flight, for the model of those workers, asked in turn. Raises RequestError, also where the
        prompt certainly has more than `most_tokens`."""
        request = flight.request
        if request.token_ids is not None:
            return request.token_ids
        vocabulary = await self._vocabulary(workers)
        if vocabulary is None:
            return await self._ask(request, workers)
        builder = vocabulary.builder
        if request.messages is not None:
            chat, arguments = request.messages, request.chat_template_kwargs
            render = functools.partial(builder.from_messages, chat, arguments, most_tokens)
            return await self._in_turn(vocabulary.desk, flight, render)
        assert request.prompt is not None
        if len(request.prompt) <= _LONG_TEXT:
            return builder.from_text(request.prompt, most_tokens)
        return await self._in_turn(
            self._desk, flight, functools.partial(builder.from_text, request.prompt, most_tokens)
        )

    async def _in_turn(self, desk: FairExecutor, flight: Flight, work: Callable[[], list[int]]) -> list[int]:
        return await desk.run(flight.key, flight.tenant, flight.received_at, flight.held_bytes, work)

    async def _vocabulary(self, workers: list[Worker]) -> _CachedTokenizer | None:
        for worker in workers:
            digest = worker.card.tokenizer_digest
            if digest is None:
                return None
            name = _Name(worker.card.model, digest)
            if name in self._known:
                self._known.move_to_end(name)
                return self._known[name]
            if self._broken.get(incarnation_key(worker.card.address, worker.card.epoch), time.monotonic()) is None:
                vocabulary = await asyncio.shield(self._fetch_once(worker, name))
                if vocabulary is not None:
                    return vocabulary
        return None

    def _fetch_once(self, worker: Worker, name: _Name) -> "asyncio.Task[_CachedTokenizer | None]":
        if name not in self._fetching:
            self._fetching[name] = asyncio.get_running_loop().create_task(self._fetch(worker, name))
            self._fetching[name].add_done_callback(lambda _: self._fetching.pop(name, None))
        return self._fetching[name]

    async def _fetch(self, worker: Worker, name: _Name) -> _CachedTokenizer | None:
        """None where the bundle can't be had or used; the worker is asked to tokenize then."""
        try:
            parts = await self._receive(worker, name.digest)
            bundle = prompt.from_parts(parts, name.digest)
            builder = await asyncio.to_thread(_started, bundle)
        except ValueError as error:
            self._log.error("tokenizer_refused", worker_id=worker.card.worker_id, error=str(error))
            self._broken.put(incarnation_key(worker.card.address, worker.card.epoch), True, time.monotonic())
            return None
        except (OSError, OutboundBufferLimitError, errors.RequestError) as error:  # a time-out among them
            self._log.warning("tokenizer_not_fetched", worker_id=worker.card.worker_id, error=str(error))
            return None
        vocabulary = self._known[name] = _CachedTokenizer(builder, FairExecutor(1, "render"))
        if len(self._known) > MAX_BUNDLES:
            _, oldest = self._known.popitem(last=False)
            oldest.desk.close(oldest.builder.close)
        self._log.info("tokenizer_fetched", worker_id=worker.card.worker_id, digest=name.digest)
        return vocabulary

    async def _receive(self, worker: Worker, digest: str) -> list[internal.TokenizerPart]:
        parts: dict[int, internal.TokenizerPart] = {}
        complete = asyncio.Event()
        loop = asyncio.get_running_loop()
        patience, end = asyncio.timeout(_FETCH_TIMEOUT_S), loop.time() + _LONGEST_FETCH_S
        inbox = self._connection.new_inbox()

        def take(message: Msg) -> None:
            if not message.data:  # a notice that nobody is there
                complete.set()
                return
            part = _parts.decode(message.data)
            if part.digest == digest and 0 <= part.part < part.parts <= limits.MAX_BUNDLE_BYTES // limits.PART_BYTES:
                parts[part.part] = part
                patience.reschedule(min(loop.time() + _FETCH_TIMEOUT_S, end))
                if len(parts) == part.parts:
                    complete.set()

        subscription = await self._connection.subscribe(inbox, take)
        try:
            subject = self._names.worker(worker.card.model, worker.card.worker_id, "tokenizer")
            self._connection.publish(subject, b"", reply=inbox)
            async with patience:
                await complete.wait()
        finally:
            await self._connection.unsubscribe(subscription)
        if not parts or len(parts) < parts[min(parts)].parts:
            self._fleet.mark_no_responders(worker.card)
            raise errors.request_error(errors.Code.NO_WORKER, "the worker has gone")
        return [parts[number] for number in sorted(parts)]

    async def _ask(self, request: messages.GenerateRequest, workers: list[Worker]) -> list[int]:
        ask = internal.Tokenize(
            text=request.prompt, messages=request.messages, chat_template_kwargs=request.chat_template_kwargs
        )
        problem = errors.make_error(errors.Code.NO_WORKER)
        for worker in workers:
            try:
                return await self._ask_one(codec.encode(ask), worker.card)
            except PayloadTooLargeError as error:
                raise errors.request_error(errors.Code.PAYLOAD_TOO_LARGE, str(error)) from error
            except (NoRespondersError, TimeoutError, ConnectionError) as error:
                text = f"no worker tokenized the prompt: {error}"
                problem = errors.make_error(errors.Code.NO_WORKER, text)
            except errors.RequestError as refusal:
                problem = refusal.error
                if not problem.retryable:
                    raise
        raise errors.RequestError(problem)

    async def _ask_one(self, ask: bytes, card: messages.Card) -> list[int]:
        subject = self._names.worker(card.model, card.worker_id, "tokenize")
        try:
            answer = await self._connection.request(subject, ask, _TOKENIZE_TIMEOUT_S)
        except NoRespondersError:
            self._fleet.mark_no_responders(card)
            raise
        reply = worker_replies.read(_replies, answer.data, card.worker_id)
        if reply.error is not None:
            raise errors.RequestError(reply.error)
        if not reply.token_ids or len(reply.token_ids) % 4:
            raise worker_replies.unreadable(card.worker_id, "it has no token ids")
        return block_hash.unpack_token_ids(reply.token_ids)


def _started(bundle: prompt.TokenizerBundle) -> prompt.PromptBuilder:
    builder = prompt.load_builder(bundle)
    builder.start()
    return builder
