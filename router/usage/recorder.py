"""Turns the ends of a router's requests into counts and metrics."""

from collections.abc import Callable

from tokenbus.protocol.access.usage import Counts, UsageKind
from tokenbus.protocol.wire import errors
from tokenbus.router.requests.flights.ends import RequestEnd
from tokenbus.router.telemetry.metrics import RouterMetrics
from tokenbus.router.usage.writer import UsageWriter

_HINTS = "cache"
"""The operation of hints, which use nothing."""
_NOT_OF_KEY = (errors.Code.UNAUTHORIZED, errors.Code.KEYS_UNAVAILABLE)
"""The errors of requests that only claim to have a key's id."""
_PAID = (None, errors.Code.CANCELLED, errors.Code.DEADLINE_EXCEEDED)
"""The errors of requests whose tokens count: a client has ended them, or has set their time. One that the system could
not complete counts as a request and an error; its client continues a lost stream as another request, which counts all
tokens."""


class UsageRecorder:
    """Counts for one router."""

    def __init__(self, writer: UsageWriter, metrics: RouterMetrics, is_known: Callable[[str], bool]) -> None:
        """`is_known` says whether a model is or was served: clients can make up any number of others."""
        self._writer = writer
        writer.on_failure = metrics.usage_failures.inc
        self._metrics = metrics
        self._is_known = is_known

    def __repr__(self) -> str:
        return f"<UsageRecorder {self._writer!r}>"

    def record(self, end: RequestEnd) -> None:
        """Counts a request that has ended now."""
        if end.operation == _HINTS or end.code in _NOT_OF_KEY:
            return
        counts = counts_of(end)
        tenant, model = end.address.tenant, end.address.model
        kind = UsageKind(end.operation, "+".join(sorted(end.adapters)))
        self._writer.count(tenant, end.address.key_id, model if self._is_known(model) else "", kind, counts)
        self._metrics.tenant_requests.labels(tenant).inc()
        for name, number in (
            ("prompt", counts.prompt_tokens - counts.cached_tokens),
            ("cached", counts.cached_tokens),
            ("completion", counts.completion_tokens),
        ):
            if number:
                self._metrics.tenant_tokens.labels(tenant, name).inc(number)

    @property
    def unsaved_s(self) -> float:
        """Time for which the oldest usage has not been saved."""
        return self._writer.unsaved_s()

    @property
    def problem(self) -> str:
        """Why usage can't be saved; empty if it can."""
        return self._writer.problem

    def show(self) -> None:
        """Brings the gauges up to date."""
        self._metrics.usage_counters.set(len(self._writer.counters))
        self._metrics.usage_unsaved.set(self.unsaved_s)


def counts_of(end: RequestEnd) -> Counts:
    """Returns what one request adds to the sums."""
    counts = Counts(requests=1, errors={str(end.code): 1} if end.code is not None else {})
    if end.code in _PAID:
        counts.prompt_tokens, counts.completion_tokens = end.prompt_tokens, end.completion_tokens
        counts.cached_tokens = min(end.cached_tokens, end.prompt_tokens)
    return counts
