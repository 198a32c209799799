"""Calls to single workers, and the large messages between this router and workers or other routers, sent in parts."""

from typing import Generic, NamedTuple, TypeVar

import msgspec
import structlog
from nats.aio.msg import Msg

from tokenbus.protocol.bus.bus import Bus, Outgoing
from tokenbus.protocol.parts.assembly import UploadLimits
from tokenbus.protocol.parts.receiver import PartsReceiver
from tokenbus.protocol.parts.sender import PartsSender
from tokenbus.protocol.wire import codec, errors, limits, messages, subjects
from tokenbus.protocol.wire.codec import Message

ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)
Headers = dict[str, str] | None

_PART_TIMEOUT_S = 1.0
"""A worker that twice fails to answer a part of a run within this time is given up for another one."""


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
        self.sender = PartsSender(bus, lambda token: f"{inbox}.{token}", timeout_s=_PART_TIMEOUT_S, tries=2)
        self.receiver = PartsReceiver(
            bus,
            lambda sender, upload_id: names.router_upload(router_id, upload_id),
            UploadLimits(limits.MAX_INTERNAL_BYTES, max_upload_bytes, max_upload_bytes),
            lambda part: names.is_received(part.reply) or self.is_router(part.reply),
        )

    def __repr__(self) -> str:
        return f"<WorkerClient {self.sender!r} {self.receiver!r}>"

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

        Raises NoRespondersError, TimeoutError, PayloadTooLargeError and ConnectionError like `Bus.request`, and
        RequestError(internal) for a reply that can't be decoded, such as one from another version of Tokenbus."""
        return await self.send(card, op, await self.stage(card, op, message, headers), timeout_s)

    async def stage(self, card: messages.Card, op: Operation[ReplyT], message: Message, headers: Headers) -> Outgoing:
        """Prepares a message for `send`, sending a large one except for its last part. Raises what `PartsSender.stage`
        does; the worker then does not have the message."""
        subject = self._names.worker(card.model, card.worker_id, op.name)
        return await self.sender.stage(Outgoing(subject, codec.encode(message), headers=headers))

    async def send(self, card: messages.Card, op: Operation[ReplyT], staged: Outgoing, timeout_s: float) -> ReplyT:
        """Sends a message that `stage` has prepared, and returns the reply like `call`."""
        reply = await self.request(staged, timeout_s)
        try:
            return op.replies.decode(reply.data)
        except errors.RequestError as problem:
            raise invalid_reply(card.worker_id, str(problem)) from problem

    async def request(self, staged: Outgoing, timeout_s: float) -> Msg:
        """Sends what the sender has staged, and returns the whole reply. Raises what `Bus.request` does, and
        RequestError for a large reply that can't be taken."""
        reply = await self._bus.request(staged.subject, staged.payload, timeout_s, staged.headers)
        return await self.receiver.whole(reply, "reply", timeout_s)


def invalid_reply(worker_id: str, problem: str) -> errors.RequestError:
    """Logs a worker's unusable reply, and returns the error for the request: the client is not to blame."""
    structlog.get_logger().error("worker_reply_refused", worker_id=worker_id, error=problem)
    return errors.request_error(errors.Code.INTERNAL, f"worker {worker_id} sent an invalid reply")
