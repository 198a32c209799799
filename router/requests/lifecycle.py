"""The lifecycle of requests in a router: from their receipt to a worker's accept, or to a terminal sent here.

A request whose tokens are known and that a worker can take at once is placed in the callback that receives it, and
handed over in the one that receives that worker's accept. Whatever has to be waited for (a tokenizer, a model that is
loaded, a place in the queue, an accept that is late, another worker after a refusal) is the work of one task. Either
way, it ends in one of five ways: a worker has accepted the request, its worker has already ended it, this router has
sent its terminal, it was a duplicate and nothing is sent, or another router has taken it over, because this one is
stopping. If the worker is lost or leaves afterwards, the request gets a task."""

import asyncio
import contextlib
import functools
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog

from tokenbus.protocol import tasks
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import codec, errors, limits, messages, subjects
from tokenbus.router.access.quota import Quota
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.requests.attempts import AlreadyStreamingError, Attempt
from tokenbus.router.requests.dispatch import Dispatcher
from tokenbus.router.requests.flights.ends import BY_WORKER, RequestEnds
from tokenbus.router.requests.flights.flight import Flight, Flights
from tokenbus.router.requests.flights.request_telemetry import FlightTelemetry
from tokenbus.router.requests.next_turns import NextTurns
from tokenbus.router.requests.queueing.model_loads import ModelLoads
from tokenbus.router.requests.queueing.placement_queue import PlacementQueue
from tokenbus.router.requests.terminals import TerminalPublisher
from tokenbus.router.requests.tokenization.prompt_tokenizer import PromptTokenizer
from tokenbus.router.workers.worker import Worker

_FIRST_KEEPALIVE_S = 1.0 - 2 * limits.TICK_S
"""A client whose request is held here gets its first keepalive within a second, and no earlier: most hand-overs are
over by then."""
_PROGRESS_INTERVAL_S = 1.0
"""A client whose model is being loaded gets keepalives more often, with the progress."""
_TRIM_INTERVAL_S = 1.0
_HAND_OVER_S = 5.0
"""A stopping router gives its requests this long to reach a worker that is accepting them, or another router."""
_GUARDIANS_S = 3.0
"""Workers ask once a second whether a guardian is still there."""


class RequestLifecycle:
    """The open requests of one router."""

    def __init__(
        self,
        fleet: Fleet,
        flights: Flights,
        prompts: PromptTokenizer,
        queue: PlacementQueue,
        dispatcher: Dispatcher,
        loads: ModelLoads,
        terminals: TerminalPublisher,
        quota: Quota,
        telemetry: FlightTelemetry,
        ends: RequestEnds,
        next_turns: NextTurns,
    ) -> None:
        self._fleet = fleet
        self._flights = flights
        self._prompts = prompts
        self._queue = queue
        self._dispatcher = dispatcher
        self._loads = loads
        self._terminals = terminals
        self._quota = quota
        self._telemetry = telemetry
        self._ends = ends
        self._next_turns = next_turns
        self._trimmed_at = 0.0
        self._offer: Callable[[Flight], Awaitable[bool]] | None = None
        """Asks another router to take over a request when this one stops."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._sent: dict[Flight, Attempt] = {}
        """The requests whose run was sent by `admit`, until its worker has answered or a task waits for the answer."""
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<RequestLifecycle {self._flights!r}, {len(self._tasks)} tasks>"

    def admit(self, flight: Flight, num_bytes: int, headers: tracing.Headers) -> None:
        """Takes a request of `num_bytes`; `headers` of its message may name its trace.

        A duplicate that goes to the same inbox as the request in flight is dropped: its client gets that stream.
        Raises RequestError for any other duplicate, for an unknown policy, and if the router is full or the tenant is
        throttled."""
        self._queue.check_policy(flight.request.routing)
        duplicate = self._flights.find_flight(flight.key)
        if duplicate is not None and duplicate.reply == flight.reply:
            self._log.warning("duplicate_dropped", request_id=flight.key)
            return
        if duplicate is not None:
            raise errors.request_error(errors.Code.DUPLICATE_REQUEST)
        if not self._flights.has_room(num_bytes):
            raise errors.RequestError(errors.make_error(errors.Code.OVERLOADED, retry_after_ms=1_000.0))
        prompt = flight.request.token_ids
        # until its tokens are known, text counts as if each had four bytes
        num_prompt = num_bytes // 4 if prompt is None else len(prompt) // (4 if isinstance(prompt, bytes) else 1)
        ticket, told = self._quota.admit(flight.address, num_prompt, flight.request.max_tokens)
        if ticket is not None:
            flight.ticket, flight.rate_limits = ticket, told
        self._flights.add(flight, num_bytes)
        try:
            self._terminals.drop(flight.key)
            self._telemetry.received(flight, headers)
            if ticket is None:
                self._spawn(flight, functools.partial(self._charge_and_prepare, flight, num_prompt))
            else:
                self._begin(flight)
        except Exception as error:  # outermost frame of a request
            self._fail(flight, error)
            flight.span.end()

    def recover(self, flight: Flight, worker: Worker, *, is_certain: bool, takes: bool = False) -> None:
        """Dispatches a request again after its worker was lost. Unless the loss is certain, its run is revoked first,
        or taken from a worker that gives it up."""
        try:
            self._flights.reclaim(flight)
            flight.in_doubt = not is_certain
            flight.keepalive_at = None
            self._telemetry.rerouted(flight, worker.card.worker_id, time.monotonic())
            again = functools.partial(self._dispatcher.redispatch, flight, worker, is_certain=is_certain, takes=takes)
            self._spawn(flight, again)
        except Exception as error:  # outermost frame of a request: the worker's others are recovered all the same
            self._fail(flight, error)

    def adopt(self, flight: Flight, worker: Worker | None) -> bool:
        """Takes over a request of another router: `worker` runs it, or it is dispatched if that is None.

        Returns False if there is no room for it, or another request has its id. Raises RequestError for an unknown
        policy."""
        self._queue.check_policy(flight.request.routing)
        known = self._flights.find_flight(flight.key)
        if known is not None:  # one that is only waiting to be named can't be placed
            return known.reply == flight.reply and (worker is not None or known.is_named)
        assert flight.prompt_ids is not None, flight
        num_bytes = flight.num_bytes
        if not self._flights.has_room(num_bytes):
            return False
        flight.ticket = self._quota.adopt(flight.address, flight.num_charged)
        self._flights.add(flight, num_bytes)
        self._telemetry.adopted(flight)
        now = time.monotonic()
        flight.way.adopted("" if worker is None else worker.card.worker_id, now)
        if worker is None:
            self._spawn(flight, functools.partial(self._dispatcher.dispatch, flight))
        else:
            self._flights.accept(flight, worker.card.worker_id, now)
        return True

    def finish(self, flight: Flight) -> None:
        """Forgets a request that its worker has ended, and tells its end if this router is its guardian."""
        self._next_turns.ended(flight)
        self._remove(flight, is_end=True)
        self._terminals.log_end(flight, BY_WORKER)
        self._ends.tell_ended_by_worker(flight)

    def forget(self, flight: Flight, reason: str) -> None:
        """Forgets a request that another router has taken over, or that is left to its worker (`by_worker`)."""
        self._remove(flight, is_end=False)
        self._terminals.log_end(flight, reason)

    def cancel(self, key: str, model: str | None) -> bool:
        """Cancels a request for a model, or for any if None is named; returns False if this router has no such request,
        or its worker has to answer."""
        flight = self._flights.find_flight(key)
        if flight is None or model not in (None, flight.model):
            return False
        # also noted for one at a worker: if that worker is lost, the request must not continue elsewhere
        flight.cancelled = True
        if flight.worker_id is not None:
            return self._is_unheard(flight)
        self._queue.cancel(flight)
        return True

    def replay(self, key: str) -> bool:
        """Sends the client of a request a keepalive or its terminal again; returns False if a worker has to answer."""
        now = time.monotonic()
        flight = self._flights.find_flight(key)
        if flight is None:
            return self._terminals.replay(key, now)
        if flight.worker_id is not None:
            return self._is_unheard(flight)
        is_due = flight.keepalive_at is None or now - flight.keepalive_at >= limits.REPLAY_INTERVAL_S
        if is_due and not flight.in_doubt:
            self._send_keepalive(flight, now)
        return True

    def tick(self, now: float) -> None:
        """Places waiting requests, sends keepalives for those that have waited long, and drops what is not needed."""
        self._loads.check()
        self._queue.place_waiting(now)
        if now - self._trimmed_at >= _TRIM_INTERVAL_S:
            self._trimmed_at = now
            self._telemetry.forgotten(self._flights.trim())
            self._prompts.drop_unused(now)
        overdue = [flight for flight, sent in self._sent.items() if now - sent.sent_at >= limits.ACCEPT_TIMEOUT_S]
        for flight in overdue:
            self._pursue(flight)
        for flight in self._flights.unaccepted():
            self._telemetry.note_if_slow(flight, now)
            progress = self._loads.progress_of(flight.model)
            if flight.keepalive_at is None:
                is_due = now - flight.waiting_since >= _FIRST_KEEPALIVE_S
            else:
                interval_s = limits.STREAM_KEEPALIVE_S if progress is None else _PROGRESS_INTERVAL_S
                is_due = now - flight.keepalive_at >= interval_s - limits.TICK_S
            if is_due and not flight.in_doubt:
                self._send_keepalive(flight, now)
        self._telemetry.log_waits(now)

    def place_waiting(self) -> None:
        """Places waiting requests, because a worker may have become free or has loaded its model."""
        self._loads.check()
        if self._queue:
            self._queue.place_waiting(time.monotonic())

    async def drain(self) -> None:
        """Returns when every request was accepted by a worker or has ended."""
        for flight in list(self._sent):
            self._pursue(flight)
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def shut_down(self, offer: Callable[[Flight], Awaitable[bool]]) -> None:
        """Hands the requests that no worker has to other routers, and forgets those at workers, which look for other
        guardians.

        `offer` asks another router to take one over and returns whether it does."""
        self._offer, self._dispatcher.is_stopped = offer, True
        self._loads.close()
        for flight in self._flights.unaccepted():
            self._queue.cancel(flight)
        # a worker's answer to a run decides whether it has the request; workers may be lost, or leave, meanwhile
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HAND_OVER_S):
                await self.drain()
        if self._ends.are_heard:
            await self._wait_for_guardians()
        for flight in self._flights.all():
            if flight.worker_id is None:
                has_text = len(flight.completion) > 0
                self._end(flight, errors.make_error(errors.Code.WORKER_LOST if has_text else errors.Code.SHUTTING_DOWN))
            else:
                self.forget(flight, BY_WORKER)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _wait_for_guardians(self) -> None:
        """Waits a while for workers to name other routers: until then only this one tells how their streams end. What a
        worker gives up meanwhile is handed over."""
        give_up_at = time.monotonic() + _GUARDIANS_S
        # flights go in many ways
        while self._tasks or any(one.worker_id is not None for one in self._flights.all()):
            if time.monotonic() >= give_up_at:
                break
            await asyncio.sleep(limits.TICK_S)

    def _is_unheard(self, flight: Flight) -> bool:
        """Whether a request's worker has been silent so long that this router answers for it."""
        assert flight.worker_id is not None
        worker = self._fleet.find_worker(subjects.WorkerAddress(flight.model, flight.worker_id))
        return worker is None or time.monotonic() - worker.last_seen_at >= limits.WORKER_SUSPECT_AFTER_S

    def _send_keepalive(self, flight: Flight, now: float) -> None:
        flight.keepalive_at = now
        if flight.request.is_streamed:
            self._terminals.send_keepalive(flight, self._loads.progress_of(flight.model))

    def _spawn(self, flight: Flight, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        failure = errors.make_error(errors.Code.INTERNAL)
        task = tasks.background("request", self._carry(flight, work), lambda _: self._end(flight, failure))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, flight: Flight, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `work`, and guarantees that the request then has an owner or its terminal."""
        try:
            await work()
        except Exception as error:  # outermost frame of a request
            self._fail(flight, error)
        else:
            if not self._flights.holds(flight):
                return
            if flight.worker_id is None:
                await self._end_or_hand_over(flight)
            else:
                self._accepted(flight)
        finally:
            flight.span.end()

    def _fail(self, flight: Flight, error: Exception) -> None:
        """Ends a request in an error that its task or callback has raised; call it from the `except` clause."""
        if isinstance(error, errors.RequestError):
            self._end(flight, _naming_prompt(error.error, flight.request))
        elif isinstance(error, AlreadyStreamingError):
            if self._flights.holds(flight):
                self._remove(flight, is_end=True)
            self._log.warning("duplicate_dropped", request_id=flight.key)
        else:  # whatever went wrong, the client gets a terminal
            self._log.exception("request_failed", request_id=flight.key)
            self._end(flight, errors.make_error(errors.Code.INTERNAL))

    def _accepted(self, flight: Flight) -> None:
        if flight.ended_by == flight.worker_id:  # the worker's events ended it before its accept was read
            self.finish(flight)

    async def _end_or_hand_over(self, flight: Flight) -> None:
        """Ends a cancelled request; otherwise this router is stopping, and another one may take the request over."""
        if not flight.cancelled and self._offer is not None and await self._offer(flight):
            self.forget(flight, "by_router")
        elif not flight.cancelled:
            code = errors.Code.WORKER_LOST if len(flight.completion) else errors.Code.SHUTTING_DOWN
            self._end(flight, errors.make_error(code))
        else:
            self._end(flight, None)

    def _begin(self, flight: Flight) -> None:
        """Places a request and sends its run, all within this call, unless something has to be waited for: that is a
        task's work. Raises RequestError for a request that no worker would accept."""
        workers, attempt = None, None
        if not self._prompts.must_wait(flight):
            workers = self._prompts.check(flight)
            if (packed := self._prompts.pack_given(flight, workers)) is not None:
                self._set_prompt(flight, packed)
                attempt = self._dispatcher.begin(flight)
        if attempt is not None and attempt.reply is not None:
            self._sent[flight] = attempt
            attempt.reply.add_done_callback(functools.partial(self._answered, flight))
        else:
            self._spawn(flight, functools.partial(self._prepare_and_dispatch, flight, workers, attempt))

    async def _charge_and_prepare(self, flight: Flight, num_prompt: int) -> None:
        """Continues a request that had to wait until a limit was leased. Raises RequestError if it is used up."""
        flight.ticket, flight.rate_limits = await self._quota.admitted(
            flight.address, num_prompt, flight.request.max_tokens, flight.remaining_s(time.monotonic())
        )
        workers = None
        if not self._prompts.must_wait(flight):
            workers = self._prompts.check(flight)
        await self._prepare_and_dispatch(flight, workers, None)

    def _answered(self, flight: Flight, reply: object) -> None:
        """Hands a request over to the worker that has accepted it; any other answer is left to a task."""
        attempt = self._sent.get(flight)
        if attempt is None:  # a task waits for the answer
            return
        try:
            if self._dispatcher.take_accept(flight, attempt):
                del self._sent[flight]
                self._accepted(flight)
                flight.span.end()
            else:
                self._pursue(flight)
        except Exception as error:  # outermost frame of a request
            self._sent.pop(flight, None)
            self._fail(flight, error)

    def _pursue(self, flight: Flight) -> None:
        """Starts a task that waits for the answer to a run, or decides what follows from it."""
        attempt = self._sent.pop(flight)
        self._spawn(flight, functools.partial(self._dispatcher.dispatch, flight, attempt=attempt))

    async def _prepare_and_dispatch(
        self, flight: Flight, workers: list[Worker] | None, attempt: Attempt | None
    ) -> None:
        """Continues a request where `_begin` had to wait, with what that had found and begun."""
        if flight.prompt_ids is None:
            if workers is None:
                await self._prompts.wait_served(flight)
                workers = self._prompts.check(flight)
            self._set_prompt(flight, await self._prompts.pack(flight, workers))
        await self._dispatcher.dispatch(flight, attempt=attempt)

    def _set_prompt(self, flight: Flight, packed: bytes) -> None:
        """Takes the tokens of a request's prompt."""
        self._next_turns.keep(flight)
        # the seed is drawn here, or a worker that continues the stream would draw another
        self._flights.set_prompt_ids(flight, packed, secrets.randbits(32))

    def _remove(self, flight: Flight, *, is_end: bool) -> None:
        """Forgets a request, and corrects what it was charged if it has ended; otherwise its next guardian does."""
        self._flights.remove(flight)
        self._next_turns.forget(flight)
        prompt, completion = flight.num_prompt_tokens, flight.num_streamed_tokens
        if (end := flight.end) is not None:
            prompt, completion = end.prompt_tokens, end.completion_tokens
        num_tokens = prompt + completion if is_end and flight.is_named else None
        self._quota.close(flight.ticket, flight.address, num_tokens, completion)

    def _end(self, flight: Flight, error: errors.Error | None) -> None:
        """Sends this router's own terminal, or the one that a worker has left for a stream that could not be continued.
        A cancelled request always ends as `cancelled`, whatever else failed."""
        if not self._flights.holds(flight):
            return
        self._remove(flight, is_end=True)
        if flight.cancelled or error is None:
            self._terminals.end(flight, None)
            self._ends.tell_flight(flight, messages.FinishReason.CANCELLED)
        elif error.code is errors.Code.WORKER_LOST and flight.last_words is not None:
            self._terminals.end_with(flight, flight.last_words)
            self._ends.tell_flight(flight, str(flight.last_words.finish_reason))
        else:
            flight.span.set_error(str(error.code))
            self._terminals.end(flight, error)
            self._ends.tell_flight(flight, messages.FinishReason.ERROR, error.code)


def _naming_prompt(error: errors.Error, request: messages.GenerateRequest) -> errors.Error:
    """Returns the error with the field that holds the prompt, if that is at fault as a whole."""
    if error.code is not errors.Code.PROMPT_TOO_LONG or error.param is not None:
        return error
    given = ("messages", request.messages), ("prompt", request.prompt), ("token_ids", request.token_ids)
    return codec.replace(error, param=next((name for name, value in given if value is not None), None))
