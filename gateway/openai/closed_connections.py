"""What becomes of connections that the gateway ends: an error as the API has them, a count, and seldom a line."""

import time
from collections import Counter
from collections.abc import Callable

import structlog

from tokenbus.gateway.metrics import GatewayMetrics
from tokenbus.gateway.openai.error_responses import ErrorResponse
from tokenbus.protocol.http.refusals import Headers, Reason, Refusal

_LINE_EVERY_S = 10.0
_TRY_AGAIN_MS = 1_000.0


class ClosedConnections:
    """Of one gateway."""

    def __init__(self, metrics: GatewayMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._ended = {reason: metrics.closed.labels(reason) for reason in Reason}
        self._clock = clock
        self._unlogged: Counter[Reason] = Counter()
        self._logged_at: dict[Reason, float] = {}

    def __repr__(self) -> str:
        return f"<Refusals, {self._unlogged.total()} unsaid>"

    def record(self, reason: Reason, address: str) -> None:
        """Counts one, and says so where nothing was said of that reason for a while: strangers can make thousands."""
        self._ended[reason].inc()
        self._unlogged[reason] += 1
        now = self._clock()
        if now - self._logged_at.get(reason, -_LINE_EVERY_S) >= _LINE_EVERY_S:
            self._logged_at[reason] = now
            count = self._unlogged.pop(reason)
            structlog.get_logger().warning("connections_closed", reason=reason, address=address, count=count)


def refusal_response(refusal: Refusal) -> tuple[Headers, bytes]:
    """Headers and body of an answer that no request of the application has."""
    is_full = refusal.status in (429, 503)
    response = ErrorResponse(
        refusal.status,
        refusal.code,
        refusal.message,
        retryable=is_full or refusal.status == 408,
        retry_after_ms=_TRY_AGAIN_MS if is_full else None,
    )
    headers = {"content-type": "application/json"} | response.headers
    return [(name.encode(), value.encode()) for name, value in headers.items()], response.body
