"""All metrics of a router."""

from collections.abc import Collection, Iterable

from tokenbus.protocol.access.audit_log import LOST, STORED
from tokenbus.protocol.telemetry.metrics import (
    MICROSECOND_BUCKETS,
    REQUEST_BUCKETS,
    BoundedLabel,
    Counter,
    Gauge,
    Histogram,
    MetricFamilies,
)
from tokenbus.protocol.wire import errors, messages

_P = "tokenbus_router"
_PHASES = ("tokenize", "hash", "place", "accept")
"""A request's phases on its way to a worker: the prompt is tokenized, its blocks are hashed, a worker is chosen, and
accepts."""


_MAX_TENANTS = 128


class RouterMetrics(MetricFamilies):
    """Counters, gauges and histograms.

    Anyone who can publish a card can make up model names, so only a bounded number of them become labels."""

    def __init__(self) -> None:
        models = self._models = BoundedLabel("model")
        self.ready = Gauge(f"{_P}_ready", "1 while requests can be placed.")
        self.received = Counter(f"{_P}_requests", "Requests for known models.", ("model",), models)
        self.placements = Counter(f"{_P}_placements", "Placements, by policy.", ("model", "policy"), models)
        self.request_errors = Counter(f"{_P}_request_errors", "Requests that failed here, by code.", ("code",))
        self.placements_rejected = Counter(f"{_P}_placements_rejected", "Refused placements, by code.", ("code",))
        self.messages_dropped = Counter(f"{_P}_messages_dropped", "Messages with a forbidden reply subject.")
        self.uploads = Counter(
            f"{_P}_uploads", "Large requests in parts, by outcome: complete, expired, given_up or failed.", ("outcome",)
        )
        self.fleet_viewers = Gauge(
            f"{_P}_fleet_viewers", "Reply subjects to which it sends digests of the fleet: consoles and `tokenbus top`."
        )
        self.upload_bytes = Gauge(f"{_P}_upload_bytes", "Memory for the parts of large requests.")
        self.embeddings = Counter(f"{_P}_embeddings", "Embedding requests, by error code or ok.", ("code",))
        self.tokenizations = Counter(
            f"{_P}_tokenizations", "Requests to tokenize or detokenize, by error code or ok.", ("op", "code")
        )
        self.cache_hints = Counter(
            f"{_P}_cache_hints", "Hints to keep a session's cached prefixes, or that the session has ended.", ("kind",)
        )
        self.tokenized_chars = Counter(
            f"{_P}_tokenized_chars", "Characters of conversations, by whether their ids were cached.", ("source",)
        )
        self.tokenization_cache_bytes = Gauge(
            f"{_P}_tokenization_cache_bytes", "Memory for token ids of texts in conversations."
        )
        self.reranks = Counter(f"{_P}_reranks", "Requests to rank documents, by error code or ok.", ("code",))
        self.prompt_tokens = Counter(f"{_P}_prompt_tokens", "Prompt tokens of placements.", ("model",), models)
        self.overlap_tokens = Counter(
            f"{_P}_predicted_overlap_tokens",
            "Prompt tokens of placements that the chosen worker was expected to have cached.",
            ("model",),
            models,
        )
        self.fetch_tokens = Counter(
            f"{_P}_predicted_fetch_tokens",
            "Prompt tokens of placements that the chosen worker was told to fetch from another one.",
            ("model",),
            models,
        )
        self.remote_prefills = Counter(
            f"{_P}_remote_prefills", "Placements whose prompt another worker was to compute.", ("model",), models
        )
        self.distant_placements = Counter(
            f"{_P}_distant_placements", "Placements at a worker of another site.", ("model",), models
        )
        self.transfer_rate = Gauge(
            f"{_P}_transfer_megabytes_per_second", "How fast KV blocks move between workers.", ("model",), models
        )
        self.phases = Histogram(f"{_P}_phase_seconds", "Time spent in each phase.", ("phase",), MICROSECOND_BUCKETS)
        self.queue_wait = Histogram(
            f"{_P}_queue_wait_seconds", "Time that requests waited for capacity.", ("model",), REQUEST_BUCKETS, models
        )
        self.queue_depth = Gauge(f"{_P}_queue_depth", "Requests waiting for capacity.", ("model",), models)
        self.held = Gauge(
            f"{_P}_requests_held", "Requests that wait because no worker has their model loaded.", ("model",), models
        )
        self.queue_limit = Gauge(f"{_P}_queue_limit", "Requests of one model that may wait.")
        self.in_flight = Gauge(f"{_P}_requests_in_flight", "Open requests, waiting or at a worker.")
        self.workers = Gauge(
            f"{_P}_workers",
            "Workers, by state, which may also be silent, ejected or loadable.",
            ("model", "state"),
            models,
        )
        self.event_logs = Gauge(
            f"{_P}_event_logs",
            "Workers, by whether their cached blocks are known: live, behind a gap, or silent about them.",
            ("model", "events"),
            models,
        )
        self.lost_workers = Counter(
            f"{_P}_workers_lost",
            "Workers that were lost: their process is `disconnected`, as the broker says, or they were `silent`.",
            ("model", "reason"),
            models,
        )
        self.index_blocks = Gauge(f"{_P}_index_blocks", "Blocks in the prefix index.", ("model",), models)
        self.index_bytes = Gauge(f"{_P}_index_bytes", "Estimated memory of the prefix index.", ("model",), models)
        self.continued = Counter(
            f"{_P}_requests_continued",
            "Requests that continued after their worker was lost or left.",
            ("model",),
            models,
        )
        self.adopted = Counter(f"{_P}_requests_adopted", "Requests taken over from another router.", ("model",), models)
        self.passed_on = Counter(
            f"{_P}_passed_on", "Cancels and resyncs of clients passed on to the workers with the streams.", ("op",)
        )
        self.stale_attempts = Counter(
            f"{_P}_stale_attempts", "Requests that a worker still had when another one continued them."
        )
        self.prompts_forgotten = Counter(
            f"{_P}_prompts_forgotten", "Requests that can't survive their worker: no memory for prompts."
        )
        self.lost_events = Counter(f"{_P}_events_lost", "Entries of workers' event logs that were never received.")
        self.beats = Counter(f"{_P}_beats", "Beats of worker processes, each for all their idle workers.")
        tenants = self._tenants = BoundedLabel("tenant", _MAX_TENANTS)
        self.tenant_requests = Counter(
            f"{_P}_tenant_requests", "Requests that have ended, where usage is kept.", ("tenant",), tenants
        )
        self.tenant_tokens = Counter(
            f"{_P}_tenant_tokens",
            "Tokens of these: computed (prompt) and cached ones of prompts, and those of completions.",
            ("tenant", "kind"),
            tenants,
        )
        self.usage_counters = Gauge(f"{_P}_usage_counters", "Sums of usage in memory.")
        self.usage_unsaved = Gauge(f"{_P}_usage_unsaved_seconds", "How long the oldest usage has not been saved.")
        self.usage_failures = Counter(f"{_P}_usage_failures", "Failed attempts to save usage.")
        self.audit_records = Counter(
            f"{_P}_audit_records", "Records for the audit log, by outcome: stored or lost.", ("outcome",)
        )
        for outcome in (STORED, LOST):  # export 0, or the first increase of each would be missed
            self.audit_records.labels(outcome)
        self.throttled = Counter(
            f"{_P}_throttled", "Requests beyond a limit of their key or tenant, by unit.", ("unit",)
        )
        self.quota_leases = Counter(f"{_P}_quota_leases", "Leases of limits that routers share, by unit.", ("unit",))
        self.quota_conflicts = Counter(
            f"{_P}_quota_conflicts", "Leases that were asked for again since another router was quicker."
        )
        self.quota_fallbacks = Counter(
            f"{_P}_quota_fallbacks", "Times that limits were shared out since their bucket could not be reached."
        )
        self.bucket_copies_missing = Gauge(
            f"{_P}_bucket_copies_missing", "Copies of a bucket that the cluster of brokers does not keep.", ("bucket",)
        )
        self.quota_leasing = Gauge(f"{_P}_quota_leasing", "1 while limits hold across routers, by leases of a bucket.")
        self.snapshots = Counter(f"{_P}_snapshots", "Snapshots that closed a gap in a worker's event log.")
        for unit in ("requests", "tokens", "tokens_per_day", "concurrency"):
            self.throttled.labels(unit)
            self.quota_leases.labels(unit)
        for phase in _PHASES:
            self.phases.labels(phase)
        for code in errors.Code:  # export zeros now: Prometheus does not see a counter that starts at 1 increase
            self.request_errors.labels(code)
            self.placements_rejected.labels(code)
        for kind in ("keep", "end"):
            self.cache_hints.labels(kind)
        for source in ("cached", "computed"):
            self.tokenized_chars.labels(source)
        self.embeddings.labels("ok")
        for op in ("tokenize", "detokenize"):
            self.tokenizations.labels(op, "ok")
        for outcome in ("complete", "expired", "given_up", "failed"):
            self.uploads.labels(outcome)
        for op in ("cancel", "resync"):
            self.passed_on.labels(op)
        self.reranks.labels("ok")

    def show_models(self, served: Collection[str], seen: Iterable[str]) -> None:
        """Gives each served model a label, and keeps those of `seen` models while there is room."""
        self._models.evict_stale(served)
        for model in (*served, *(model for model in seen if model in self._models)):
            for counted in (
                self.received,
                self.prompt_tokens,
                self.overlap_tokens,
                self.fetch_tokens,
                self.remote_prefills,
                self.distant_placements,
                self.continued,
                self.adopted,
                self.queue_wait,
            ):
                counted.labels(model)
            for reason in ("silent", "disconnected"):
                self.lost_workers.labels(model, reason)
            self.held.labels(model)
            self.queue_depth.labels(model)
            self.workers.labels(model, messages.WorkerState.READY)
