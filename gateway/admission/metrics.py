"""Every metric of a gateway."""

from tokenbus.protocol.http.disconnects import Disconnect
from tokenbus.protocol.telemetry.metrics import REQUEST_BUCKETS, TTFT_BUCKETS, Counter, Gauge, Histogram, MetricFamilies

_P = "tokenbus_gateway"


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
        for reason in Disconnect:  # export 0, or the first increase of each would be missed
            self.disconnects.labels(reason)

    def update_gauges(self, num_requests: int, num_connections: int, num_idle: int) -> None:
        """Sets the gauges for a scrape."""
        self.open.set(num_requests)
        self.connections.labels("busy").set(num_connections - num_idle)
        self.connections.labels("idle").set(num_idle)
