"""Counts the outcomes of one run's requests: chunks and times in, numbers out.

Times are seconds of one monotonic clock. They start when a request was due, not when it was sent: if a busy sender is
late, its users wait for the sender too. Without this, an overloaded sender would hide the system's latency.

Chunks received at the same time are one *arrival*: a client sees them at once, whether their tokens came in one message
or in several that it read together.
"""

from collections import Counter

from tokenbus.protocol.wire import errors, messages
from tokenbus.replay.load.histogram import LatencyHistogram

TIMES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "accept_ms", "queue_ms", "late_ms")
_MAX_WORKERS = 1_024
"""Workers that are counted separately; requests of all others are counted together."""
OTHERS = "others"


class RunStats:
    """Counters and histograms of one run. `start_request` returns a timer, which receives the request's chunks."""

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self.last_at = began_at
        """When the last chunk arrived."""
        self.times = {name: LatencyHistogram() for name in TIMES}
        self.finish_reasons: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        """The first message of each error code."""
        self.workers: Counter[str] = Counter()
        self.sent = 0
        self.not_sent = 0
        self.peak_in_flight = 0
        self.output_tokens = 0
        self.arrivals = 0
        """Times at which a request's tokens arrived, one token or several."""
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def __repr__(self) -> str:
        return f"<RunStats of {self.sent} requests, {self.in_flight} in flight, {self.failed} failed>"

    @property
    def ended(self) -> int:
        return self.finish_reasons.total()

    @property
    def in_flight(self) -> int:
        return self.sent - self.ended

    @property
    def failed(self) -> int:
        return self.finish_reasons[messages.FinishReason.ERROR]

    @property
    def finished(self) -> int:
        """Requests that ended neither in an error nor cancelled."""
        return self.ended - self.failed - self.finish_reasons[messages.FinishReason.CANCELLED]

    def start_request(self, due_at: float, now: float) -> "RequestTimer":
        """Counts a request that is being sent."""
        self.sent += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        self.times["late_ms"].add((now - due_at) * 1e3)
        return RequestTimer(self, due_at)

    def record_terminal(self, terminal: messages.Chunk) -> None:
        """Counts a request that has ended."""
        assert terminal.finish_reason is not None
        self.finish_reasons[terminal.finish_reason] += 1
        if terminal.error:
            self.errors[terminal.error.code] += 1
            self.examples.setdefault(terminal.error.code, terminal.error.message)
        if isinstance(terminal.worker_id, str):
            known = terminal.worker_id in self.workers or len(self.workers) < _MAX_WORKERS
            self.workers[terminal.worker_id if known else OTHERS] += 1
        if terminal.usage:
            self.prompt_tokens += terminal.usage.prompt_tokens
            self.cached_tokens += terminal.usage.cached_tokens
        if terminal.timings:
            self.times["queue_ms"].add(terminal.timings.queue_ms)


class RequestTimer:
    """Times one request as its sender sees it."""

    def __init__(self, stats: RunStats, due_at: float) -> None:
        self._stats = stats
        self._due_at = due_at
        self._is_accepted = False
        self._first_at: float | None = None
        self._last_token_at = due_at
        self._num_tokens = 0

    def receive(self, chunk: messages.Chunk, now: float) -> None:
        """Records a chunk."""
        self._stats.last_at = now
        if not self._is_accepted and isinstance(chunk.worker_id, str):
            self._is_accepted = True
            self._add("accept_ms", now)
        if chunk.tokens:
            self._receive_tokens(chunk.tokens, now)
        if chunk.finish_reason is not None:
            self._end(chunk, now)

    def _receive_tokens(self, tokens: int, now: float) -> None:
        stats = self._stats
        stats.output_tokens += tokens
        self._num_tokens += tokens
        if self._first_at is None:
            self._first_at = now
            self._add("ttft_ms", now)
        elif now == self._last_token_at:
            return
        else:
            stats.times["itl_ms"].add((now - self._last_token_at) * 1e3)
        stats.arrivals += 1
        self._last_token_at = now

    def _end(self, terminal: messages.Chunk, now: float) -> None:
        if terminal.finish_reason not in (messages.FinishReason.ERROR, messages.FinishReason.CANCELLED):
            self._add("e2e_ms", now)
            if self._first_at is not None and self._last_token_at > self._first_at:
                generating_s = self._last_token_at - self._first_at
                self._stats.times["tpot_ms"].add(generating_s / (self._num_tokens - 1) * 1e3)
        self._stats.record_terminal(terminal)

    def _add(self, name: str, now: float) -> None:
        self._stats.times[name].add((now - self._due_at) * 1e3)


def retry_delay_s(error: errors.Error) -> float:
    """Returns how long a closed loop's client pauses after an error: as long as the error says, within bounds."""
    return min(max((error.retry_after_ms or 0.0) / 1e3, 0.1), 1.0)
