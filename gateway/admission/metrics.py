"""Every metric of a gateway, and the log of connections that it closes."""

import time
from collections import Counter as Tally
from collections.abc import Callable

import structlog

from tokenbus.protocol.access.audit_log import LOST, STORED
from tokenbus.protocol.access.key_ring import KeyProblem
from tokenbus.protocol.http.http_server import Disconnect
from tokenbus.protocol.http.refusals import Reason
from tokenbus.protocol.telemetry.metrics import REQUEST_BUCKETS, TTFT_BUCKETS, Counter, Gauge, Histogram, MetricFamilies

_P = "tokenbus_gateway"
_LOG_INTERVAL_S = 10.0


class GatewayMetrics(MetricFamilies):
    """Counts requests and connections; requests for model lists and health are not counted."""

    def __init__(self) -> None:
        self.finished = Counter(
            f"{_P}_requests", "Requests that have ended, by path and HTTP status.", ("endpoint", "status")
        )
        self.disconnects = Counter(
            f"{_P}_client_disconnects",
            "Requests whose client was lost before they ended: it has closed its connection (gone), or nothing "
            "could be written to it until the write deadline (slow).",
            ("reason",),
        )
        self.resubmitted = Counter(
            f"{_P}_requests_resubmitted",
            "Completions that the gateway resubmitted, continuing after the tokens it had, because their worker "
            "was lost or no process held them any more.",
        )
        self.open = Gauge(f"{_P}_requests_open", "Requests that are open.")
        self.bucket_copies_missing = Gauge(
            f"{_P}_bucket_copies_missing", "Copies of a bucket that the cluster of brokers does not keep.", ("bucket",)
        )
        self.console_viewers = Gauge(f"{_P}_console_viewers", "Open pages of the console.")
        self.connections = Gauge(f"{_P}_connections", "Open connections: busy with a request, or idle.", ("state",))
        self.closed = Counter(
            f"{_P}_connections_closed", "Connections that the gateway has closed, by reason.", ("reason",)
        )
        self.prompt_tokens = Counter(f"{_P}_prompt_tokens", "Prompt tokens of all requests.")
        self.completion_tokens = Counter(f"{_P}_completion_tokens", "Generated tokens of all requests.")
        self.ttft = Histogram(
            f"{_P}_time_to_first_token_seconds", "Time from the request to the first token.", (), TTFT_BUCKETS
        )
        self.e2e = Histogram(
            f"{_P}_e2e_request_latency_seconds",
            "Time from the request to its end, by path.",
            ("endpoint",),
            REQUEST_BUCKETS,
        )
        self.stored = Counter(
            f"{_P}_stored_responses",
            "Stored responses that were written, read or deleted: ok, missing, too_large or failed.",
            ("operation", "outcome"),
        )
        self.keys = Gauge(f"{_P}_keys", "API keys of the fleet that the gateway knows.")
        self.keys_silent = Gauge(
            f"{_P}_keys_silent_seconds", "Time since the store of keys was last known to be read completely."
        )
        self.keys_refused = Counter(
            f"{_P}_keys_refused",
            "Requests refused for their API key: invalid, not_valid_now (revoked, expired or not valid yet), "
            "unavailable (the store of keys is), forbidden (its role makes no requests).",
            ("reason",),
        )
        self.audit_records = Counter(
            f"{_P}_audit_records", "Records for the audit log, by outcome: stored or lost.", ("outcome",)
        )
        for outcome in (STORED, LOST):
            self.audit_records.labels(outcome)
        for problem in (*KeyProblem, "forbidden"):
            self.keys_refused.labels(problem)
        for reason in Disconnect:  # export 0, or the first increase of each would be missed
            self.disconnects.labels(reason)
        for operation in ("write", "read", "delete"):
            for outcome in ("ok", "failed"):
                self.stored.labels(operation, outcome)

    def update_gauges(self, num_requests: int, num_connections: int, num_idle: int) -> None:
        """Sets the gauges for a scrape."""
        self.open.set(num_requests)
        self.connections.labels("busy").set(num_connections - num_idle)
        self.connections.labels("idle").set(num_idle)


class ClosedConnections:
    """Counts closed connections, and logs them at most every ten seconds for each reason."""

    def __init__(self, metrics: GatewayMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._closed = {reason: metrics.closed.labels(reason) for reason in Reason}
        self._clock = clock
        self._unlogged: Tally[Reason] = Tally()
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
