"""Embeddings and ranked documents: each call is asked of the least busy worker that can do it (decision 0030)."""

import asyncio
import contextlib
import random
import secrets
import time
from abc import abstractmethod
from collections import Counter
from typing import ClassVar, Generic, TypeVar

from tokenbus.protocol.bus.bus import OutboundBufferLimitError
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import codec, errors, internal, messages, subjects
from tokenbus.protocol.wire.checks import pooling
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.requests.calls.client_calls import Call, CallKind, PooledReply
from tokenbus.router.requests.flights.worker_client import (
    AnyWorker,
    Operation,
    WorkerClient,
    deadline,
    invalid_reply,
    workers_for,
)
from tokenbus.router.requests.queueing.model_loads import ModelLoads
from tokenbus.router.telemetry.metrics import RouterMetrics
from tokenbus.router.workers.worker import Worker

_SPARE_S = 5.0
"""A call may take this much longer than its deadline, which ends it first."""

AskedT = TypeVar("AskedT", messages.EmbedRequest, messages.RerankRequest)
PooledT = TypeVar("PooledT", internal.Embed, internal.Rerank)
PooledResultT = TypeVar("PooledResultT", internal.EmbedResult, internal.RerankResult)


class _Pooling(CallKind[AskedT, PooledT], Generic[AskedT, PooledT, PooledResultT]):
    """The part that embeddings and ranked documents share."""

    names_adapters = False
    service: Operation[PooledResultT]
    unsupported: ClassVar[str]
    """The error for a model that can't do it."""

    def __init__(
        self,
        any_worker: AnyWorker,
        workers: WorkerClient,
        fleet: Fleet,
        loads: ModelLoads,
        rng: random.Random,
        metrics: RouterMetrics,
    ) -> None:
        self._any_worker = any_worker
        self._workers = workers
        self._fleet = fleet
        self._loads = loads
        self._rng = rng
        self._metrics = metrics
        self._open: Counter[subjects.WorkerAddress] = Counter()
        """Calls of this kind that each worker is working on for this router."""

    @abstractmethod
    def to_reply(self, call: Call[AskedT, PooledT], result: PooledResultT) -> PooledReply:
        """Returns the reply to a call that a worker has carried out."""

    @abstractmethod
    def find_fault(self, work: PooledT, result: PooledResultT) -> str | None:
        """Returns why a worker's result can't be the answer, if so."""

    async def answer(self, call: Call[AskedT, PooledT]) -> PooledReply:
        model = call.address.model
        async with deadline(call.remaining_s(call.body.timeout_ms)):
            await self._loads.wait_served(model, None)
            result = await self._any_worker.first_result(
                model, lambda: self._candidates(model), lambda worker: self._attempt(call, worker), may_crash=True
            )
        return self.to_reply(call, result)

    def _candidates(self, model: str) -> list[Worker]:
        """Returns the workers that can do it now, those with the fewest of this router's calls first, and of these the
        ones of its own site. Raises RequestError if none ever can."""
        now = time.monotonic()
        workers_for(self._fleet, model, now)  # raises RequestError if nothing serves the model
        if not any(self.operation in worker.card.features for worker in self._fleet.workers_of(model)):
            raise errors.request_error(errors.Code.UNSUPPORTED, self.unsupported, param="model")

        def utilization(worker: Worker) -> tuple[int, bool, int, float]:
            num_open, load = self._open[worker.card.address], worker.load
            return num_open, self._fleet.is_distant(worker), load.running + load.waiting, self._rng.random()

        eligible = self._fleet.model(model).eligible(now)
        return sorted((one for one in eligible if self.operation in one.card.features), key=utilization)

    async def _attempt(self, call: Call[AskedT, PooledT], worker: Worker) -> PooledResultT:
        """Asks a worker. If the call ends meanwhile, the worker is told that its result is no longer wanted."""
        card, remaining_s = worker.card, call.remaining_s(call.body.timeout_ms)
        call_id = secrets.token_hex(8)
        work = codec.replace(call.work, remaining_ms=remaining_s * 1e3, call_id=call_id, tenant=call.address.tenant)
        self._open[card.address] += 1
        try:
            with call.span.start_child("dispatch", "client", {tracing.WORKER_ID: card.worker_id}) as span:
                timeout_s = remaining_s + _SPARE_S
                result = await self._any_worker.ask(worker, self.service, work, timeout_s, span.headers())
        except asyncio.CancelledError:
            # the call was sent earlier on this connection, or not at all
            with contextlib.suppress(OutboundBufferLimitError, ConnectionError):
                self._workers.publish(card, "abort", internal.AbortCall(call_id=call_id))
            raise
        except errors.RequestError as error:
            if error.error.code is errors.Code.PAYLOAD_TOO_LARGE:
                raise errors.RequestError(codec.replace(error.error, param=self.inputs_field)) from error
            raise
        finally:
            self._open[card.address] -= 1
            self._open += Counter()  # drops entries that are not above 0
        if (fault := self.find_fault(call.work, result)) is not None:
            raise invalid_reply(card.worker_id, fault)
        return result


class EmbedCalls(_Pooling[messages.EmbedRequest, internal.Embed, internal.EmbedResult]):
    """Calls for embeddings."""

    operation = "embed"
    otel_operation = "embeddings"
    bodies = codec.Decoder(messages.EmbedRequest)
    replies = messages.EmbedReply
    service = Operation("embed", codec.Decoder(internal.EmbedResult))
    unsupported = "this model makes no embeddings"
    inputs_field = "input"
    advice = "ask for less at a time, or for a denser encoding"

    def check(self, body: messages.EmbedRequest) -> internal.Embed:
        return pooling.check_embed_request(body)

    def to_reply(
        self, call: Call[messages.EmbedRequest, internal.Embed], result: internal.EmbedResult
    ) -> messages.EmbedReply:
        return messages.EmbedReply(
            id=call.request_id,
            model=call.address.model,
            embeddings=pooling.to_rows(result.vectors, len(call.work.inputs), call.body.encoding),
            usage=_usage(result.prompt_tokens),
        )

    def find_fault(self, work: internal.Embed, result: internal.EmbedResult) -> str | None:
        # Every input has the same number of 32-bit floats.
        if result.vectors and len(result.vectors) % (4 * len(work.inputs)) == 0:
            return None
        return f"it has {len(result.vectors)} bytes for {len(work.inputs)} inputs"

    def count(self, code: str) -> None:
        self._metrics.embeddings.labels(code).inc()


class RerankCalls(_Pooling[messages.RerankRequest, internal.Rerank, internal.RerankResult]):
    """Calls to rank documents."""

    operation = "rerank"
    otel_operation = "rerank"
    bodies = codec.Decoder(messages.RerankRequest)
    replies = messages.RerankReply
    service = Operation("rerank", codec.Decoder(internal.RerankResult))
    unsupported = "this model scores no documents"
    inputs_field = "documents"

    def check(self, body: messages.RerankRequest) -> internal.Rerank:
        return pooling.check_rerank_request(body)

    def to_reply(
        self, call: Call[messages.RerankRequest, internal.Rerank], result: internal.RerankResult
    ) -> messages.RerankReply:
        return messages.RerankReply(
            id=call.request_id,
            model=call.address.model,
            results=pooling.rank(result.scores, call.body.top_n),
            usage=_usage(result.prompt_tokens),
        )

    def find_fault(self, work: internal.Rerank, result: internal.RerankResult) -> str | None:
        if len(result.scores) == 4 * len(work.documents):
            return None
        return f"it has {len(result.scores)} bytes for {len(work.documents)} documents"

    def count(self, code: str) -> None:
        self._metrics.reranks.labels(code).inc()


def _usage(tokens: int) -> messages.Usage:
    return messages.Usage(prompt_tokens=tokens, completion_tokens=0, total_tokens=tokens, cached_tokens=0)
