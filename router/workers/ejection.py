"""Decides when a worker whose requests fail is given none for a while.

A worker that fails within milliseconds looks idle, so it would attract all requests. After several failures in a row it
is *ejected*: it gets requests only if no other worker can take them. After a pause it is given some again on trial. The
first failure then ejects it for twice as long, and the first success clears its record.

    admitted --5 failures in a row--> ejected --pause--> on trial --failure--> ejected, twice as long
        ^                                |                   |
        +-----------success--------------+-----success-------+
"""

MAX_FAILURES = 5
"""After this many requests in a row that ended in a retryable error, a worker is ejected."""
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0


class Ejection:
    """The failures of one worker. Times are seconds of one monotonic clock."""

    __slots__ = ("_num_ejections", "_num_failures", "until")

    def __init__(self) -> None:
        self.until = 0.0
        """The end of the current or last pause; 0 if there has been none since the last success."""
        self._num_failures = 0
        """Failures in a row since the last success or ejection."""
        self._num_ejections = 0
        """Ejections since the last success."""

    def __repr__(self) -> str:
        return f"<Ejection until {self.until:.1f}, {self._num_failures} failures>"

    def is_ejected(self, now: float) -> bool:
        return now < self.until

    def succeeded(self) -> None:
        """Records that a request has ended in anything but a retryable error."""
        self.until, self._num_failures, self._num_ejections = 0.0, 0, 0

    def failed(self, now: float, *, may_eject: bool) -> bool:
        """Records that a request has ended in a retryable error; returns whether this ejects the worker."""
        self._num_failures += 1
        limit = 1 if self._num_ejections else MAX_FAILURES
        if not may_eject or self.is_ejected(now) or self._num_failures < limit:
            return False
        self.until = now + min(FIRST_PAUSE_S * 2**self._num_ejections, LONGEST_PAUSE_S)
        self._num_ejections += 1
        self._num_failures = 0
        return True
