"""A bus that keeps what is published instead of sending it."""

import math
from collections.abc import Sequence

from tokenbus.protocol.bus.bus import OutboundBufferLimitError, Outgoing


class RecordingBus:
    """The part of a bus that publishes."""

    def __init__(self, max_payload: int = 1_000_000) -> None:
        self.max_payload = max_payload
        self.num_writes = 0
        self.network = self.broker_id = "broker"
        self.confirmed_at = 0.0
        self.last_received_at = 0.0
        self.reconnected_at = -math.inf
        self.is_busy = False
        """Whether the outbound buffer counts as full."""
        self.is_closed = False
        self.batches: list[list[Outgoing]] = []
        """Messages that were published together."""

    def publish(self, subject: str, payload: bytes, reply: str = "", headers: dict[str, str] | None = None) -> None:
        self.publish_all([Outgoing(subject, payload, reply, headers)])

    def publish_all(self, messages: Sequence[Outgoing]) -> None:
        if self.is_closed:
            raise ConnectionError("closed")
        if self.is_busy:
            raise OutboundBufferLimitError("too much is waiting")
        self.batches.append(list(messages))

    def take(self) -> list[Outgoing]:
        """Returns what was published, and forgets it."""
        return [message for batch in self.take_batches() for message in batch]

    def take_batches(self) -> list[list[Outgoing]]:
        """Does the same for messages that were published together."""
        batches, self.batches = self.batches, []
        return batches
