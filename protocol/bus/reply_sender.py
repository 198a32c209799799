"""Sends answers that nobody would ask for again: what the connection is too busy for now is sent a little later."""

import asyncio
from collections import deque
from typing import NamedTuple

import structlog

from tokenbus.protocol.bus.bus import Bus, OutboundBufferLimitError
from tokenbus.protocol.wire import limits

MAX_PENDING_BYTES = 32 * 1024 * 1024
"""As much again as may wait in the connection."""


class _Reply(NamedTuple):
    subject: str
    payload: bytes
    headers: dict[str, str] | None


class ReplySender:
    """The answers of one process. Those that the bus is too busy for wait here, and are tried again every tick."""

    def __init__(self, bus: Bus, max_pending_bytes: int = MAX_PENDING_BYTES) -> None:
        self._bus = bus
        self._max_pending_bytes = max_pending_bytes
        self._pending: deque[_Reply] = deque()
        self._pending_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<ReplySender, {len(self._pending)} kept>"

    def send(self, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> None:
        """Publishes an answer now or soon. Raises PayloadTooLargeError; ConnectionError once the bus is closed.

        An answer may overtake others that wait, so nothing is sent this way whose order matters."""
        try:
            self._bus.publish(subject, payload, headers=headers)
        except OutboundBufferLimitError as error:
            self._enqueue(_Reply(subject, payload, headers), error)

    def send_pending(self) -> None:
        """Sends what waits, as far as the bus takes it."""
        while self._pending:
            reply = self._pending[0]
            try:
                self._bus.publish(reply.subject, reply.payload, headers=reply.headers)
            except OutboundBufferLimitError:
                return
            except ConnectionError:
                self._pending.clear()
                self._pending_bytes = 0
                return
            self._pending.popleft()
            self._pending_bytes -= len(reply.payload)

    def _enqueue(self, reply: _Reply, why: OutboundBufferLimitError) -> None:
        if self._pending_bytes + len(reply.payload) > self._max_pending_bytes:
            self._log.error("reply_not_sent", subject=reply.subject, error=str(why))
            return
        self._pending.append(reply)
        self._pending_bytes += len(reply.payload)
        self._try_later()

    def _try_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(limits.TICK_S, self._try_again)

    def _try_again(self) -> None:
        self._timer = None
        self.send_pending()
        if self._pending:
            self._try_later()
