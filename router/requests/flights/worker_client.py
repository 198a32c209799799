"""Calls to single workers, and the large messages between this router and workers or other routers, sent in parts."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar

import msgspec
import structlog
from nats.aio.msg import Msg

from tokenbus.protocol import tasks
from tokenbus.protocol.bus.bus import Bus, NoRespondersError, OutboundBufferLimitError, Outgoing, PayloadTooLargeError
from tokenbus.protocol.bus.reply_inbox import ReplyInbox
from tokenbus.protocol.parts.assembly import UploadLimits
from tokenbus.protocol.parts.receiver import PartsReceiver
from tokenbus.protocol.parts.sender import PartsSender
from tokenbus.protocol.wire import codec, errors, internal, limits, messages, subjects
from tokenbus.protocol.wire.codec import Message
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.placement.placement import Capacity
from tokenbus.router.workers.worker import Worker

ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)
Headers = dict[str, str] | None

_PART_TIMEOUT_S = 1.0
"""A worker that twice fails to answer a part of a run within this time is given up for another one."""
_REPLY_TIMEOUT_S = 5.0
_MAX_TRIES = 3
_UNREACHED = (errors.Code.NO_WORKER, errors.Code.WORKER_LOST)


class Operation(NamedTuple, Generic[ReplyT]):
    """A subject of every worker, and how its replies are decoded."""

    name: str
    replies: codec.Decoder[ReplyT]


class WorkerClient:
    """Calls workers on their own subjects and decodes their replies."""

    def __init__(self, bus: Bus, names: subjects.Subjects, router_id: str, max_upload_bytes: int) -> None:
        """`max_upload_bytes` bounds the memory for large messages that are not complete."""
        self._bus = bus
        self._names = names
        inbox = bus.new_inbox()
        self._inboxes = inbox.partition(".")[0] + "."
        self._replies = ReplyInbox(bus, lambda token: f"{inbox}.{token}")
        self.sender = PartsSender(bus, self._replies, timeout_s=_PART_TIMEOUT_S, tries=2)
        self.receiver = PartsReceiver(
            bus,
            lambda sender, upload_id: names.router_upload(router_id, upload_id),
            UploadLimits(limits.MAX_INTERNAL_BYTES, max_upload_bytes, max_upload_bytes),
            lambda part: names.is_received(part.reply) or self.is_router(part.reply),
        )

    def __repr__(self) -> str:
        return f"<WorkerClient {self.sender!r} {self.receiver!r}>"

    async def open(self) -> None:
        """Subscribes to workers' replies and to the parts of large messages."""
        await self._replies.open()
        await self.receiver.open()

    def is_router(self, reply: str) -> bool:
        """Whether a reply subject is a router's: they all have the same prefix."""
        return reply.startswith(self._inboxes)

    def publish(self, card: messages.Card, service: str, message: Message) -> None:
        """Sends a worker a small message that has no reply. Raises what `Bus.publish` does."""
        self._bus.publish(self._names.worker(card.model, card.worker_id, service), codec.encode(message))

    async def call(
        self, card: messages.Card, op: Operation[ReplyT], message: Message, timeout_s: float, headers: Headers = None
    ) -> ReplyT:
        """Returns the worker's reply.

        Raises NoRespondersError, TimeoutError, PayloadTooLargeError and ConnectionError like `ReplyInbox.request`, and
        RequestError(internal) for a reply that can't be decoded, such as one from another version of Tokenbus."""
        staged = await self.sender.stage(self.prepare(card, op, message, headers))
        return await self.read(card, op, await self.send(staged, timeout_s), timeout_s)

    def prepare(self, card: messages.Card, op: Operation[ReplyT], message: Message, headers: Headers) -> Outgoing:
        """Returns a message to a worker, which `sender` stages if it does not fit."""
        return Outgoing(self._names.worker(card.model, card.worker_id, op.name), codec.encode(message), headers=headers)

    def send(self, staged: Outgoing, timeout_s: float) -> "asyncio.Future[Msg]":
        """Sends a message that fits, or the last part of one, and returns its reply as `ReplyInbox.request` does."""
        return self._replies.request(staged, timeout_s)

    async def request(self, staged: Outgoing, timeout_s: float) -> Msg:
        """Sends a message that fits, or the last part of one, and returns the whole reply. Raises what
        `ReplyInbox.request` does, and RequestError for a large reply that can't be taken."""
        return await self.receiver.whole(await self.send(staged, timeout_s), "reply", timeout_s)

    async def read(
        self, card: messages.Card, op: Operation[ReplyT], reply: Msg, timeout_s: float = _REPLY_TIMEOUT_S
    ) -> ReplyT:
        """Returns the content of a reply, of which a large one is still on its way. Raises what `call` does."""
        reply = await self.receiver.whole(reply, "reply", timeout_s)
        try:
            return op.replies.decode(reply.data)
        except errors.RequestError as problem:
            raise invalid_reply(card.worker_id, str(problem)) from problem


def invalid_reply(worker_id: str, problem: str) -> errors.RequestError:
    """Logs a worker's unusable reply, and returns the error for the request: the client is not to blame."""
    structlog.get_logger().error("worker_reply_refused", worker_id=worker_id, error=problem)
    return errors.request_error(errors.Code.INTERNAL, f"worker {worker_id} sent an invalid reply")


AnswerT = TypeVar(
    "AnswerT",
    internal.ControlReply,
    internal.DetokenizeResult,
    internal.EmbedResult,
    internal.RerankResult,
    internal.TokenizeResult,
)
ResultT = TypeVar("ResultT")


class NoAnswerError(errors.RequestError):
    """A worker can't be reached, does not answer in time, or is lost before it has answered."""


class AnyWorker:
    """Asks any worker of a model that can answer, for calls that workers keep no state for and that may be asked twice.

        the best worker that has not refused -- asked --> it answers
            ^                                    |
            |<-- it refuses for its own reason --|    it is not asked again
            |<-- it can't be reached, or its ----'    it is asked again when no other worker is left and one may come
                 engine is lost                       back

    An error that every worker would repeat ends the call. So does the third failure at workers that say they are ready
    and were asked before. If the call itself may be what ends engines, first failures count too.

    Streams are placed differently (dispatch.py): a run must never be carried out twice, so it is taken back before
    another worker is tried, and it waits for its turn. Loads (model_loads.py) use `ask` alone, since all routers must
    ask the same worker to load a model."""

    def __init__(self, fleet: Fleet, workers: WorkerClient) -> None:
        self._fleet = fleet
        self._workers = workers

    async def first_result(
        self,
        model: str,
        candidates: Callable[[], list[Worker]],
        attempt: Callable[[Worker], Awaitable[ResultT]],
        is_cancelled: Callable[[], bool] = lambda: False,
        *,
        may_crash: bool = False,
    ) -> ResultT:
        """Returns the first result of `attempt`, which asks one worker and raises RequestError if it fails there.

        `candidates` returns the workers that may be asked now, the best first; `may_crash` says that the call may end
        an engine. Raises RequestError if nothing is left to try, or if the call is cancelled after a failure."""
        refused: dict[str, errors.Error] = {}
        failed, tries = set[str](), 0
        last = errors.make_error(errors.Code.NO_WORKER)
        while True:
            worker = next((one for one in candidates() if one.card.worker_id not in refused), None)
            if worker is None:
                for worker_id in [name for name, error in refused.items() if error.code in _UNREACHED]:
                    del refused[worker_id]
                none_left = self._fleet.model(model).capacity(time.monotonic()) is Capacity.NO_WORKERS
                if refused or none_left or is_cancelled():
                    raise errors.RequestError(next(reversed(refused.values()), last))
                await asyncio.sleep(limits.TICK_S)
                continue
            worker_id = worker.card.worker_id
            try:
                return await attempt(worker)
            except errors.RequestError as error:
                last = refused[worker_id] = error.error
                counts = worker_id in failed or (may_crash and not worker.has_no_responders)
                tries += counts and worker.state is messages.WorkerState.READY
                if not last.retryable or tries >= _MAX_TRIES or is_cancelled():
                    raise
                failed.add(worker_id)

    async def ask(
        self,
        worker: Worker,
        op: Operation[AnswerT],
        message: messages.Message,
        timeout_s: float,
        headers: Headers = None,
    ) -> AnswerT:
        """Returns a worker's answer. Raises RequestError with the worker's own error, and NoAnswerError if it does not
        answer within `timeout_s`, or as soon as it is lost."""
        card = worker.card
        call = tasks.awaited(self._workers.call(card, op, message, timeout_s, headers))
        try:
            while not call.done():
                await asyncio.wait([call], timeout=limits.TICK_S)
                if not call.done() and self._fleet.is_lost(card):
                    raise NoAnswerError(errors.make_error(errors.Code.WORKER_LOST))
            answer: AnswerT = call.result()
        except PayloadTooLargeError as error:
            raise errors.request_error(errors.Code.PAYLOAD_TOO_LARGE, str(error)) from error
        except (NoRespondersError, OSError, OutboundBufferLimitError) as error:  # OSError includes TimeoutError
            if isinstance(error, NoRespondersError):
                self._fleet.mark_no_responders(card)
            text = f"worker {card.worker_id} did not answer {op.name!r}: {error}"
            raise NoAnswerError(errors.make_error(errors.Code.NO_WORKER, text)) from error
        finally:
            call.cancel()
        if answer.error is not None:
            raise errors.RequestError(answer.error)
        return answer


def workers_for(fleet: Fleet, model: str, now: float) -> list[Worker]:
    """Returns a few workers of a model, only ready ones if there are any. Raises RequestError if none serves it."""
    workers = fleet.model(model).sample(now)
    if workers:
        return workers
    if fleet.is_unknown(model, now):
        raise errors.request_error(errors.Code.MODEL_NOT_FOUND, f"no worker has ever served {model!r}")
    raise errors.request_error(errors.Code.NO_WORKER, f"nothing serves {model!r} now")


@contextlib.asynccontextmanager
async def deadline(timeout_s: float | None) -> AsyncIterator[None]:
    """Raises RequestError(deadline_exceeded) if the block takes longer."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise errors.request_error(errors.Code.DEADLINE_EXCEEDED) from error
