"""Every metric of a router, declared once."""

from protocol import errors, messages
from protocol.metrics import REQUEST_SECONDS, SHORT_SECONDS, Counter, Gauge, Histogram

_P = "tokenbus_router"
PHASES = ("tokenize", "hash", "place", "accept")
"""Of a request's way to its worker: its prompt is made, its blocks are named, a worker is chosen, and accepts."""


class RouterMetrics:
    """Model names are those of models that a worker serves, or has served."""

    def __init__(self) -> None:
        self.ready = Gauge(f"{_P}_ready", "1 while requests can be placed.")
        self.received = Counter(f"{_P}_requests", "Requests that were taken.", ("model",))
        self.placed = Counter(f"{_P}_decisions", "Placements, by policy.", ("model", "policy"))
        self.refused = Counter(f"{_P}_refusals", "Requests that ended here in an error, by its code.", ("code",))
        self.retries = Counter(f"{_P}_placements_refused", "Placements that the worker refused, by code.", ("code",))
        self.dropped = Counter(f"{_P}_messages_dropped", "Messages whose reply subject may not be answered.")
        self.embeddings = Counter(f"{_P}_embeddings", "Requests for embeddings, by how they ended.", ("code",))
        self.prompt_tokens = Counter(f"{_P}_prompt_tokens", "Tokens of the prompts that were placed.", ("model",))
        self.overlap_tokens = Counter(
            f"{_P}_predicted_overlap_tokens", "Of those, the ones that the chosen worker was taken to hold.", ("model",)
        )
        self.phases = Histogram(
            f"{_P}_phase_seconds", "Parts of a request's way to its worker.", ("phase",), SHORT_SECONDS
        )
        self.queue_wait = Histogram(
            f"{_P}_queue_wait_seconds", "How long requests waited here for room.", ("model",), REQUEST_SECONDS
        )
        self.queue_depth = Gauge(f"{_P}_queue_depth", "Requests that wait here for room.", ("model",))
        self.queue_limit = Gauge(f"{_P}_queue_limit", "How many requests of one model may wait here.")
        self.in_flight = Gauge(f"{_P}_requests_in_flight", "Requests that this router placed or is about to.")
        self.workers = Gauge(f"{_P}_workers", "Workers, by their state, or silent for too long.", ("model", "state"))
        self.followed = Gauge(
            f"{_P}_event_logs",
            "Workers, by whether the blocks they hold are known: live, behind a gap, or silent about them.",
            ("model", "events"),
        )
        self.lost_workers = Counter(f"{_P}_workers_lost", "Workers that fell silent and had not left.", ("model",))
        self.index_blocks = Gauge(f"{_P}_index_blocks", "Blocks in the prefix index.", ("model",))
        self.index_bytes = Gauge(f"{_P}_index_bytes", "What they take in memory, about (bench/README.md).", ("model",))
        self.lost_events = Counter(f"{_P}_events_lost", "Entries of workers' event logs that never came.")
        self.snapshots = Counter(f"{_P}_snapshots", "Gaps that a worker's snapshot has closed.")
        for phase in PHASES:
            self.phases.of(phase)
        for family in (self.dropped, self.lost_events, self.snapshots):
            family.of()
        for code in errors.Code:  # from 0 on, or the first of each would not be seen as an increase
            self.refused.of(code)
            self.retries.of(code)
        self.embeddings.of("ok")

    def know(self, model: str) -> None:
        """Shows a model before anything is counted for it, and after its last worker has left."""
        for family in (self.received, self.prompt_tokens, self.overlap_tokens, self.lost_workers, self.queue_wait):
            family.of(model)
        self.queue_depth.of(model)
        self.workers.of(model, messages.WorkerState.READY)

    def families(self) -> list[Counter | Gauge | Histogram]:
        """In the order in which they are declared."""
        return [family for family in vars(self).values() if isinstance(family, Counter | Gauge | Histogram)]
