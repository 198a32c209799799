"""Makes a request's token ids: with the model's tokenizer where routers can have it, else by asking a worker."""

import asyncio
import functools
import os
import time

from tokenbus.protocol.bus.bus import NoRespondersError, PayloadTooLargeError
from tokenbus.protocol.wire import block_hash, codec, errors, internal, limits, messages, validation
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.fleet.worker import Worker
from tokenbus.router.placement.placement import Capacity
from tokenbus.router.requests.flight import Flight
from tokenbus.router.requests.request_telemetry import RequestTelemetry
from tokenbus.router.requests.tokenization.fair_executor import FairExecutor
from tokenbus.router.requests.tokenization.tokenizer_cache import TokenizerCache
from tokenbus.router.requests.worker_client import Operation, WorkerClient, invalid_reply, workers_for

_TIMEOUT_S = 4.0
_INLINE_CHARS = 2_048
"""Longer texts are tokenized on a thread: these take at most half a millisecond of the event loop."""
_MAX_THREADS = 4
_WORKERS_PER_ROUND = 3
"""Workers that are asked in turn before others are looked for."""
_MAX_ROUNDS = 3
"""Rounds in which all workers fail although some say that they are ready."""

_TOKENIZE = Operation("tokenize", codec.Decoder(internal.TokenizeReply))


class PromptTokenizer:
    """Tokenizes the prompts of one router."""

    def __init__(
        self, fleet: Fleet, tokenizers: TokenizerCache, workers: WorkerClient, telemetry: RequestTelemetry
    ) -> None:
        self._fleet = fleet
        self._tokenizers = tokenizers
        self._workers = workers
        self._telemetry = telemetry
        self._executor = FairExecutor(max(1, min(_MAX_THREADS, (os.cpu_count() or 1) - 1)), "tokenize")

    def __repr__(self) -> str:
        return f"<PromptTokenizer {self._executor!r}>"

    async def tokenize(self, flight: Flight) -> list[int]:
        """Returns the token ids of a flight's prompt, which fit the longest context of its model.

        Raises RequestError, also if nothing serves the model or the model lacks a feature that the request needs."""
        workers = workers_for(self._fleet, flight.model, time.monotonic())
        self._telemetry.model_found(flight)
        _check_features(flight.request, workers[0])
        validation.check_resume(flight.request, workers[0].card.hash_scheme)
        remaining_ms = flight.remaining_ms(time.monotonic())
        try:
            async with asyncio.timeout(None if remaining_ms is None else remaining_ms / 1e3):
                with self._telemetry.tokenizing(flight):
                    token_ids = await self._try_workers(flight, workers)
        except TimeoutError as error:
            raise errors.request_error(errors.Code.DEADLINE_EXCEEDED) from error
        _check_length(token_ids, self._longest_context(flight, workers))
        return token_ids

    async def _try_workers(self, flight: Flight, workers: list[Worker]) -> list[int]:
        """Tries a few workers at a time: passes over unreachable ones, and waits while all of them are restarting."""
        rounds, asked = 0, set[str]()
        while True:
            asked |= {worker.card.worker_id for worker in workers[:_WORKERS_PER_ROUND]}
            try:
                max_tokens = self._longest_context(flight, workers) - 1
                return await self._try_some(flight, workers[:_WORKERS_PER_ROUND], max_tokens)
            except errors.RequestError as error:
                if error.error.code is not errors.Code.NO_WORKER or flight.cancelled:
                    raise
                able = self._fleet.eligible_workers(flight.model, time.monotonic())
                others = [worker for worker in able if worker.card.worker_id not in asked]
                if others and any(worker.has_no_responders for worker in workers):
                    workers = others
                    continue
                all_workers = self._fleet.workers_of(flight.model)
                rounds += any(worker.state is messages.WorkerState.READY for worker in all_workers)
                if rounds >= _MAX_ROUNDS or self._fleet.capacity(flight.model, time.monotonic()) is Capacity.NO_WORKERS:
                    raise
            await asyncio.sleep(limits.TICK_S)
            asked.clear()
            workers = workers_for(self._fleet, flight.model, time.monotonic())

    async def _try_some(self, flight: Flight, workers: list[Worker], max_tokens: int) -> list[int]:
        """Raises RequestError(prompt_too_long) early if the text certainly has more than `max_tokens` tokens."""
        request = flight.request
        if request.token_ids is not None:
            return request.token_ids
        tokenizer = await self._tokenizers.get(workers)
        if tokenizer is None:
            return await self._ask_workers(request, workers)
        builder = tokenizer.builder
        if request.messages is not None:
            chat, arguments, tools = request.messages, request.chat_template_kwargs, request.tools
            work = functools.partial(builder.from_messages, chat, arguments, max_tokens, tools)
            executor = tokenizer.renderer
        else:
            assert request.prompt is not None
            executor, work = self._executor, functools.partial(builder.from_text, request.prompt, max_tokens)
            if len(request.prompt) <= _INLINE_CHARS:
                return work()
        return await executor.run(flight.key, flight.tenant, flight.received_at, flight.held_bytes, work)

    async def _ask_workers(self, request: messages.GenerateRequest, workers: list[Worker]) -> list[int]:
        ask = internal.Tokenize(
            text=request.prompt,
            messages=request.messages,
            chat_template_kwargs=request.chat_template_kwargs,
            tools=request.tools,
        )
        problem = errors.make_error(errors.Code.NO_WORKER)
        for worker in workers:
            try:
                reply = await self._workers.call(worker.card, _TOKENIZE, ask, _TIMEOUT_S)
                if reply.error is not None:
                    raise errors.RequestError(reply.error)
                if not reply.token_ids or len(reply.token_ids) % 4:
                    raise invalid_reply(worker.card.worker_id, "it has no token ids")
                return block_hash.unpack_token_ids(reply.token_ids)
            except PayloadTooLargeError as error:
                raise errors.request_error(errors.Code.PAYLOAD_TOO_LARGE, str(error)) from error
            except (NoRespondersError, TimeoutError, ConnectionError) as error:
                if isinstance(error, NoRespondersError):
                    self._fleet.mark_no_responders(worker.card)
                problem = errors.make_error(errors.Code.NO_WORKER, f"no worker tokenized the prompt: {error}")
            except errors.RequestError as refusal:
                problem = refusal.error
                if not problem.retryable:
                    raise
        raise errors.RequestError(problem)

    def _longest_context(self, flight: Flight, workers: list[Worker]) -> int:
        """The longest context of the model's workers, including those of `workers` that have left meanwhile."""
        longest = max(worker.card.context_length for worker in workers)
        return max(longest, self._fleet.max_context_length(flight.model))


def _check_features(request: messages.GenerateRequest, worker: Worker) -> None:
    if "generate" not in worker.card.features:
        raise errors.request_error(errors.Code.UNSUPPORTED, "this model generates nothing", param="model")
    for need in validation.required_features(request):
        if need.feature not in worker.card.features:
            raise errors.request_error(
                errors.Code.UNSUPPORTED, f"{need.param} is not served by this model's engine", param=need.param
            )


def _check_length(token_ids: list[int], context_length: int) -> None:
    if not token_ids:
        raise errors.request_error(errors.Code.INVALID_REQUEST, "the prompt has no tokens", param="prompt")
    if len(token_ids) + 1 > context_length:
        raise errors.request_error(
            errors.Code.PROMPT_TOO_LONG,
            f"the prompt has {len(token_ids)} tokens; with one to generate it must fit {context_length}",
        )
