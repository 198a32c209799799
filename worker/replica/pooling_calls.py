"""Requests from routers for embeddings and document scores, which routers may take back."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

import structlog
from nats.aio.msg import Msg

from tokenbus.protocol import tasks
from tokenbus.protocol.wire import codec, errors, internal, limits, messages
from tokenbus.protocol.wire.checks import pooling
from tokenbus.worker.contract import contract
from tokenbus.worker.telemetry.metrics import ReplicaMetrics

_embeds = codec.Decoder(internal.Embed)
_reranks = codec.Decoder(internal.Rerank)
_aborts = codec.Decoder(internal.AbortCall)

WorkT = TypeVar("WorkT", internal.Embed, internal.Rerank)


class PoolingAnswer(Protocol):
    """Replies to a message with a result, or with a reply made from its error."""

    def __call__(
        self,
        message: Msg,
        result: Awaitable[messages.Message],
        make_refusal: Callable[[errors.Error], messages.Message],
    ) -> Coroutine[Any, Any, None]: ...


class PoolingEndpoints:
    """The calls that one replica is working on. The engine client limits their number."""

    def __init__(
        self,
        require_engine: Callable[[], contract.Engine],
        reply: Callable[[Msg, messages.Message], None],
        answer: PoolingAnswer,
        max_payload: Callable[[], int],
        metrics: ReplicaMetrics,
    ) -> None:
        self._require_engine = require_engine
        self._reply = reply
        self._answer = answer
        self._max_payload = max_payload
        self._metrics = metrics
        self._tasks: dict[asyncio.Task[None], str | None] = {}
        """By the call ids that their routers gave them."""
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<PoolingEndpoints {len(self._tasks)} open>"

    def embed(self, message: Msg) -> None:
        """Starts computing embeddings."""
        self._start(message, _embeds, self._embed, lambda error: internal.EmbedResult(error=error))

    def rerank(self, message: Msg) -> None:
        """Starts scoring documents."""
        self._start(message, _reranks, self._rerank, lambda error: internal.RerankResult(error=error))

    def abort(self, message: Msg) -> None:
        """Ends a call without a reply. It may already have ended."""
        try:
            call_id = _aborts.decode(message.data).call_id
        except errors.RequestError as error:
            self._log.error("abort_refused", error=str(error))
            return
        for task, known in self._tasks.items():
            if known == call_id:
                task.cancel()

    def _start(
        self,
        message: Msg,
        decoder: codec.Decoder[WorkT],
        compute: Callable[[WorkT], Coroutine[Any, Any, messages.Message]],
        make_refusal: Callable[[errors.Error], messages.Message],
    ) -> None:
        try:
            work = decoder.decode(message.data)  # at once: the abort that takes the call back comes after it
        except errors.RequestError as error:
            self._reply(message, make_refusal(error.error))
            return

        async def carry_out() -> None:
            await self._answer(message, compute(work), make_refusal)

        task = tasks.background("pooling call", carry_out())
        self._tasks[task] = work.call_id
        task.add_done_callback(self._tasks.pop)

    async def _embed(self, work: internal.Embed) -> internal.EmbedResult:
        pooling.check_embed(work)
        result = await self._require_engine().embed(work)
        if len(result.vectors) > self._max_payload() - limits.MESSAGE_RESERVE_BYTES:
            problem = f"{len(work.inputs)} embeddings take {len(result.vectors)} bytes: ask for fewer at a time"
            raise errors.request_error(errors.Code.PAYLOAD_TOO_LARGE, problem, param="input")
        self._metrics.embeddings.inc(len(work.inputs))
        self._metrics.embedded_tokens.inc(result.prompt_tokens)
        return result

    async def _rerank(self, work: internal.Rerank) -> internal.RerankResult:
        pooling.check_rerank(work)
        result = await self._require_engine().rerank(work)
        self._metrics.scored_documents.inc(len(work.documents))
        return result
