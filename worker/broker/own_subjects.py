"""Hears all services of one worker over one subscription: brokers keep each subscription of each worker in memory."""

import contextlib

from nats.aio.msg import Msg

from tokenbus.protocol.bus.bus import NO_RESPONDERS, Bus, Callback, OutboundBufferLimitError
from tokenbus.protocol.wire import subjects


class OwnSubjects:
    """The subjects `worker.<model>.<worker>.<service>` of one worker."""

    def __init__(self, incoming: Bus, names: subjects.Subjects, model: str, worker_id: str) -> None:
        self._incoming = incoming
        self._all = names.worker(model, worker_id, "*")
        self._services: dict[str, Callback] = {}

    def __repr__(self) -> str:
        return f"<OwnSubjects {self._all}: {', '.join(self._services)}>"

    def serve(self, service: str, callback: Callback) -> None:
        """Calls `callback` with the messages to a service, from `open` on."""
        assert service not in self._services, service
        self._services[service] = callback

    async def open(self) -> None:
        """Subscribes."""
        await self._incoming.subscribe(self._all, self._take)

    def _take(self, message: Msg) -> None:
        callback = self._services.get(message.subject.rpartition(".")[2])
        if callback is not None:
            callback(message)
        elif message.reply:  # a service that only later versions have: what a broker says of a subject without listener
            with contextlib.suppress(OutboundBufferLimitError, ConnectionError):
                self._incoming.publish(message.reply, b"", headers=NO_RESPONDERS)
