"""Every metric of a gateway, declared once."""

from tokenbus.protocol.telemetry.metrics import REQUEST_SECONDS, SECONDS, Counter, Gauge, Histogram

_P = "tokenbus_gateway"


class GatewayMetrics:
    """Of completions; models and their like are not counted."""

    def __init__(self) -> None:
        self.finished = Counter(f"{_P}_requests", "Completions that have ended, by HTTP status.", ("status",))
        self.gone = Counter(f"{_P}_clients_gone", "Completions whose client went away before they ended.")
        self.open = Gauge(f"{_P}_requests_open", "Completions that are open now.")
        self.connections = Gauge(
            f"{_P}_connections", "Connections: those that work on a request, and those that wait for one.", ("state",)
        )
        self.ended = Counter(f"{_P}_connections_ended", "Connections that the gateway has ended, by why.", ("reason",))
        self.prompt_tokens = Counter(f"{_P}_prompt_tokens", "Tokens of their prompts.")
        self.completion_tokens = Counter(f"{_P}_completion_tokens", "Tokens of their answers.")
        self.first = Histogram(f"{_P}_time_to_first_token_seconds", "From the request to the first token.", (), SECONDS)
        self.whole = Histogram(f"{_P}_request_seconds", "From the request to its end.", (), REQUEST_SECONDS)
        for family in (self.gone, self.open, self.prompt_tokens, self.completion_tokens, self.first, self.whole):
            family.of()
        self.finished.of("200")

    def show(self, num_requests: int, num_connections: int, num_waiting: int) -> None:
        """Brings levels up to date, for a scrape."""
        self.open.of().set(num_requests)
        self.connections.of("working").set(num_connections - num_waiting)
        self.connections.of("waiting").set(num_waiting)

    def families(self) -> list[Counter | Gauge | Histogram]:
        """In the order in which they are declared."""
        return [family for family in vars(self).values() if isinstance(family, Counter | Gauge | Histogram)]
