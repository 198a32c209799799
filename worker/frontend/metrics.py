"""Every metric of a worker process, declared once. Names follow vLLM's where there are such."""

from tokenbus.protocol.telemetry.metrics import ITL_BUCKETS, REQUEST_BUCKETS, TTFT_BUCKETS, Counter, Gauge, Histogram
from tokenbus.protocol.wire import errors, messages
from tokenbus.worker import contract
from tokenbus.worker.engine.process import ipc

_ONE = ("model", "worker_id")
_P = "tokenbus_worker"


class WorkerMetrics:
    """Families with the labels `model` and `worker_id`: a process may hold several replicas."""

    def __init__(self) -> None:
        self.info = Gauge(
            f"{_P}_info",
            "1: what a worker serves, and with which engine.",
            (*_ONE, "engine", "engine_version", "source"),
        )
        self.ready = Gauge(f"{_P}_ready", "1 while the worker takes requests.", _ONE)
        self.running = Gauge(f"{_P}_requests_running", "Requests that have a lane.", _ONE)
        self.waiting = Gauge(f"{_P}_requests_waiting", "Accepted requests that wait for one.", _ONE)
        self.max_running = Gauge(f"{_P}_max_num_seqs", "Requests that can run at the same time.", _ONE)
        self.queued_prefill = Gauge(f"{_P}_queued_prefill_tokens", "Prompt tokens that are not computed yet.", _ONE)
        self.kv_blocks = Gauge(
            f"{_P}_kv_blocks",
            "Blocks on the device: used, cached (nobody's now) or free.",
            (*_ONE, "state"),
        )
        self.kv_usage = Gauge(f"{_P}_kv_usage_ratio", "Share of the KV blocks that running requests hold.", _ONE)
        self.kv_bytes = Gauge(f"{_P}_kv_bytes", "Device memory for keys and values; 0 where it is not known.", _ONE)
        self.step_age = Gauge(f"{_P}_step_age_seconds", "Time since the step in progress began; 0 while idle.", _ONE)
        self.cache_queries = Counter(f"{_P}_prefix_cache_queries_tokens", "Prompt tokens that were looked up.", _ONE)
        self.cache_hits = Counter(f"{_P}_prefix_cache_hits_tokens", "Of those, the ones that were not computed.", _ONE)
        self.prompt_tokens = Counter(f"{_P}_prompt_tokens", "Tokens of the prompts of requests that have ended.", _ONE)
        self.generation_tokens = Counter(f"{_P}_generation_tokens", "Tokens that were sampled.", _ONE)
        self.computed_tokens = Counter(f"{_P}_computed_tokens", "Tokens that steps have computed.", _ONE)
        self.preemptions = Counter(f"{_P}_preemptions", "Sequences that lost their place for want of room.", _ONE)
        self.evicted = Counter(f"{_P}_evicted_blocks", "Cached blocks that had to leave the device.", _ONE)
        self.restarts = Counter(f"{_P}_engine_restarts", "Engines that were started after the first.", _ONE)
        self.finished = Counter(f"{_P}_requests", "Requests that have ended, by how.", (*_ONE, "finish_reason"))
        self.refused = Counter(f"{_P}_refusals", "Runs that were refused, by error code.", (*_ONE, "code"))
        self.embeddings = Counter(f"{_P}_embeddings", "Inputs of which an embedding was made.", _ONE)
        self.steps = Histogram(
            f"{_P}_step_seconds",
            "Steps: of prompts, of decodes, or of both.",
            (*_ONE, "kind"),
            ITL_BUCKETS,
        )
        self.inference_seconds = Counter(f"{_P}_inference_seconds", "Time that the device has computed.", _ONE)
        self.idle_seconds = Counter(
            f"{_P}_device_gap_seconds", "Time between two steps in which there was work and the device had none.", _ONE
        )
        self.ttft = Histogram(
            f"{_P}_time_to_first_token_seconds", "From the accept to the first token.", _ONE, TTFT_BUCKETS
        )
        self.itl = Histogram(
            f"{_P}_inter_token_latency_seconds", "From one token of a request to its next.", _ONE, ITL_BUCKETS
        )
        self.queue = Histogram(f"{_P}_queue_time_seconds", "From the accept to the first step.", _ONE, REQUEST_BUCKETS)
        self.prefill = Histogram(
            f"{_P}_prefill_time_seconds", "From the first step to the first token.", _ONE, REQUEST_BUCKETS
        )
        self.decode = Histogram(f"{_P}_decode_time_seconds", "From the first token to the last.", _ONE, REQUEST_BUCKETS)
        self.e2e = Histogram(
            f"{_P}_e2e_request_latency_seconds", "From the accept to the terminal.", _ONE, REQUEST_BUCKETS
        )

    def families(self) -> list[Counter | Gauge | Histogram]:
        """In the order in which they are declared."""
        return [family for family in vars(self).values() if isinstance(family, Counter | Gauge | Histogram)]


class ReplicaMetrics:
    """The children of one replica, and what is added to them."""

    def __init__(self, metrics: WorkerMetrics, model: str, worker_id: str) -> None:
        self._metrics = metrics
        self._own_labels = (model, worker_id)
        own = self._own_labels
        self._itl, self._ttft, self._queue = (
            metrics.itl.labels(*own),
            metrics.ttft.labels(*own),
            metrics.queue.labels(*own),
        )
        self._prefill, self._decode = metrics.prefill.labels(*own), metrics.decode.labels(*own)
        self._e2e = metrics.e2e.labels(*own)
        self._steps = {kind: metrics.steps.labels(*own, kind) for kind in ipc.StepKind}
        self._inference, self._gap = metrics.inference_seconds.labels(*own), metrics.idle_seconds.labels(*own)
        self._prompt, self._evicted = metrics.prompt_tokens.labels(*own), metrics.evicted.labels(*own)
        self._last_load = messages.Load()
        self._load_counters = [
            (metrics.generation_tokens.labels(*own), "generated_tokens"),
            (metrics.computed_tokens.labels(*own), "computed_tokens"),
            (metrics.cache_queries.labels(*own), "prompt_tokens"),
            (metrics.cache_hits.labels(*own), "cached_tokens"),
        ]
        for family in (metrics.restarts, metrics.preemptions, metrics.embeddings):
            family.labels(*own)
        for reason in messages.FinishReason:  # from 0 on, or the first of each would not be seen as an increase
            metrics.finished.labels(*own, reason)
        for code in errors.Code:
            metrics.refused.labels(*own, code)

    def __repr__(self) -> str:
        return f"<ReplicaMetrics of {self._own_labels[1]}>"

    def observe_step(self, stats: ipc.StepStats) -> None:
        """A step was computed; `stats.evicted_blocks` and `stats.preemptions` are since the one before."""
        self._steps[stats.kind].observe(stats.seconds)
        self._inference.inc(stats.seconds)
        self._gap.inc(stats.gap_s)
        self._evicted.inc(stats.evicted_blocks)
        self._metrics.preemptions.labels(*self._own_labels).inc(stats.preemptions)

    def observe_token_interval(self, seconds: float, count: int) -> None:
        """So many requests got a token, as long after their last one."""
        for _ in range(count):
            self._itl.observe(seconds)

    def count_load(self, load: messages.Load) -> None:
        """Adds what an engine has counted since the last time; a new engine counts from 0."""
        for child, name in self._load_counters:
            now, before = getattr(load, name), getattr(self._last_load, name)
            child.inc(now - before if now >= before else now)
        self._last_load = load

    def update_gauges(self, load: messages.Load, config: contract.EngineConfig, *, is_ready: bool) -> None:
        """Sets what is a level."""
        metrics, who = self._metrics, self._own_labels
        self.count_load(load)
        metrics.info.labels(*who, config.engine, config.engine_version, config.source).set(1)
        metrics.ready.labels(*who).set(is_ready)
        metrics.running.labels(*who).set(load.running)
        metrics.waiting.labels(*who).set(load.waiting)
        metrics.max_running.labels(*who).set(config.max_num_seqs)
        metrics.queued_prefill.labels(*who).set(load.queued_prefill_tokens)
        blocks = {"used": load.used_blocks, "cached": load.cached_blocks, "free": load.free_blocks}
        for state, count in blocks.items():
            metrics.kv_blocks.labels(*who, state).set(count)
        metrics.kv_usage.labels(*who).set(load.used_blocks / max(1, config.total_kv_blocks))
        metrics.kv_bytes.labels(*who).set(config.kv_bytes)
        metrics.step_age.labels(*who).set(load.step_age_ms / 1e3)

    def forget(self) -> None:
        """The replica has left."""
        for family in self._metrics.families():
            family.remove_by_labels({"worker_id": self._own_labels[1]})

    def request_finished(self, reason: str, usage: messages.Usage | None, timings: messages.Timings | None) -> None:
        """A request has ended; times only of those that got a token."""
        self._metrics.finished.labels(*self._own_labels, reason).inc()
        if usage is None or timings is None:
            return
        self._prompt.inc(usage.prompt_tokens)
        self._e2e.observe(timings.total_ms / 1e3)
        self._queue.observe(timings.queue_ms / 1e3)
        if usage.completion_tokens:
            self._ttft.observe(timings.ttft_ms / 1e3)
            self._prefill.observe(timings.prefill_ms / 1e3)
            self._decode.observe(timings.decode_ms / 1e3)

    def request_refused(self, code: str) -> None:
        self._metrics.refused.labels(*self._own_labels, code).inc()

    def engine_restarted(self) -> None:
        self._metrics.restarts.labels(*self._own_labels).inc()

    def inputs_embedded(self, count: int) -> None:
        self._metrics.embeddings.labels(*self._own_labels).inc(count)
