"""Reports connections that the gateway closes: an API error to the client, a count, and now and then a log line."""

import time
from collections import Counter
from collections.abc import Callable

import structlog

from tokenbus.gateway.metrics import GatewayMetrics
from tokenbus.gateway.openai.error_responses import ErrorResponse
from tokenbus.protocol.http.refusals import Headers, Reason, Refusal

_LOG_INTERVAL_S = 10.0
_RETRY_AFTER_MS = 1_000.0


class ClosedConnections:
    """Counts closed connections, and logs them at most every ten seconds for each reason."""

    def __init__(self, metrics: GatewayMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._closed = {reason: metrics.closed.labels(reason) for reason in Reason}
        self._clock = clock
        self._unlogged: Counter[Reason] = Counter()
        self._logged_at: dict[Reason, float] = {}

    def __repr__(self) -> str:
        return f"<ClosedConnections, {self._unlogged.total()} not logged>"

    def record(self, reason: Reason, address: str) -> None:
        """Counts a connection. Not each one is logged, since strangers can open thousands."""
        self._closed[reason].inc()
        self._unlogged[reason] += 1
        now = self._clock()
        if now - self._logged_at.get(reason, -_LOG_INTERVAL_S) >= _LOG_INTERVAL_S:
            self._logged_at[reason] = now
            count = self._unlogged.pop(reason)
            structlog.get_logger().warning("connections_closed", reason=reason, address=address, count=count)


def refusal_response(refusal: Refusal) -> tuple[Headers, bytes]:
    """Returns headers and body of a refusal, in the form of an API error."""
    is_full = refusal.status in (429, 503)
    response = ErrorResponse(
        refusal.status,
        refusal.code,
        refusal.message,
        retryable=is_full or refusal.status == 408,
        retry_after_ms=_RETRY_AFTER_MS if is_full else None,
    )
    headers = {"content-type": "application/json"} | response.headers
    return [(name.encode(), value.encode()) for name, value in headers.items()], response.body
