"""Requests for embeddings: each is asked of one worker, of another if that is lost, and answered once."""

import asyncio
import random
import time
from collections import Counter
from typing import NamedTuple

import structlog

from tokenbus.protocol.bus.bus import Bus, NoRespondersError, PayloadTooLargeError
from tokenbus.protocol.bus.reply_sender import ReplySender
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import codec, embeddings, errors, internal, limits, messages, subjects
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.fleet.worker import Worker
from tokenbus.router.metrics import RouterMetrics
from tokenbus.router.placement.model_workers import Capacity
from tokenbus.router.requests import present, worker_replies

_replies = codec.Decoder(internal.EmbedResult)
MAX_OPEN = 1_024
"""Requests for embeddings that one router holds at a time."""
_MAX_TRIES = 3


class Asked(NamedTuple):
    """A checked request, and where its answer goes."""

    request_id: str
    address: subjects.ModelAddress
    request: messages.EmbedRequest
    work: internal.Embed
    reply: str
    encoding: codec.Encoding
    received_at: float
    span: tracing.Span = tracing.NOOP_SPAN


class Embeddings:
    """The requests of one router. They hold no state in a worker, so that any may be asked again elsewhere."""

    def __init__(
        self,
        bus: Bus,
        replies: ReplySender,
        names: subjects.Subjects,
        fleet: Fleet,
        rng: random.Random,
        metrics: RouterMetrics,
        tracer: tracing.Tracer,
    ) -> None:
        self._bus = bus
        self._replies = replies
        self._names = names
        self._fleet = fleet
        self._rng = rng
        self._metrics = metrics
        self._tracer = tracer
        self._open: Counter[subjects.WorkerAddress] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<Embeddings, {len(self._tasks)} open>"

    def begin(self, asked: Asked, headers: tracing.Headers) -> None:
        """Takes a request. Raises RequestError where there is no room."""
        if len(self._tasks) >= MAX_OPEN:
            raise errors.RequestError(errors.make_error(errors.Code.OVERLOADED, retry_after_ms=1_000.0))
        self._log.info("embed_received", request_id=asked.request_id, model=asked.address.model)
        known = {
            tracing.MODEL: asked.address.model,
            tracing.OPERATION: "embeddings",
            tracing.REQUEST_ID: asked.request_id,
        }
        span = tracing.start_span(self._tracer, "route", "server", headers, known, asked.received_at)
        asked = asked._replace(span=span)
        task = asyncio.get_running_loop().create_task(self._carry(asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Returns when every request has its answer."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def leave(self) -> None:
        """Answers those that have none yet."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def answer(self, reply: str, encoding: codec.Encoding, answer: messages.EmbedReply) -> None:
        """Publishes an answer, or, where that is too large, why there is none."""
        headers = codec.error_headers(answer.error) if answer.error else None
        try:
            self._replies.send(reply, codec.encode(answer, encoding), headers)
        except PayloadTooLargeError as problem:
            error = errors.make_error(
                errors.Code.PAYLOAD_TOO_LARGE,
                f"{problem}: ask for fewer embeddings at a time, or in base64",
                param="input",
            )
            refusal = messages.EmbedReply(id=answer.id, error=error)
            self._replies.send(reply, codec.encode(refusal, encoding), codec.error_headers(error))

    async def _carry(self, asked: Asked) -> None:
        """To the one answer."""
        with asked.span:
            answer = await self._find(asked)
            if answer.error:
                asked.span.set_error(str(answer.error.code))
            self.answer(asked.reply, asked.encoding, answer)
        total_ms = round((time.monotonic() - asked.received_at) * 1e3, 1)
        code = answer.error.code if answer.error else None
        self._metrics.embeddings.labels(code or "ok").inc()
        tokens = answer.usage.prompt_tokens if answer.usage else 0
        self._log.info(
            "embed_finished", request_id=asked.request_id, code=code, prompt_tokens=tokens, total_ms=total_ms
        )

    async def _find(self, asked: Asked) -> messages.EmbedReply:
        """What to answer, whatever happens."""
        try:
            return _answer(asked, await self._ask_around(asked))
        except errors.RequestError as error:
            return messages.EmbedReply(id=asked.request_id, error=error.error)
        except asyncio.CancelledError:  # by `leave`, and by nobody else
            return messages.EmbedReply(id=asked.request_id, error=errors.make_error(errors.Code.SHUTTING_DOWN))
        except Exception:  # outermost frame of a request: whatever went wrong, it gets its answer
            self._log.exception("request_failed", request_id=asked.request_id)
            return messages.EmbedReply(id=asked.request_id, error=errors.make_error(errors.Code.INTERNAL))

    async def _ask_around(self, asked: Asked) -> internal.EmbedResult:
        """The first answer that is one. Raises RequestError with the last refusal."""
        refused: dict[str, errors.Error] = {}
        tries = 0
        while tries < _MAX_TRIES:
            worker = self._choose(asked.address.model, refused)
            if worker is None and not self._forgive_absent(asked.address.model, refused):
                break
            if worker is None:
                await self._wait(asked)
                continue
            worker_id = worker.card.worker_id
            self._open[worker.card.address] += 1
            try:
                with asked.span.start_child("dispatch", "client", {tracing.WORKER_ID: worker_id}) as span:
                    found = await self._ask(worker.card, asked, span.headers())
            finally:
                self._open[worker.card.address] -= 1
                self._open += Counter()  # keeps only those above 0
            if found.error is None:
                return found
            if not found.error.retryable or found.error.code is errors.Code.DEADLINE_EXCEEDED:
                raise errors.RequestError(found.error)
            refused[worker_id] = found.error
            tries += not worker.has_no_responders
        raise errors.RequestError(next(reversed(refused.values()), errors.make_error(errors.Code.NO_WORKER)))

    def _choose(self, model: str, refused: dict[str, errors.Error]) -> Worker | None:
        """The least busy that can, None where none of those can now. Raises RequestError where there is none at all."""
        now = time.monotonic()
        present.workers_of(self._fleet, model, now)
        if not any("embed" in worker.card.features for worker in self._fleet.workers_of(model)):
            raise errors.request_error(errors.Code.UNSUPPORTED, "no worker of it makes embeddings", param="model")
        able = [worker for worker in self._fleet.eligible_workers(model, now) if "embed" in worker.card.features]
        others = [worker for worker in able if worker.card.worker_id not in refused]
        return min(others, key=self._busyness, default=None)

    def _forgive_absent(self, model: str, refused: dict[str, errors.Error]) -> bool:
        """Whether it may help to wait: a worker that did not answer may be back soon, and is forgiven."""
        for worker_id, error in list(refused.items()):
            if error.code is errors.Code.NO_WORKER:
                del refused[worker_id]
        return not refused and self._fleet.capacity(model, time.monotonic()) is not Capacity.NO_WORKERS

    async def _wait(self, asked: Asked) -> None:
        """Raises RequestError when its time has passed."""
        if _remaining_s(asked) <= limits.TICK_S:
            raise errors.request_error(errors.Code.DEADLINE_EXCEEDED)
        await asyncio.sleep(limits.TICK_S)

    def _busyness(self, worker: Worker) -> tuple[int, int, float]:
        load = worker.load
        return self._open[worker.card.address], load.running + load.waiting, self._rng.random()

    async def _ask(self, card: messages.Card, asked: Asked, headers: dict[str, str]) -> internal.EmbedResult:
        """One worker's answer; one that dies meanwhile, or never answers, is an error."""
        remaining_s = _remaining_s(asked)
        if remaining_s <= 0:
            return internal.EmbedResult(error=errors.make_error(errors.Code.DEADLINE_EXCEEDED))
        work = codec.encode(codec.replace(asked.work, remaining_ms=remaining_s * 1e3))
        subject = self._names.worker(card.model, card.worker_id, "embed")
        answer = asyncio.get_running_loop().create_task(self._bus.request(subject, work, remaining_s, headers))
        try:
            while not answer.done():
                await asyncio.wait({answer}, timeout=limits.TICK_S)
                if self._fleet.is_lost(card) and not answer.done():
                    return internal.EmbedResult(error=errors.make_error(errors.Code.WORKER_LOST))
            found = worker_replies.read(_replies, answer.result().data, card.worker_id)
            return _checked(found, len(asked.work.inputs), card.worker_id)
        except errors.RequestError as problem:
            return internal.EmbedResult(error=problem.error)
        except NoRespondersError:
            self._fleet.mark_no_responders(card)
            return internal.EmbedResult(error=errors.make_error(errors.Code.NO_WORKER))
        except ConnectionError:
            return internal.EmbedResult(error=errors.make_error(errors.Code.NO_WORKER))
        except PayloadTooLargeError as error:
            return internal.EmbedResult(
                error=errors.make_error(errors.Code.PAYLOAD_TOO_LARGE, str(error), param="input")
            )
        except TimeoutError:
            return internal.EmbedResult(error=errors.make_error(errors.Code.DEADLINE_EXCEEDED))
        finally:
            answer.cancel()


def _remaining_s(asked: Asked) -> float:
    return asked.received_at + asked.work.remaining_ms / 1e3 - time.monotonic()


def _checked(found: internal.EmbedResult, count: int, worker_id: str) -> internal.EmbedResult:
    """Raises RequestError(internal) where there is not the same number of 32-bit numbers for each of `count` inputs."""
    if found.error is None and (not found.vectors or len(found.vectors) % (4 * count)):
        raise worker_replies.unreadable(worker_id, f"it has {len(found.vectors)} bytes for {count} inputs")
    return found


def _answer(asked: Asked, found: internal.EmbedResult) -> messages.EmbedReply:
    tokens = found.prompt_tokens
    return messages.EmbedReply(
        id=asked.request_id,
        model=asked.address.model,
        embeddings=embeddings.to_rows(found.vectors, len(asked.work.inputs), asked.request.encoding),
        usage=messages.Usage(prompt_tokens=tokens, completion_tokens=0, total_tokens=tokens, cached_tokens=0),
    )
