"""Sends replies that no client would request again: those that find the outbound buffer full are retried later."""

import asyncio
from collections import deque
from typing import NamedTuple

import structlog

from tokenbus.protocol.bus.bus import Bus, OutboundBufferLimitError
from tokenbus.protocol.wire import limits

MAX_PENDING_BYTES = 32 * 1024 * 1024
"""Bytes of replies that may wait here, besides those queued in the connection."""


class _Reply(NamedTuple):
    subject: str
    payload: bytes
    headers: dict[str, str] | None


class ReplySender:
    """Sends the replies of one process, in no particular order."""

    def __init__(self, bus: Bus, max_pending_bytes: int = MAX_PENDING_BYTES) -> None:
        self._bus = bus
        self._max_pending_bytes = max_pending_bytes
        self._pending: deque[_Reply] = deque()
        self._pending_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<ReplySender, {len(self._pending)} pending>"

    def send(self, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> None:
        """Publishes a reply now or soon. Raises PayloadTooLargeError; ConnectionError once the bus is closed.

        A reply may overtake others that wait, so don't use this where order matters."""
        try:
            self._bus.publish(subject, payload, headers=headers)
        except OutboundBufferLimitError as error:
            if self._pending_bytes + len(payload) > self._max_pending_bytes:
                self._log.error("reply_not_sent", subject=subject, error=str(error))
                return
            self._pending.append(_Reply(subject, payload, headers))
            self._pending_bytes += len(payload)
            self._start_timer()

    def send_pending(self) -> None:
        """Publishes as many waiting replies as the outbound buffer takes."""
        while self._pending:
            reply = self._pending[0]  # stays in the queue until it is published
            try:
                self._bus.publish(reply.subject, reply.payload, headers=reply.headers)
            except OutboundBufferLimitError:
                return
            except ConnectionError:  # closed: they can never be delivered
                self._pending.clear()
                self._pending_bytes = 0
                return
            self._pending.popleft()
            self._pending_bytes -= len(reply.payload)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(limits.TICK_S, self._retry)

    def _retry(self) -> None:
        self._timer = None
        self.send_pending()
        if self._pending:
            self._start_timer()
