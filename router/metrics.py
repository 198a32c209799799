"""Every metric of a router, declared once."""

from collections.abc import Collection, Iterable

from tokenbus.protocol.telemetry.metrics import (
    MICROSECOND_BUCKETS,
    REQUEST_BUCKETS,
    BoundedLabel,
    Counter,
    Gauge,
    Histogram,
)
from tokenbus.protocol.wire import errors, messages

_P = "tokenbus_router"
PHASES = ("tokenize", "hash", "place", "accept")
"""Of a request's way to its worker: its prompt is made, its blocks are named, a worker is chosen, and accepts."""


class RouterMetrics:
    """Model names are those of models that a worker serves, or has served; whoever may publish a card makes them up, so
    only some are shown."""

    def __init__(self) -> None:
        models = self._models = BoundedLabel("model")
        self.ready = Gauge(f"{_P}_ready", "1 while requests can be placed.")
        self.received = Counter(f"{_P}_requests", "Requests that were taken.", ("model",), models)
        self.placements = Counter(f"{_P}_placements", "Placements, by policy.", ("model", "policy"), models)
        self.request_errors = Counter(
            f"{_P}_request_errors", "Requests that ended here in an error, by its code.", ("code",)
        )
        self.placements_rejected = Counter(
            f"{_P}_placements_rejected", "Placements that the worker refused, by code.", ("code",)
        )
        self.messages_dropped = Counter(f"{_P}_messages_dropped", "Messages whose reply subject may not be answered.")
        self.embeddings = Counter(f"{_P}_embeddings", "Requests for embeddings, by how they ended.", ("code",))
        self.prompt_tokens = Counter(
            f"{_P}_prompt_tokens", "Tokens of the prompts that were placed.", ("model",), models
        )
        self.overlap_tokens = Counter(
            f"{_P}_predicted_overlap_tokens",
            "Of those, the ones that the chosen worker was taken to hold.",
            ("model",),
            models,
        )
        self.phases = Histogram(
            f"{_P}_phase_seconds", "Parts of a request's way to its worker.", ("phase",), MICROSECOND_BUCKETS
        )
        self.queue_wait = Histogram(
            f"{_P}_queue_wait_seconds", "How long requests waited here for room.", ("model",), REQUEST_BUCKETS, models
        )
        self.queue_depth = Gauge(f"{_P}_queue_depth", "Requests that wait here for room.", ("model",), models)
        self.queue_limit = Gauge(f"{_P}_queue_limit", "How many requests of one model may wait here.")
        self.in_flight = Gauge(f"{_P}_requests_in_flight", "Requests that this router placed or is about to.")
        self.workers = Gauge(
            f"{_P}_workers", "Workers, by their state, or silent for too long.", ("model", "state"), models
        )
        self.event_logs = Gauge(
            f"{_P}_event_logs",
            "Workers, by whether the blocks they hold are known: live, behind a gap, or silent about them.",
            ("model", "events"),
            models,
        )
        self.lost_workers = Counter(
            f"{_P}_workers_lost", "Workers that fell silent and had not left.", ("model",), models
        )
        self.index_blocks = Gauge(f"{_P}_index_blocks", "Blocks in the prefix index.", ("model",), models)
        self.index_bytes = Gauge(
            f"{_P}_index_bytes", "What they take in memory, about (bench/README.md).", ("model",), models
        )
        self.lost_events = Counter(f"{_P}_events_lost", "Entries of workers' event logs that never came.")
        self.snapshots = Counter(f"{_P}_snapshots", "Gaps that a worker's snapshot has closed.")
        for phase in PHASES:
            self.phases.labels(phase)
        for code in errors.Code:  # from 0 on, or the first of each would not be seen as an increase
            self.request_errors.labels(code)
            self.placements_rejected.labels(code)
        self.embeddings.labels("ok")

    def show_models(self, served: Collection[str], seen: Iterable[str]) -> None:
        """Shows the models that are served now, and of those that were `seen` the ones that there is room for."""
        self._models.evict_stale(served)
        for model in (*served, *(model for model in seen if model in self._models)):
            self._know(model)

    def _know(self, model: str) -> None:
        """Shows a model before anything is counted for it, and after its last worker has left."""
        for family in (self.received, self.prompt_tokens, self.overlap_tokens, self.lost_workers, self.queue_wait):
            family.labels(model)
        self.queue_depth.labels(model)
        self.workers.labels(model, messages.WorkerState.READY)

    def families(self) -> list[Counter | Gauge | Histogram]:
        """In the order in which they are declared."""
        return [family for family in vars(self).values() if isinstance(family, Counter | Gauge | Histogram)]
