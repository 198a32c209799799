"""The large messages between this router and workers or other routers, which are sent in parts."""

from nats.aio.msg import Msg

from tokenbus.protocol.bus.bus import Bus, Outgoing
from tokenbus.protocol.parts.assembly import UploadLimits
from tokenbus.protocol.parts.receiver import PartsReceiver
from tokenbus.protocol.parts.sender import PartsSender
from tokenbus.protocol.wire import limits, subjects

_TIMEOUT_S = 1.0
"""A worker that twice fails to answer a part of a run within this time is given up for another one."""


class InternalParts:
    """A router's sending and receiving end."""

    def __init__(self, bus: Bus, names: subjects.Subjects, router_id: str, max_bytes: int) -> None:
        """`max_bytes` bounds the memory for messages that are not complete."""
        self._bus = bus
        self._inbox = bus.new_inbox()
        self._names = names
        self._sender = PartsSender(bus, lambda token: f"{self._inbox}.{token}", timeout_s=_TIMEOUT_S, tries=2)
        self.receiver = PartsReceiver(
            bus,
            lambda sender, upload_id: names.router_upload(router_id, upload_id),
            UploadLimits(limits.MAX_INTERNAL_BYTES, max_bytes, max_bytes),
            lambda part: names.is_received(part.reply) or self.is_router(part.reply),
        )

    def __repr__(self) -> str:
        return f"<InternalParts {self._sender!r} {self.receiver!r}>"

    def is_router(self, reply: str) -> bool:
        """Whether a reply subject is a router's: they all have the same prefix."""
        return reply.startswith(self._inbox.partition(".")[0] + ".")

    async def stage(self, message: Outgoing) -> Outgoing:
        """Sends a large message except its last part, which it returns; raises what `PartsSender.stage` does."""
        return await self._sender.stage(message)

    async def request(self, staged: Outgoing, timeout_s: float) -> Msg:
        """Sends what `stage` has returned, and returns the whole reply. Raises what `Bus.request` does, and
        RequestError for a large reply that can't be taken."""
        reply = await self._bus.request(staged.subject, staged.payload, timeout_s, staged.headers)
        return await self.receiver.whole(reply, "reply", timeout_s)
