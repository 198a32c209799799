"""Calls to a single worker, and the errors for a model that no worker can serve."""

from typing import Generic, NamedTuple, TypeVar

import msgspec
import structlog

from tokenbus.protocol.bus.bus import Bus
from tokenbus.protocol.wire import codec, errors, messages, subjects
from tokenbus.protocol.wire.codec import Message
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.fleet.worker import Worker

ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)
Headers = dict[str, str] | None


class Operation(NamedTuple, Generic[ReplyT]):
    """A subject of every worker, and how its replies are decoded."""

    name: str
    replies: codec.Decoder[ReplyT]


class WorkerClient:
    """Calls workers on their own subjects and decodes their replies."""

    def __init__(self, bus: Bus, names: subjects.Subjects) -> None:
        self._bus = bus
        self._names = names

    async def call(
        self, card: messages.Card, op: Operation[ReplyT], message: Message, timeout_s: float, headers: Headers = None
    ) -> ReplyT:
        """Returns the worker's reply.

        Raises NoRespondersError, TimeoutError, PayloadTooLargeError and ConnectionError like `Bus.request`, and
        RequestError(internal) for a reply that can't be decoded, such as one from another version of Tokenbus."""
        subject = self._names.worker(card.model, card.worker_id, op.name)
        reply = await self._bus.request(subject, codec.encode(message), timeout_s, headers)
        try:
            return op.replies.decode(reply.data)
        except errors.RequestError as problem:
            raise invalid_reply(card.worker_id, str(problem)) from problem


def invalid_reply(worker_id: str, problem: str) -> errors.RequestError:
    """Logs a worker's unusable reply, and returns the error for the request: the client is not to blame."""
    structlog.get_logger().error("worker_reply_refused", worker_id=worker_id, error=problem)
    return errors.request_error(errors.Code.INTERNAL, f"worker {worker_id} sent an invalid reply")


def workers_for(fleet: Fleet, model: str, now: float) -> list[Worker]:
    """Returns a few workers of a model, only ready ones if there are any. Raises RequestError if nothing serves it."""
    workers = fleet.sample_workers(model, now)
    if workers:
        return workers
    if fleet.is_unknown(model, now):
        raise errors.request_error(errors.Code.MODEL_NOT_FOUND, f"no worker has ever served {model!r}")
    raise errors.request_error(errors.Code.NO_WORKER, f"nothing serves {model!r} now")
