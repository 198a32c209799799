"""Requests with one answer and no stream: each is sent to one worker, or to another if that is lost, and answered once.

Workers keep no state for them, so a request may be sent again without resolving the first try. Embeddings
(embeddings.py) and reranks (reranks.py) differ in their messages only (decision 0030)."""

import asyncio
import contextlib
import random
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from typing import Any, ClassVar, Generic, TypeVar

import structlog

from tokenbus.protocol import tasks
from tokenbus.protocol.bus.bus import NoRespondersError, OutboundBufferLimitError, PayloadTooLargeError
from tokenbus.protocol.bus.reply_sender import ReplySender
from tokenbus.protocol.telemetry import metrics, tracing
from tokenbus.protocol.wire import codec, errors, internal, limits, messages, subjects
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.placement.placement import Capacity
from tokenbus.router.requests.flights.worker_client import Headers, Operation, WorkerClient, invalid_reply, workers_for
from tokenbus.router.requests.pooling.pooling_request import BodyT, PoolingRequest, WorkT
from tokenbus.router.requests.queueing.model_loads import ModelLoads
from tokenbus.router.workers.worker import Worker

_MAX_OPEN = 1_024
"""Maximum number of requests of one kind in one router."""
_MAX_TRIES = 3
_ABORT = "abort"

ResultT = TypeVar("ResultT", internal.EmbedResult, internal.RerankResult)
Reply = messages.EmbedReply | messages.RerankReply


class PoolingRequests(ABC, Generic[BodyT, WorkT, ResultT]):
    """The requests of one kind that one router has received."""

    operation: ClassVar[str]
    """The name of the request's subjects, and of the feature that a worker needs for it."""
    otel_operation: ClassVar[str]
    unsupported: ClassVar[str]
    """The error for a model that can't do it."""
    inputs_field: ClassVar[str]
    """The field of the request that is to blame for its size."""

    def __init__(
        self,
        replies: ReplySender,
        workers: WorkerClient,
        fleet: Fleet,
        loads: ModelLoads,
        rng: random.Random,
        results: codec.Decoder[ResultT],
        counted: metrics.Counter,
        tracer: tracing.Tracer,
    ) -> None:
        """`counted` counts the replies, by error code."""
        self._operation: Operation[ResultT] = Operation(self.operation, results)
        self._counted = counted
        self._replies = replies
        self._workers = workers
        self._fleet = fleet
        self._loads = loads
        self._rng = rng
        self._tracer = tracer
        self._open: Counter[subjects.WorkerAddress] = Counter()
        """Requests of this router that each worker is working on."""
        self._tasks: dict[asyncio.Task[None], PoolingRequest[BodyT, WorkT]] = {}
        self._by_key: dict[str, list[PoolingRequest[BodyT, WorkT]]] = {}
        """The same requests. Clients may use an id for several at a time."""
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, {len(self._tasks)} open>"

    @abstractmethod
    def check(self, body: BodyT) -> WorkT:
        """Returns the message for a worker. Raises RequestError for the first field that is not allowed."""

    @abstractmethod
    def make_refusal(self, request_id: str, error: errors.Error) -> Reply:
        """Returns the reply to a request that fails."""

    @abstractmethod
    def _make_reply(self, request: PoolingRequest[BodyT, WorkT], result: ResultT) -> Reply:
        """Returns the reply to a request that a worker has carried out."""

    @abstractmethod
    def _find_fault(self, work: WorkT, result: ResultT) -> str | None:
        """Returns why a worker's result can't be the answer, if so."""

    @abstractmethod
    def _log_received(self, request_id: str, model: str) -> None: ...

    @abstractmethod
    def log_refused(self, request_id: str, error: errors.Error) -> None: ...

    @abstractmethod
    def _log_finished(self, request_id: str, code: str | None, prompt_tokens: int, total_ms: float) -> None: ...

    def start(self, request: PoolingRequest[BodyT, WorkT], headers: tracing.Headers) -> None:
        """Takes a request. Raises RequestError(overloaded) if too many are open."""
        if len(self._tasks) >= _MAX_OPEN:
            raise errors.RequestError(errors.make_error(errors.Code.OVERLOADED, retry_after_ms=1_000.0))
        model, request_id = request.address.model, request.request_id
        self._log_received(request_id, model)
        known = {tracing.MODEL: model, tracing.OPERATION: self.otel_operation, tracing.REQUEST_ID: request_id}
        span = tracing.start_span(self._tracer, "route", "server", headers, known, request.received_at)
        request = request._replace(span=span)
        task = tasks.background("pooling request", self._carry(request), lambda _: self._refuse_failed(request))
        self._tasks[task] = request
        self._by_key.setdefault(request.key, []).append(request)
        task.add_done_callback(self._forget)

    def cancel(self, key: str, model: str | None) -> bool:
        """Ends the requests of a client with this id for a model, or for any if None is named, and returns whether
        there were any."""
        found = [one for one in self._by_key.get(key, ()) if model in (None, one.address.model)]
        for request in found:
            _end(request, errors.Code.CANCELLED)
        return bool(found)

    async def drain(self) -> None:
        """Returns when every request was answered."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def shut_down(self) -> None:
        """Answers the open requests with an error."""
        for request in self._tasks.values():
            _end(request, errors.Code.SHUTTING_DOWN)
        await asyncio.gather(*self._tasks)

    def _forget(self, task: asyncio.Task[None]) -> None:
        request = self._tasks.pop(task)
        same_id = self._by_key[request.key]
        same_id.remove(request)
        if not same_id:
            del self._by_key[request.key]

    def send_reply(self, subject: str, encoding: codec.Encoding, reply: Reply) -> None:
        """Publishes a reply, or an error in its place if it is too large for the broker."""
        headers = codec.error_headers(reply.error) if reply.error else None
        try:
            self._replies.send(subject, codec.encode(reply, encoding), headers)
        except PayloadTooLargeError as problem:
            error = errors.make_error(
                errors.Code.PAYLOAD_TOO_LARGE,
                f"{problem}: ask for less at a time, or for a denser encoding",
                param=self.inputs_field,
            )
            refusal = self.make_refusal(reply.id, error)
            self._replies.send(subject, codec.encode(refusal, encoding), codec.error_headers(error))

    def _refuse_failed(self, request: PoolingRequest[BodyT, WorkT]) -> None:
        refusal = self.make_refusal(request.request_id, errors.make_error(errors.Code.INTERNAL))
        self.send_reply(request.reply, request.encoding, refusal)

    async def _carry(self, request: PoolingRequest[BodyT, WorkT]) -> None:
        with request.span:
            try:
                reply = self._make_reply(request, await self._try_workers(request))
            except errors.RequestError as error:
                reply = self.make_refusal(request.request_id, error.error)
            except Exception:  # outermost frame of a request: whatever went wrong, the client gets a reply
                self._log.exception("request_failed", request_id=request.request_id)
                reply = self.make_refusal(request.request_id, errors.make_error(errors.Code.INTERNAL))
            if reply.error:
                request.span.set_error(str(reply.error.code))
            self.send_reply(request.reply, request.encoding, reply)
        code = reply.error.code if reply.error else None
        self._counted.labels(code or "ok").inc()
        tokens = reply.usage.prompt_tokens if reply.usage else 0
        total_ms = round((time.monotonic() - request.received_at) * 1e3, 1)
        self._log_finished(request.request_id, code, tokens, total_ms)

    async def _try_workers(self, request: PoolingRequest[BodyT, WorkT]) -> ResultT:
        """Returns the first result. Raises RequestError with the last refusal if there is none, and when the request
        is ended."""
        await self._loads.wait_served(request.address.model, request.remaining_s, request.end.done)
        refused: dict[str, errors.Error] = {}
        tries = 0
        while tries < _MAX_TRIES:
            if request.end.done():
                raise errors.request_error(request.end.result())
            worker = self._choose(request.address.model, refused)
            if worker is None:
                if not self._may_come_back(request.address.model, refused):
                    break
                if request.remaining_s <= limits.TICK_S:
                    raise errors.request_error(errors.Code.DEADLINE_EXCEEDED)
                await asyncio.wait({request.end}, timeout=limits.TICK_S)
                continue
            worker_id, address = worker.card.worker_id, worker.card.address
            self._open[address] += 1
            try:
                with request.span.start_child("dispatch", "client", {tracing.WORKER_ID: worker_id}) as span:
                    result = await self._ask(worker.card, request, span.headers())
            finally:
                self._open[address] -= 1
                self._open += Counter()  # drops entries that are not above 0
            if not isinstance(result, errors.Error):
                return result
            if request.end.done():
                raise errors.RequestError(result)
            if not result.retryable or result.code is errors.Code.DEADLINE_EXCEEDED:
                raise errors.RequestError(result)
            refused[worker_id] = result
            tries += not worker.has_no_responders
        raise errors.RequestError(next(reversed(refused.values()), errors.make_error(errors.Code.NO_WORKER)))

    def _choose(self, model: str, refused: dict[str, errors.Error]) -> Worker | None:
        """Returns the least busy worker; None if none is available now. Raises RequestError if none can ever be."""
        now = time.monotonic()
        workers_for(self._fleet, model, now)  # raises RequestError if nothing serves the model
        if not any(self.operation in worker.card.features for worker in self._fleet.workers_of(model)):
            raise errors.request_error(errors.Code.UNSUPPORTED, self.unsupported, param="model")

        def utilization(worker: Worker) -> tuple[int, int, float]:
            return self._open[worker.card.address], worker.load.running + worker.load.waiting, self._rng.random()

        eligible = self._fleet.eligible_workers(model, now)
        able = [worker for worker in eligible if self.operation in worker.card.features]
        others = [worker for worker in able if worker.card.worker_id not in refused]
        return min(others, key=utilization, default=None)

    def _may_come_back(self, model: str, refused: dict[str, errors.Error]) -> bool:
        """Whether waiting may help. Workers that could not be reached, or whose engine died, may be tried again."""
        for worker_id, error in list(refused.items()):
            if error.code in (errors.Code.NO_WORKER, errors.Code.WORKER_LOST):
                del refused[worker_id]
        return not refused and self._fleet.capacity(model, time.monotonic()) is not Capacity.NO_WORKERS

    async def _ask(
        self, card: messages.Card, request: PoolingRequest[BodyT, WorkT], headers: Headers
    ) -> ResultT | errors.Error:
        """Returns a worker's result, or an error if it refuses, is lost meanwhile, or does not reply in time. A request
        that is ended is taken back from the worker."""
        remaining_s = request.remaining_s
        if remaining_s <= 0:
            return errors.make_error(errors.Code.DEADLINE_EXCEEDED)
        call_id = secrets.token_hex(8)
        tenant = request.address.tenant
        work = codec.replace(request.work, remaining_ms=remaining_s * 1e3, call_id=call_id, tenant=tenant)
        call = tasks.awaited(self._workers.call(card, self._operation, work, remaining_s, headers))
        either: set[asyncio.Future[Any]] = {call, request.end}
        try:
            while not call.done():
                await asyncio.wait(either, timeout=limits.TICK_S, return_when=asyncio.FIRST_COMPLETED)
                if request.end.done() and not call.done():
                    self._take_back(card, call_id)
                    return errors.make_error(request.end.result())
                if self._fleet.is_lost(card) and not call.done():
                    return errors.make_error(errors.Code.WORKER_LOST)
            result: ResultT = call.result()
            if result.error is not None:
                return result.error
            if (fault := self._find_fault(request.work, result)) is not None:
                raise invalid_reply(card.worker_id, fault)
            return result
        except errors.RequestError as problem:
            return problem.error
        except (NoRespondersError, ConnectionError) as error:
            if isinstance(error, NoRespondersError):
                self._fleet.mark_no_responders(card)
            return errors.make_error(errors.Code.NO_WORKER)
        except PayloadTooLargeError as error:
            return errors.make_error(errors.Code.PAYLOAD_TOO_LARGE, str(error), param=self.inputs_field)
        except TimeoutError:
            return errors.make_error(errors.Code.DEADLINE_EXCEEDED)
        finally:
            call.cancel()

    def _take_back(self, card: messages.Card, call_id: str) -> None:
        """Tells a worker that its result is no longer wanted. The call was sent earlier on this connection, or not at
        all."""
        with contextlib.suppress(OutboundBufferLimitError, ConnectionError):  # the result goes unused
            self._workers.publish(card, _ABORT, internal.AbortCall(call_id=call_id))


def _end(request: PoolingRequest[BodyT, WorkT], code: errors.Code) -> None:
    if not request.end.done():
        request.end.set_result(code)
