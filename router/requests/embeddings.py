"""Embedding requests: each is sent to one worker, to another one if that is lost, and answered once.

Workers keep no state for them, so a request may be sent again without asking what became of the first try."""

import asyncio
import random
import time
from collections import Counter
from typing import NamedTuple

import structlog

from tokenbus.protocol.bus.bus import NoRespondersError, PayloadTooLargeError
from tokenbus.protocol.bus.reply_sender import ReplySender
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import codec, embeddings, errors, internal, limits, messages, subjects
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.fleet.worker import Worker
from tokenbus.router.metrics import RouterMetrics
from tokenbus.router.placement.placement import Capacity
from tokenbus.router.requests.worker_client import Headers, Operation, WorkerClient, invalid_reply, workers_for

_EMBED = Operation("embed", codec.Decoder(internal.EmbedResult))
_MAX_OPEN = 1_024
"""Embedding requests that one router holds at a time."""
_MAX_TRIES = 3


class EmbeddingRequest(NamedTuple):
    """A valid request, and where its reply goes."""

    request_id: str
    address: subjects.ModelAddress
    body: messages.EmbedRequest
    work: internal.Embed
    reply: str
    encoding: codec.Encoding
    received_at: float
    span: tracing.Span = tracing.NOOP_SPAN

    @property
    def remaining_s(self) -> float:
        return self.received_at + self.work.remaining_ms / 1e3 - time.monotonic()


class Embeddings:
    """The embedding requests of one router."""

    def __init__(
        self,
        replies: ReplySender,
        workers: WorkerClient,
        fleet: Fleet,
        rng: random.Random,
        metrics: RouterMetrics,
        tracer: tracing.Tracer,
    ) -> None:
        self._replies = replies
        self._workers = workers
        self._fleet = fleet
        self._rng = rng
        self._metrics = metrics
        self._tracer = tracer
        self._open: Counter[subjects.WorkerAddress] = Counter()
        """Requests of this router that each worker is working on."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<Embeddings, {len(self._tasks)} open>"

    def start(self, request: EmbeddingRequest, headers: tracing.Headers) -> None:
        """Takes a request. Raises RequestError(overloaded) if too many are open."""
        if len(self._tasks) >= _MAX_OPEN:
            raise errors.RequestError(errors.make_error(errors.Code.OVERLOADED, retry_after_ms=1_000.0))
        model, request_id = request.address.model, request.request_id
        self._log.info("embed_received", request_id=request_id, model=model)
        known = {tracing.MODEL: model, tracing.OPERATION: "embeddings", tracing.REQUEST_ID: request_id}
        span = tracing.start_span(self._tracer, "route", "server", headers, known, request.received_at)
        task = asyncio.get_running_loop().create_task(self._carry(request._replace(span=span)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Returns when every request was answered."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def shut_down(self) -> None:
        """Answers the open requests with an error."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def send_reply(self, subject: str, encoding: codec.Encoding, reply: messages.EmbedReply) -> None:
        """Publishes a reply, or an error in its place if it is too large for the broker."""
        headers = codec.error_headers(reply.error) if reply.error else None
        try:
            self._replies.send(subject, codec.encode(reply, encoding), headers)
        except PayloadTooLargeError as problem:
            error = errors.make_error(
                errors.Code.PAYLOAD_TOO_LARGE,
                f"{problem}: ask for fewer embeddings at a time, or in base64",
                param="input",
            )
            refusal = messages.EmbedReply(id=reply.id, error=error)
            self._replies.send(subject, codec.encode(refusal, encoding), codec.error_headers(error))

    async def _carry(self, request: EmbeddingRequest) -> None:
        with request.span:
            try:
                reply = _make_reply(request, await self._try_workers(request))
            except errors.RequestError as error:
                reply = messages.EmbedReply(id=request.request_id, error=error.error)
            except asyncio.CancelledError:  # only `shut_down` cancels
                reply = messages.EmbedReply(id=request.request_id, error=errors.make_error(errors.Code.SHUTTING_DOWN))
            except Exception:  # outermost frame of a request: whatever went wrong, the client gets a reply
                self._log.exception("request_failed", request_id=request.request_id)
                reply = messages.EmbedReply(id=request.request_id, error=errors.make_error(errors.Code.INTERNAL))
            if reply.error:
                request.span.set_error(str(reply.error.code))
            self.send_reply(request.reply, request.encoding, reply)
        code = reply.error.code if reply.error else None
        self._metrics.embeddings.labels(code or "ok").inc()
        self._log.info(
            "embed_finished",
            request_id=request.request_id,
            code=code,
            prompt_tokens=reply.usage.prompt_tokens if reply.usage else 0,
            total_ms=round((time.monotonic() - request.received_at) * 1e3, 1),
        )

    async def _try_workers(self, request: EmbeddingRequest) -> internal.EmbedResult:
        """Returns the first result. Raises RequestError with the last refusal if there is none."""
        refused: dict[str, errors.Error] = {}
        tries = 0
        while tries < _MAX_TRIES:
            worker = self._choose(request.address.model, refused)
            if worker is None:
                if not self._may_come_back(request.address.model, refused):
                    break
                if request.remaining_s <= limits.TICK_S:
                    raise errors.request_error(errors.Code.DEADLINE_EXCEEDED)
                await asyncio.sleep(limits.TICK_S)
                continue
            worker_id, address = worker.card.worker_id, worker.card.address
            self._open[address] += 1
            try:
                with request.span.start_child("dispatch", "client", {tracing.WORKER_ID: worker_id}) as span:
                    result = await self._ask(worker.card, request, span.headers())
            finally:
                self._open[address] -= 1
                self._open += Counter()  # drops entries that are not above 0
            if result.error is None:
                return result
            if not result.error.retryable or result.error.code is errors.Code.DEADLINE_EXCEEDED:
                raise errors.RequestError(result.error)
            refused[worker_id] = result.error
            tries += not worker.has_no_responders
        raise errors.RequestError(next(reversed(refused.values()), errors.make_error(errors.Code.NO_WORKER)))

    def _choose(self, model: str, refused: dict[str, errors.Error]) -> Worker | None:
        """Returns the least busy worker; None if none is available now. Raises RequestError if none can ever be."""
        now = time.monotonic()
        workers_for(self._fleet, model, now)  # raises RequestError if nothing serves the model
        if not any("embed" in worker.card.features for worker in self._fleet.workers_of(model)):
            raise errors.request_error(errors.Code.UNSUPPORTED, "this model makes no embeddings", param="model")

        def utilization(worker: Worker) -> tuple[int, int, float]:
            return self._open[worker.card.address], worker.load.running + worker.load.waiting, self._rng.random()

        able = [worker for worker in self._fleet.eligible_workers(model, now) if "embed" in worker.card.features]
        others = [worker for worker in able if worker.card.worker_id not in refused]
        return min(others, key=utilization, default=None)

    def _may_come_back(self, model: str, refused: dict[str, errors.Error]) -> bool:
        """Whether waiting may help. Workers that could not be reached, or whose engine died, may be tried again."""
        for worker_id, error in list(refused.items()):
            if error.code in (errors.Code.NO_WORKER, errors.Code.WORKER_LOST):
                del refused[worker_id]
        return not refused and self._fleet.capacity(model, time.monotonic()) is not Capacity.NO_WORKERS

    async def _ask(self, card: messages.Card, request: EmbeddingRequest, headers: Headers) -> internal.EmbedResult:
        """Returns a worker's result, or an error if it refuses, is lost meanwhile, or does not reply in time."""
        remaining_s = request.remaining_s
        if remaining_s <= 0:
            return internal.EmbedResult(error=errors.make_error(errors.Code.DEADLINE_EXCEEDED))
        work = codec.replace(request.work, remaining_ms=remaining_s * 1e3)
        call = asyncio.ensure_future(self._workers.call(card, _EMBED, work, remaining_s, headers))
        try:
            while not call.done():
                await asyncio.wait({call}, timeout=limits.TICK_S)
                if self._fleet.is_lost(card) and not call.done():
                    return internal.EmbedResult(error=errors.make_error(errors.Code.WORKER_LOST))
            result, num_inputs = call.result(), len(request.work.inputs)
            # Every input has the same number of 32-bit floats.
            if result.error is None and (not result.vectors or len(result.vectors) % (4 * num_inputs)):
                raise invalid_reply(card.worker_id, f"it has {len(result.vectors)} bytes for {num_inputs} inputs")
            return result
        except errors.RequestError as problem:
            return internal.EmbedResult(error=problem.error)
        except (NoRespondersError, ConnectionError) as error:
            if isinstance(error, NoRespondersError):
                self._fleet.mark_no_responders(card)
            return internal.EmbedResult(error=errors.make_error(errors.Code.NO_WORKER))
        except PayloadTooLargeError as error:
            return internal.EmbedResult(
                error=errors.make_error(errors.Code.PAYLOAD_TOO_LARGE, str(error), param="input")
            )
        except TimeoutError:
            return internal.EmbedResult(error=errors.make_error(errors.Code.DEADLINE_EXCEEDED))
        finally:
            call.cancel()


def _make_reply(request: EmbeddingRequest, result: internal.EmbedResult) -> messages.EmbedReply:
    tokens = result.prompt_tokens
    return messages.EmbedReply(
        id=request.request_id,
        model=request.address.model,
        embeddings=embeddings.to_rows(result.vectors, len(request.work.inputs), request.body.encoding),
        usage=messages.Usage(prompt_tokens=tokens, completion_tokens=0, total_tokens=tokens, cached_tokens=0),
    )
