"""Decides when a client requests that its stream be published again, and when it gives up on the stream.

quiet --silence, gap, reconnect--> RESYNC --answer or chunk--> quiet
                                    |--1 s--> RESYNC again --1 s--> LOST
                                    |--no listener--> RESYNC again after 0.5 s, at most six times in a row

A resync has no listener while there is no router and the stream's worker has not noticed that yet.

An answer that no chunk follows proves little: anyone might have sent it. After several of these the stream is lost.
"""

import enum

MAX_FIRST_SILENCE_S = 3.0
"""Silence before a stream's first message after which the client sends a resync."""
MAX_SILENCE_S = 10.0
"""The same after the first message, and throughout if only a terminal is wanted."""
RESYNC_TIMEOUT_S = 1.0
"""A process that holds a stream answers a resync within this time."""
MAX_RESYNCS = 2
"""If this many resyncs in a row are unanswered, no process holds the stream."""
RESYNC_INTERVAL_S = 0.25
"""Slightly longer than `limits.REPLAY_INTERVAL_S`, so that each resync is carried out."""
UNHEARD_RETRY_S = 0.5
MAX_UNHEARD_RESYNCS = 6
"""After this many resyncs without a listener, the next ones count as unanswered."""
MAX_FRUITLESS_RESYNCS = 3
"""After this many answers in a row without a chunk, the answering process does not hold the stream: a holder sends at
least an empty chunk every 5 s."""
MAX_GAP_S = 10.0
"""A gap that is not filled within this time never will be."""


class Action(enum.Enum):
    WAIT = "wait"
    RESYNC = "resync"
    LOST = "lost"


class ResyncTimer:
    """The timer of one stream. Times are seconds of one monotonic clock."""

    def __init__(self, now: float, *, streamed: bool) -> None:
        self._resync_at = now + (MAX_FIRST_SILENCE_S if streamed else MAX_SILENCE_S)
        self._num_resyncs = 0
        """Resyncs sent since the last sign of life."""
        self._num_unheard = 0
        """Those of them that had no listener; they do not count among the others."""
        self._resync_sent_at = -RESYNC_INTERVAL_S
        self._gap_since: float | None = None
        self._streamed = streamed
        self._num_fruitless = 0
        """Resyncs answered since the last chunk, while nothing was known to be missing."""

    def __repr__(self) -> str:
        return f"<ResyncTimer, {self._num_resyncs} resyncs{', gap' if self._gap_since is not None else ''}>"

    def chunk_received(self, now: float) -> None:
        """Records a chunk that continues the stream."""
        self._num_resyncs = self._num_unheard = self._num_fruitless = 0
        self._gap_since = None
        self._resync_at = now + MAX_SILENCE_S

    def gap_found(self, now: float) -> None:
        """Records a chunk that follows a gap."""
        self._num_resyncs = self._num_unheard = 0
        if self._gap_since is None:
            self._gap_since = now
        # Every chunk after the gap calls this: not each of them may send a resync.
        self._resync_at = max(now, self._resync_sent_at + RESYNC_INTERVAL_S)

    def resync_answered(self, now: float) -> None:
        """Records that some process holds the stream. Only the first answer to a resync counts."""
        if self._num_resyncs == 0:
            return
        self._num_resyncs = self._num_unheard = 0
        if self._gap_since is not None:
            self._resync_at = now + RESYNC_INTERVAL_S
            return
        self._resync_at = now + MAX_SILENCE_S
        self._num_fruitless += self._streamed  # an unstreamed answer arrives only when complete

    def resync_unheard(self, now: float) -> None:
        """Records that nothing listened to the last resync."""
        if self._num_resyncs and self._num_unheard < MAX_UNHEARD_RESYNCS:
            self._num_unheard += 1
            self._num_resyncs -= 1
            self._resync_at = now + UNHEARD_RETRY_S

    def resync_soon(self, now: float) -> None:
        """Brings the next resync forward because something may have been missed."""
        self._resync_at = min(self._resync_at, max(now, self._resync_sent_at + RESYNC_INTERVAL_S))

    def extend(self, pause_s: float) -> None:
        """Extends the wait by the time for which the client itself was blocked."""
        self._resync_at += pause_s

    def poll(self, now: float) -> Action:
        """Returns what to do now; counts a RESYNC as sent."""
        if now < self._resync_at:
            return Action.WAIT
        is_fruitless = self._num_fruitless >= MAX_FRUITLESS_RESYNCS
        is_gap_too_old = self._gap_since is not None and now - self._gap_since >= MAX_GAP_S
        if self._num_resyncs >= MAX_RESYNCS or is_gap_too_old or is_fruitless:
            return Action.LOST
        self._num_resyncs += 1
        self._resync_sent_at = now
        self._resync_at = now + RESYNC_TIMEOUT_S
        return Action.RESYNC
