"""Decides how long a client waits for its stream, and what it does then: the silence rule of the wire; pure."""

import enum

MAX_FIRST_SILENCE_S = 3.0
"""Before the first message of a stream."""
MAX_SILENCE_S = 10.0
"""After it, and all along where only a terminal is wanted."""
RESYNC_TIMEOUT_S = 1.0
"""The holder of a stream answers a resync within this time."""
MAX_RESYNCS = 2
"""Resyncs in a row that nobody has answered; then nobody holds the stream."""
RESYNC_INTERVAL_S = 0.25
"""A little longer than the pause after which a holder publishes a stream again."""
MAX_GAP_S = 10.0
"""A gap that is not filled after so long never will be."""


class Action(enum.Enum):
    WAIT = "wait"
    RESYNC = "resync"
    LOST = "lost"


class ResyncTimer:
    """With one stream. Times are seconds of one monotonic clock.

    quiet --silence, gap, doubt--> RESYNC --found or message--> quiet
                                    |--1 s--> RESYNC again --1 s--> LOST
    """

    def __init__(self, now: float, *, streamed: bool) -> None:
        self._resync_at = now + (MAX_FIRST_SILENCE_S if streamed else MAX_SILENCE_S)
        self._num_resyncs = 0
        self._resync_sent_at = -RESYNC_INTERVAL_S
        self._gap_since: float | None = None

    def __repr__(self) -> str:
        return f"<ResyncTimer asked {self._num_resyncs} times{' with a gap' if self._gap_since is not None else ''}>"

    def chunk_received(self, now: float) -> None:
        """Something came that is in order."""
        self._num_resyncs = 0
        self._gap_since = None
        self._resync_at = now + MAX_SILENCE_S

    def gap_found(self, now: float) -> None:
        """Something came that shows a gap."""
        self._num_resyncs = 0
        if self._gap_since is None:
            self._gap_since = now
        self._resync_at = max(now, self._resync_sent_at + RESYNC_INTERVAL_S)

    def resync_answered(self, now: float) -> None:
        """Somebody holds the stream; only the first answer to a question counts."""
        if self._num_resyncs == 0:
            return
        self._num_resyncs = 0
        self._resync_at = now + (MAX_SILENCE_S if self._gap_since is None else RESYNC_INTERVAL_S)

    def resync_soon(self, now: float) -> None:
        """Something may have been missed."""
        self._resync_at = min(self._resync_at, max(now, self._resync_sent_at + RESYNC_INTERVAL_S))

    def extend(self, gap_s: float) -> None:
        """The client itself stood still for so long."""
        self._resync_at += gap_s

    def poll(self, now: float) -> Action:
        """What to do now; an RESYNC is noted as done."""
        if now < self._resync_at:
            return Action.WAIT
        if self._num_resyncs >= MAX_RESYNCS or (self._gap_since is not None and now - self._gap_since >= MAX_GAP_S):
            return Action.LOST
        self._num_resyncs += 1
        self._resync_sent_at = now
        self._resync_at = now + RESYNC_TIMEOUT_S
        return Action.RESYNC
