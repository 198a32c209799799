"""Decides how long a client waits for its stream, and what it does then: the silence rule of the wire; pure."""

import enum

FIRST_SILENCE_S = 3.0
"""Before the first message of a stream."""
SILENCE_S = 10.0
"""After it, and all along where only a terminal is wanted."""
ANSWER_S = 1.0
"""The holder of a stream answers a resync within this time."""
MAX_ASKS = 2
"""Resyncs in a row that nobody has answered; then nobody holds the stream."""
ASK_EVERY_S = 0.25
"""A little longer than the pause after which a holder publishes a stream again."""
GAP_S = 10.0
"""A gap that is not filled after so long never will be."""


class Step(enum.Enum):
    WAIT = "wait"
    ASK = "ask"
    LOST = "lost"


class Patience:
    """With one stream. Times are seconds of one monotonic clock.

    quiet --silence, gap, doubt--> ASK --found or message--> quiet
                                    |--1 s--> ASK again --1 s--> LOST
    """

    def __init__(self, now: float, *, streamed: bool) -> None:
        self._ask_at = now + (FIRST_SILENCE_S if streamed else SILENCE_S)
        self._num_asks = 0
        self._asked_at = -ASK_EVERY_S
        self._gap_since: float | None = None

    def __repr__(self) -> str:
        return f"<Patience asked {self._num_asks} times{' with a gap' if self._gap_since is not None else ''}>"

    def heard(self, now: float) -> None:
        """Something came that is in order."""
        self._num_asks = 0
        self._gap_since = None
        self._ask_at = now + SILENCE_S

    def missing(self, now: float) -> None:
        """Something came that shows a gap."""
        self._num_asks = 0
        if self._gap_since is None:
            self._gap_since = now
        self._ask_at = max(now, self._asked_at + ASK_EVERY_S)

    def found(self, now: float) -> None:
        """Somebody holds the stream; only the first answer to a question counts."""
        if self._num_asks == 0:
            return
        self._num_asks = 0
        self._ask_at = now + (SILENCE_S if self._gap_since is None else ASK_EVERY_S)

    def doubt(self, now: float) -> None:
        """Something may have been missed."""
        self._ask_at = min(self._ask_at, max(now, self._asked_at + ASK_EVERY_S))

    def forgive(self, gap_s: float) -> None:
        """The client itself stood still for so long."""
        self._ask_at += gap_s

    def next(self, now: float) -> Step:
        """What to do now; an ASK is noted as done."""
        if now < self._ask_at:
            return Step.WAIT
        if self._num_asks >= MAX_ASKS or (self._gap_since is not None and now - self._gap_since >= GAP_S):
            return Step.LOST
        self._num_asks += 1
        self._asked_at = now
        self._ask_at = now + ANSWER_S
        return Step.ASK
