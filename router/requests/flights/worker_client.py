"""Calls to a single worker, and the errors for a model that no worker can serve."""

from typing import Generic, NamedTuple, TypeVar

import msgspec
import structlog

from tokenbus.protocol.bus.bus import Bus, Outgoing
from tokenbus.protocol.wire import codec, errors, messages, subjects
from tokenbus.protocol.wire.codec import Message
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.requests.flights.internal_parts import InternalParts
from tokenbus.router.workers.worker import Worker

ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)
Headers = dict[str, str] | None


class Operation(NamedTuple, Generic[ReplyT]):
    """A subject of every worker, and how its replies are decoded."""

    name: str
    replies: codec.Decoder[ReplyT]


class WorkerClient:
    """Calls workers on their own subjects and decodes their replies."""

    def __init__(self, bus: Bus, names: subjects.Subjects, parts: InternalParts) -> None:
        self._bus = bus
        self._names = names
        self._parts = parts

    def publish(self, card: messages.Card, service: str, message: Message) -> None:
        """Sends a worker a small message that has no reply. Raises what `Bus.publish` does."""
        self._bus.publish(self._names.worker(card.model, card.worker_id, service), codec.encode(message))

    async def call(
        self, card: messages.Card, op: Operation[ReplyT], message: Message, timeout_s: float, headers: Headers = None
    ) -> ReplyT:
        """Returns the worker's reply.

        Raises NoRespondersError, TimeoutError, PayloadTooLargeError and ConnectionError like `Bus.request`, and
        RequestError(internal) for a reply that can't be decoded, such as one from another version of Tokenbus."""
        return await self.send(card, op, await self.stage(card, op, message, headers), timeout_s)

    async def stage(self, card: messages.Card, op: Operation[ReplyT], message: Message, headers: Headers) -> Outgoing:
        """Prepares a message for `send`, sending a large one except for its last part. Raises what `PartsSender.stage`
        does; the worker then does not have the message."""
        subject = self._names.worker(card.model, card.worker_id, op.name)
        return await self._parts.stage(Outgoing(subject, codec.encode(message), headers=headers))

    async def send(self, card: messages.Card, op: Operation[ReplyT], staged: Outgoing, timeout_s: float) -> ReplyT:
        """Sends a message that `stage` has prepared, and returns the reply like `call`."""
        reply = await self._parts.request(staged, timeout_s)
        try:
            return op.replies.decode(reply.data)
        except errors.RequestError as problem:
            raise invalid_reply(card.worker_id, str(problem)) from problem


def invalid_reply(worker_id: str, problem: str) -> errors.RequestError:
    """Logs a worker's unusable reply, and returns the error for the request: the client is not to blame."""
    structlog.get_logger().error("worker_reply_refused", worker_id=worker_id, error=problem)
    return errors.request_error(errors.Code.INTERNAL, f"worker {worker_id} sent an invalid reply")


def workers_for(fleet: Fleet, model: str, now: float) -> list[Worker]:
    """Returns a few workers of a model, only ready ones if there are any. Raises RequestError if none serves it."""
    workers = fleet.sample_workers(model, now)
    if workers:
        return workers
    if fleet.is_unknown(model, now):
        raise errors.request_error(errors.Code.MODEL_NOT_FOUND, f"no worker has ever served {model!r}")
    raise errors.request_error(errors.Code.NO_WORKER, f"nothing serves {model!r} now")
