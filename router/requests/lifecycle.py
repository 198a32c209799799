"""Carries each request from its receipt to a worker's accept, again if that worker is lost, or to a terminal."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import block_hash, errors, limits, messages, validation
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.fleet.worker import Worker
from tokenbus.router.placement.placement import Capacity
from tokenbus.router.requests import present
from tokenbus.router.requests.dispatch import AlreadyStreamingError, Dispatch
from tokenbus.router.requests.flight import Flight, Flights
from tokenbus.router.requests.placement_queue import PlacementQueue
from tokenbus.router.requests.rate_limiter import RateLimiter, Refusal
from tokenbus.router.requests.request_telemetry import RequestTelemetry
from tokenbus.router.requests.terminals import TerminalPublisher
from tokenbus.router.requests.tokenizer_cache import TokenizerCache

_FIRST_SIGN_S = 1.0 - 2 * limits.TICK_S
"""A client whose request is held here hears so within a second."""


_ASKED_AT_ONCE = 3
"""Workers of which one is asked after another how a prompt is tokenized, before it is looked for others."""
_MAX_ROUNDS = 3
"""Times that all of them are asked, while some say that they serve."""


class RequestLifecycle:
    """The requests of one router on their way. Each one that this router owns has one task here, and one terminal."""

    def __init__(
        self,
        fleet: Fleet,
        flights: Flights,
        tokenizers: TokenizerCache,
        queue: PlacementQueue,
        dispatch: Dispatch,
        terminals: TerminalPublisher,
        rate_limiter: RateLimiter,
        telemetry: RequestTelemetry,
    ) -> None:
        self._fleet = fleet
        self._flights = flights
        self._tokenizers = tokenizers
        self._queue = queue
        self._dispatch = dispatch
        self._terminals = terminals
        self._rate_limiter = rate_limiter
        self._telemetry = telemetry
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<Journeys {self._flights!r}, {len(self._tasks)} under way>"

    def check(self, wish: messages.RoutingOptions | None) -> None:
        """Raises RequestError for a routing wish that can't be met by anyone."""
        self._queue.check(wish)

    def begin(self, flight: Flight, num_bytes: int, headers: tracing.Headers) -> None:
        """Takes a request. Raises RequestError where there is no room, or its id is in flight.

        `headers` of its message may say which trace it belongs to."""
        twin = self._flights.find(flight.key)
        if twin is not None and twin.reply == flight.reply:
            self._log.warning("duplicate_dropped", request_id=flight.key)
            return
        if twin is not None:
            raise errors.request_error(errors.Code.DUPLICATE_REQUEST)
        if not self._flights.has_room(num_bytes):
            raise errors.RequestError(errors.make_error(errors.Code.OVERLOADED, retry_after_ms=1_000.0))
        tenant = flight.tenant
        _check_rate_limit(self._rate_limiter.request(tenant, self._flights.open_of(tenant), flight.received_at))
        self._flights.add(flight, num_bytes)
        self._telemetry.came(flight, headers)
        self._spawn(flight, self._bring)

    def recover(self, flight: Flight, card: messages.Card, *, is_certain: bool) -> None:
        """Goes on with a request whose worker is lost, or, where that is not certain, seems to be."""

        async def go_on(flight: Flight) -> None:
            refusal: errors.Error | None = errors.make_error(errors.Code.WORKER_LOST)
            if not is_certain:
                refusal = await self._dispatch.take_back(flight, card)
            if refusal is not None:
                if flight.spoken:
                    raise errors.request_error(errors.Code.WORKER_LOST)
                await self._dispatch.bring(flight)

        self._flights.take_back(flight)
        flight.in_doubt = not is_certain
        self._telemetry.came_back(flight, card.worker_id, time.monotonic())
        self._spawn(flight, go_on)

    def finish(self, flight: Flight) -> None:
        """Lets a request go whose worker has sent its terminal."""
        self._flights.remove(flight)
        self._terminals.handed_over(flight)

    def cancel(self, key: str) -> bool:
        """Notes the client's wish; False if this router does not hold the request."""
        flight = self._flights.find(key)
        if flight is None or flight.worker_id is not None:
            return False
        flight.cancelled = True
        self._queue.cancel(flight)
        return True

    def knows(self, key: str) -> bool:
        """Whether a request is here, or has lately ended here."""
        return self._flights.find(key) is not None or self._terminals.has_said(key, time.monotonic())

    def repeat(self, key: str) -> bool:
        """Shows the client that its request is held here, or how it ended here; False if it was neither."""
        now = time.monotonic()
        flight = self._flights.find(key)
        if flight is None:
            return self._terminals.repeat(key, now)
        if flight.worker_id is not None:
            return False
        if flight.in_doubt:
            return True  # whoever has it will speak
        if flight.alive_at is None or now - flight.alive_at >= limits.REPLAY_INTERVAL_S:
            self._show_alive(flight, now)
        return True

    def tick(self, now: float) -> None:
        """Lets the clients of requests that are held for long know of it, and places those whose turn it is."""
        self._queue.work_off(now)
        for flight in self._flights.unaccepted():
            self._telemetry.still_waits(flight, now)
            if flight.alive_at is None:
                is_due = now - flight.received_at >= _FIRST_SIGN_S
            else:
                is_due = now - flight.alive_at >= limits.STREAM_KEEPALIVE_S - limits.TICK_S
            if is_due and not flight.in_doubt:
                self._show_alive(flight, now)

    def work_off(self) -> None:
        """A worker may have room again."""
        if self._queue:
            self._queue.work_off(time.monotonic())

    async def drain(self) -> None:
        """Waits until no request is on its way to a worker any more."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def leave(self) -> None:
        """Lets go of what workers have: they end it without this router. Ends what none has, so that nothing more is
        sent of it."""
        for flight in self._flights.everything():
            if flight.worker_id is None:
                self._end(flight, errors.make_error(errors.Code.SHUTTING_DOWN))
            else:
                self.finish(flight)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _show_alive(self, flight: Flight, now: float) -> None:
        flight.alive_at = now
        if flight.is_streamed:
            self._terminals.alive(flight)

    def _spawn(self, flight: Flight, way: Callable[[Flight], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.get_running_loop().create_task(self._carry(flight, way))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring(self, flight: Flight) -> None:
        workers = present.workers_of(self._fleet, flight.model, time.monotonic())
        self._telemetry.found(flight)
        _check_needs(flight.request, workers[0])
        remaining_ms = flight.remaining_ms(time.monotonic())
        try:
            async with asyncio.timeout(None if remaining_ms is None else remaining_ms / 1e3):
                with self._telemetry.tokenizing(flight):
                    token_ids = await self._tokenize(flight, workers)
        except TimeoutError as error:
            raise errors.request_error(errors.Code.DEADLINE_EXCEEDED) from error
        _check_length(token_ids, self._longest_context(flight, workers))
        self._flights.keep_prompt(flight, block_hash.pack_token_ids(token_ids))
        count = len(token_ids) + (flight.request.max_tokens or 0)
        _check_rate_limit(self._rate_limiter.tokens(flight.tenant, count, time.monotonic()))
        await self._dispatch.bring(flight)

    async def _tokenize(self, flight: Flight, workers: list[Worker]) -> list[int]:
        """Asks all workers if need be, where some are not reached, and waits while all restart. Raises RequestError."""
        rounds, asked = 0, set[str]()
        while True:
            asked |= {worker.card.worker_id for worker in workers[:_ASKED_AT_ONCE]}
            try:
                most_tokens = self._longest_context(flight, workers) - 1
                return await self._tokenizers.token_ids(flight, workers[:_ASKED_AT_ONCE], most_tokens)
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
            workers = present.workers_of(self._fleet, flight.model, time.monotonic())

    def _longest_context(self, flight: Flight, workers: list[Worker]) -> int:
        """Of the model's workers, also of those that have left meanwhile."""
        longest = max(worker.card.context_length for worker in workers)
        return max(longest, self._fleet.max_context_length(flight.model))

    async def _carry(self, flight: Flight, way: Callable[[Flight], Coroutine[Any, Any, None]]) -> None:
        """To a worker's accept, or to this router's own terminal."""
        try:
            await way(flight)
        except errors.RequestError as error:
            self._end(flight, error.error)
        except AlreadyStreamingError:
            if self._flights.holds(flight):
                self._flights.remove(flight)
            self._log.warning("duplicate_dropped", request_id=flight.key)
        except Exception:  # outermost frame of a request: whatever went wrong, it gets its terminal
            self._log.exception("request_failed", request_id=flight.key)
            self._end(flight, errors.make_error(errors.Code.INTERNAL))
        else:
            if not self._flights.holds(flight):
                return
            if flight.worker_id is None:
                self._flights.remove(flight)
                self._terminals.cancelled(flight)
            elif flight.ended_at == flight.worker_id:
                self.finish(flight)
        finally:
            flight.span.end()

    def _end(self, flight: Flight, error: errors.Error) -> None:
        if not self._flights.holds(flight):
            return
        self._flights.remove(flight)
        if flight.cancelled:
            self._terminals.cancelled(flight)
        else:
            flight.span.set_error(str(error.code))
            self._terminals.fail(flight, error)


def _check_rate_limit(refusal: Refusal | None) -> None:
    if refusal is not None:
        wait_ms = round(refusal.retry_after_s * 1e3, 1)
        raise errors.RequestError(errors.make_error(errors.Code.OVERLOADED, refusal.reason, retry_after_ms=wait_ms))


def _check_needs(request: messages.GenerateRequest, worker: Worker) -> None:
    if "generate" not in worker.card.features:
        raise errors.request_error(errors.Code.UNSUPPORTED, "this model makes embeddings only", param="model")
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
