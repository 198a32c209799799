"""Every metric of a gateway, declared once."""

from tokenbus.protocol.telemetry.metrics import REQUEST_BUCKETS, TTFT_BUCKETS, Counter, Gauge, Histogram

_P = "tokenbus_gateway"


class GatewayMetrics:
    """Of completions; models and their like are not counted."""

    def __init__(self) -> None:
        self.finished = Counter(f"{_P}_requests", "Completions that have ended, by HTTP status.", ("status",))
        self.disconnects = Counter(f"{_P}_client_disconnects", "Completions whose client went away before they ended.")
        self.open = Gauge(f"{_P}_requests_open", "Completions that are open now.")
        self.connections = Gauge(
            f"{_P}_connections", "Connections: those that work on a request, and those that wait for one.", ("state",)
        )
        self.closed = Counter(
            f"{_P}_connections_closed", "Connections that the gateway has ended, by why.", ("reason",)
        )
        self.prompt_tokens = Counter(f"{_P}_prompt_tokens", "Tokens of their prompts.")
        self.completion_tokens = Counter(f"{_P}_completion_tokens", "Tokens of their answers.")
        self.ttft = Histogram(
            f"{_P}_time_to_first_token_seconds", "From the request to the first token.", (), TTFT_BUCKETS
        )
        self.e2e = Histogram(f"{_P}_e2e_request_latency_seconds", "From the request to its end.", (), REQUEST_BUCKETS)
        self.finished.labels("200")

    def show(self, num_requests: int, num_connections: int, num_idle: int) -> None:
        """Brings levels up to date, for a scrape."""
        self.open.set(num_requests)
        self.connections.labels("busy").set(num_connections - num_idle)
        self.connections.labels("idle").set(num_idle)

    def families(self) -> list[Counter | Gauge | Histogram]:
        """In the order in which they are declared."""
        return [family for family in vars(self).values() if isinstance(family, Counter | Gauge | Histogram)]
