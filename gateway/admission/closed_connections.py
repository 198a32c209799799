"""Reports connections closed by the gateway: a count, and an occasional log line."""

import time
from collections import Counter
from collections.abc import Callable

import structlog

from tokenbus.gateway.admission.metrics import GatewayMetrics
from tokenbus.protocol.http.refusals import Reason

_LOG_INTERVAL_S = 10.0


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
        """Counts a connection. Not every one is logged, since strangers can open thousands."""
        self._closed[reason].inc()
        self._unlogged[reason] += 1
        now = self._clock()
        if now - self._logged_at.get(reason, -_LOG_INTERVAL_S) >= _LOG_INTERVAL_S:
            self._logged_at[reason] = now
            count = self._unlogged.pop(reason)
            structlog.get_logger().warning("connections_closed", reason=reason, address=address, count=count)
