"""Every metric of a worker process, declared once. Names follow vLLM's where vLLM has the metric."""

from tokenbus.protocol.telemetry.metrics import (
    ITL_BUCKETS,
    REQUEST_BUCKETS,
    TTFT_BUCKETS,
    Counter,
    Gauge,
    Histogram,
    MetricFamilies,
)
from tokenbus.protocol.wire import errors, messages
from tokenbus.worker.contract import contract, engine_request
from tokenbus.worker.engine.host_cache.recovery import RecoveredCopies
from tokenbus.worker.engine.process import ipc

_LABELS = ("model", "worker_id")
FETCH_OUTCOMES = (
    "complete", "partial", "timeout", "failed", "nothing", "busy", "lost", "evicted", "corrupt", "refused"
)  # fmt: skip
"""The outcomes of a fetch of blocks: all blocks, some, or none for a reason."""


class WorkerMetrics(MetricFamilies):
    """Metric families, labelled by `model` and `worker_id`, since a process may hold several replicas."""

    def __init__(self) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"tokenbus_worker_{name}", text, (*_LABELS, *labels))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tokenbus_worker_{name}", text, (*_LABELS, *labels))

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"tokenbus_worker_{name}", text, (*_LABELS, *labels), buckets)

        self.info = gauge(
            "info",
            "Always 1; the labels name the model that a worker serves and its engine.",
            "engine",
            "engine_version",
            "source",
        )
        self.ready = gauge("ready", "1 while the worker accepts requests.")
        self.running = gauge("requests_running", "Running requests, each in a lane of the engine.")
        self.waiting = gauge("requests_waiting", "Accepted requests that wait for a lane.")
        self.max_running = gauge("max_num_seqs", "Requests that can run at once.")
        self.queued_prefill = gauge("queued_prefill_tokens", "Prompt tokens that are not yet computed.")
        self.kv_blocks = gauge(
            "kv_blocks", "Blocks on the device, by state: used, cached (used by no request) or free.", "state"
        )
        self.logits = gauge(
            "logits",
            "Mean, smallest and largest logit of a row; about one row a second is examined.",
            "stat",
        )
        self.non_finite_logits = counter(
            "non_finite_logits",
            "Logits found to be nan, inf or, in rows with any of these, -inf, by kind.",
            "kind",
        )
        self.kv_expected = gauge(
            "kv_expected_ratio",
            "Share of the KV blocks that all requests, including waiting ones, use or are expected to use.",
        )
        self.expected_tokens = gauge("expected_answer_tokens", "Expected tokens of the next completion.")
        self.kv_usage = gauge("kv_usage_ratio", "Share of the KV blocks that running requests use, from 0 to 1.")
        self.kv_bytes = gauge("kv_bytes", "Device memory for keys and values, in bytes; 0 if unknown.")
        self.kv_used_bytes = gauge("kv_used_bytes", "The part of it that running requests use, in bytes.")
        self.kv_total_blocks = gauge("kv_total_blocks", "Blocks of the device's KV memory.")
        self.device_memory = gauge(
            "device_memory_bytes",
            "Memory of a device, used or free, in bytes. `host` is the machine, within its container's limit.",
            "device",
            "state",
        )
        self.resident = gauge(
            "resident_bytes", "Resident memory of the worker's processes, `front` and `engine`, in bytes.", "process"
        )
        self.uptime = gauge("uptime_seconds", "Time since a process started; 0 if there is no engine.", "process")
        self.kv_pool = gauge(
            "kv_pool_bytes", "KV memory that a process's workers share: held, share, cap, and budget of all.", "part"
        )
        self.kv_reclaimed = counter(
            "kv_reclaimed_bytes", "KV memory given up for other workers: idle or of preempted sequences.", "kind"
        )
        self.memory_planned = gauge("memory_planned_bytes", "Memory that the engine is planned to take.", "part")
        self.step_age = gauge("step_age_seconds", "Time since the step in progress began; 0 while idle.")
        self.cache_queries = counter("prefix_cache_queries_tokens", "Prompt tokens looked up in the cache.")
        self.cache_hits = counter("prefix_cache_hits_tokens", "Prompt tokens found in the cache.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that have ended.")
        self.generation_tokens = counter("generation_tokens", "Sampled tokens.")
        self.computed_tokens = counter("computed_tokens", "Tokens computed by steps, of prompts and completions.")
        self.preemptions = counter("preemptions", "Running sequences preempted for lack of KV memory.")
        self.preempted_tokens = counter(
            "preempted_tokens",
            "Tokens that preempted sequences regained, by kind: restored from the cache, or recomputed.",
            "kind",
        )
        self.transferred = counter(
            "kv_transferred_bytes",
            "Keys and values copied between device and host memory, by direction: offload or onload.",
            "direction",
        )
        self.checkpoints = counter(
            "checkpoints",
            "Checkpoints of models whose state can't be cut at a token, by event: saved, restored or evicted.",
            "event",
        )
        self.checkpoint_bytes = gauge("checkpoint_bytes", "Host memory that checkpoints take, in bytes.")
        self.evicted = counter("evicted_blocks", "Cached blocks evicted from the device.")
        self.host_blocks = gauge("host_cache_blocks", "Copies of blocks in host memory.")
        self.kept_blocks = gauge("kept_blocks", "Blocks, or checkpoints, that clients have asked to keep.")
        self.recovered_blocks = counter(
            "host_cache_recovered_blocks", "Blocks whose copies a new engine found from an earlier one."
        )
        self.recovered_bytes = counter("host_cache_recovered_bytes", "Bytes of these copies.")
        self.discarded_slots = counter(
            "host_cache_discarded_slots",
            "Slots of the host cache that a new engine could not trust, by reason.",
            "reason",
        )
        self.poisoned = counter(
            "poisoned_shares",
            "Sequences' parts of steps discarded because their numbers were NaN or infinite.",
        )
        self.poisoned_engines = counter(
            "poisoned_engines", "Engines that ended because non-finite numbers remained in their memory."
        )
        self.restarts = counter("engine_restarts", "Engine starts after the first.")
        self.unguarded = gauge("streams_unguarded", "Open streams without a guardian, which end with the worker.")
        self.adapters = gauge("adapters", "LoRA adapters that requests may use.")
        self.finished = counter(
            "requests",
            "Requests that have ended, by finish reason; `stopped`: an operator or a shutdown ended them early.",
            "finish_reason",
        )
        self.failures = gauge(
            "failures_in_a_row", "Requests since the last success that ended in an error that need not recur elsewhere."
        )
        self.clients_gone = counter("clients_gone", "Requests cancelled because their client was gone.")
        self.refused = counter("refusals", "Refused runs, by error code.", "code")
        self.constrained = counter(
            "constrained_requests", "Requests with constrained output, by the language of the constraint.", "kind"
        )
        self.compile = histogram("constraint_compile_seconds", "Time to compile a request's constraint.", TTFT_BUCKETS)
        self.constraint_refusals = counter(
            "constraint_refusals",
            "Refused constraints: invalid, taking too much time or memory to compile (too_costly), or "
            "during generation (given_up).",
            "reason",
        )
        self.follower_tokens = counter(
            "follower_tokens", "Tokens that followed with certainty from sampled ones and were not sampled."
        )
        self.tool_calls = counter("tool_calls", "Tool calls in answers, by whether they were complete.", "complete")
        self.reasoning_tokens = counter("reasoning_tokens", "Tokens of completions that belong to the reasoning.")
        self.reasoning_budgets_spent = counter(
            "reasoning_budgets_spent", "Answers whose reasoning was closed because its budget was spent."
        )
        self.kv_fetches = counter("kv_fetches", "Fetches of KV blocks from other workers, by outcome.", "outcome")
        self.kv_refused_blocks = counter(
            "kv_refused_blocks", "Fetched blocks that were not cached because one of them holds unusable numbers."
        )
        self.kv_fetched_bytes = counter("kv_fetched_bytes", "Bytes of KV blocks fetched from other workers.")
        self.kv_given_bytes = counter("kv_given_bytes", "Bytes of KV blocks read by other workers.")
        self.kv_fetch = histogram("kv_fetch_seconds", "Duration of fetches of KV blocks.", TTFT_BUCKETS)
        self.remote_prefills = counter(
            "remote_prefills",
            "Prompts computed for other workers, by outcome: complete, cancelled or failed.",
            "outcome",
        )
        self.remote_prefills_awaited = counter(
            "remote_prefills_awaited", "Prompts that another worker should compute for this one, by outcome.", "outcome"
        )
        self.loading = gauge("loading", "1 while an engine is being started.")
        self.model_loads = counter("model_loads", "Loads of models on demand, by outcome: ok or failed.", "outcome")
        self.model_unloads = counter(
            "model_unloads", "Unloaded models, by reason: idle, or room for another.", "reason"
        )
        self.model_load_seconds = histogram(
            "model_load_seconds", "From the decision to load a model on demand until it serves.", REQUEST_BUCKETS
        )
        self.model_state = gauge(
            "model_state",
            "1 for the state of an on-demand model: unloaded, loading, loaded or unloading.",
            "state",
        )
        self.memory_budget = gauge(
            "memory_budget_bytes", "Memory that all on-demand models of the process may take together; 0: what is free."
        )
        self.memory_reserved = gauge(
            "memory_reserved_bytes", "Memory that an on-demand model is expected to take; 0 while it is not loaded."
        )
        self.kv_leases = gauge("kv_leases", "Workers that are reading KV blocks here.")
        self.embeddings = counter("embeddings", "Embedded inputs.")
        self.embedded_tokens = counter("embedded_tokens", "Tokens of embedded inputs.")
        self.scored_documents = counter("scored_documents", "Scored documents.")
        self.steps = histogram(
            "step_seconds", "Duration of steps, by kind: prefill, decode or mixed.", ITL_BUCKETS, "kind"
        )
        self.inference_seconds = counter("inference_seconds", "Time that the device spent computing.")
        self.idle_seconds = counter(
            "device_gap_seconds", "Time that the device was idle between two steps although there was work."
        )
        self.ttft = histogram("time_to_first_token_seconds", "From the accept to the first token.", TTFT_BUCKETS)
        self.itl = histogram(
            "inter_token_latency_seconds",
            "From one token of a request to the next; tokens of one step count once.",
            ITL_BUCKETS,
        )
        self.queue = histogram("queue_time_seconds", "From the accept to the first step.", REQUEST_BUCKETS)
        self.prefill = histogram("prefill_time_seconds", "From the first step to the first token.", REQUEST_BUCKETS)
        self.decode = histogram("decode_time_seconds", "From the first token to the last.", REQUEST_BUCKETS)
        self.e2e = histogram("e2e_request_latency_seconds", "From the accept to the terminal.", REQUEST_BUCKETS)


class ReplicaMetrics:
    """The metrics of one replica."""

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
        self._prompt = metrics.prompt_tokens.labels(*own)
        self._step_counters = [
            (metrics.preemptions.labels(*own), "preemptions"),
            (metrics.preempted_tokens.labels(*own, "restored"), "restored_tokens"),
            (metrics.preempted_tokens.labels(*own, "recomputed"), "recomputed_tokens"),
            (metrics.evicted.labels(*own), "evicted_blocks"),
            (metrics.transferred.labels(*own, "offload"), "offloaded_bytes"),
            (metrics.transferred.labels(*own, "onload"), "onloaded_bytes"),
            (metrics.follower_tokens.labels(*own), "follower_tokens"),
            (metrics.checkpoints.labels(*own, "saved"), "saved_checkpoints"),
            (metrics.checkpoints.labels(*own, "restored"), "restored_checkpoints"),
            (metrics.checkpoints.labels(*own, "evicted"), "evicted_checkpoints"),
            (metrics.poisoned.labels(*own), "poisoned_shares"),
        ]
        self._checkpoint_bytes = metrics.checkpoint_bytes.labels(*own)
        self._logits = {stat: metrics.logits.labels(*own, stat) for stat in ("mean", "smallest", "largest")}
        self._non_finite_logits = [metrics.non_finite_logits.labels(*own, kind) for kind in ("nan", "inf", "-inf")]
        self._last_load = messages.Load()
        self.failures_in_a_row = 0
        """The requests that have failed here since the last success."""
        self._load_counters = [
            (metrics.generation_tokens.labels(*own), "generated_tokens"),
            (metrics.computed_tokens.labels(*own), "computed_tokens"),
            (metrics.cache_queries.labels(*own), "prompt_tokens"),
            (metrics.cache_hits.labels(*own), "cached_tokens"),
        ]
        self._compile = metrics.compile.labels(*own)
        for reason in ("invalid", "too_costly", "given_up"):
            self._metrics.constraint_refusals.labels(*self._own_labels, reason)
        for kind in engine_request.ConstraintKind:
            metrics.constrained.labels(*own, kind)
        for is_complete in ("true", "false"):
            metrics.tool_calls.labels(*own, is_complete)
        metrics.reasoning_tokens.labels(*own)
        metrics.reasoning_budgets_spent.labels(*own)
        for family in (
            metrics.restarts,
            metrics.poisoned_engines,
            metrics.recovered_blocks,
            metrics.recovered_bytes,
            metrics.embeddings,
            metrics.embedded_tokens,
            metrics.scored_documents,
            metrics.clients_gone,
            metrics.kv_fetched_bytes,
            metrics.kv_given_bytes,
            metrics.kv_refused_blocks,
        ):
            family.labels(*own)
        for outcome in FETCH_OUTCOMES:
            metrics.kv_fetches.labels(*own, outcome)
            metrics.remote_prefills_awaited.labels(*own, outcome)
        metrics.discarded_slots.labels(*own, "torn")
        for outcome in ("complete", "cancelled", "failed"):
            metrics.remote_prefills.labels(*own, outcome)
        for reason in (*messages.FinishReason, "stopped"):  # export 0, or the first increase of each would go unseen
            metrics.finished.labels(*own, reason)
        for code in errors.Code:
            metrics.refused.labels(*own, code)

    def __repr__(self) -> str:
        return f"<ReplicaMetrics of {self._own_labels[1]}>"

    def observe_step(self, stats: ipc.StepStats) -> None:
        """Observes a computed step."""
        self._steps[stats.kind].observe(stats.seconds)
        self._inference.inc(stats.seconds)
        self._gap.inc(stats.gap_s)
        self._checkpoint_bytes.set(stats.checkpoint_bytes)
        if stats.logits is not None:
            for stat, gauge in self._logits.items():
                gauge.set(getattr(stats.logits, stat))
        for child, count in zip(self._non_finite_logits, stats.non_finite_logits, strict=True):
            if count:
                child.inc(count)
        for child, name in self._step_counters:
            if count := getattr(stats, name):
                child.inc(count)

    def kv_pool_changed(self, stats: ipc.KvPoolStats) -> None:
        """Sets an engine's part of a KV pool, and counts what it has given up."""
        for part in ("held", "share", "cap", "budget"):
            self._metrics.kv_pool.labels(*self._own_labels, part).set(getattr(stats, part))
        for kind, count in (("idle", stats.reclaimed_idle), ("preempted", stats.reclaimed_used)):
            self._metrics.kv_reclaimed.labels(*self._own_labels, kind).inc(count)

    def blocks_refused(self, count: int) -> None:
        """Counts fetched blocks that were not cached."""
        self._metrics.kv_refused_blocks.labels(*self._own_labels).inc(count)

    def constraint_compiled(self, compiled: ipc.ConstraintCompiled) -> None:
        """Observes a constraint that was compiled, or could not be."""
        self._compile.observe(compiled.seconds)
        if compiled.problem is not None:
            reason = "too_costly" if compiled.is_too_costly else "invalid"
            self._metrics.constraint_refusals.labels(*self._own_labels, reason).inc()

    def constraint_given_up(self) -> None:
        """Counts a request that ended because its constraint became too costly to follow."""
        self._metrics.constraint_refusals.labels(*self._own_labels, "given_up").inc()

    def answer_parsed(
        self, reasoning_tokens: int, tool_calls: int, *, has_incomplete_call: bool, has_spent_budget: bool
    ) -> None:
        """Counts a parsed answer that has ended. Its last tool call may be incomplete; its reasoning may have spent its
        budget."""
        own = self._own_labels
        self._metrics.reasoning_tokens.labels(*own).inc(reasoning_tokens)
        self._metrics.reasoning_budgets_spent.labels(*own).inc(has_spent_budget)
        self._metrics.tool_calls.labels(*own, "true").inc(tool_calls - has_incomplete_call)
        self._metrics.tool_calls.labels(*own, "false").inc(has_incomplete_call)

    def request_constrained(self, kind: engine_request.ConstraintKind) -> None:
        """Counts an accepted request that has a constraint."""
        self._metrics.constrained.labels(*self._own_labels, kind).inc()

    def observe_token_interval(self, seconds: float, count: int) -> None:
        """Observes that `count` requests got a token, each `seconds` after its previous one."""
        self._itl.observe_many(seconds, count)

    def count_load(self, load: messages.Load) -> None:
        """Adds an engine's counts since the last call; a new engine counts from 0."""
        for child, name in self._load_counters:
            now, before = getattr(load, name), getattr(self._last_load, name)
            if now != before:  # smaller than before: a new engine counts from 0
                child.inc(now - before if now > before else now)
        self._last_load = load

    def update_gauges(
        self,
        load: messages.Load,
        config: contract.EngineConfig,
        *,
        is_ready: bool,
        num_unguarded: int,
        num_leases: int,
        num_adapters: int = 0,
    ) -> None:
        """Sets every gauge."""
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
        metrics.host_blocks.labels(*who).set(load.host_blocks)
        metrics.kept_blocks.labels(*who).set(load.kept_blocks)
        metrics.kv_expected.labels(*who).set(load.expected_blocks / max(1, config.total_kv_blocks))
        metrics.expected_tokens.labels(*who).set(load.expected_answer_tokens)
        metrics.kv_usage.labels(*who).set(load.used_blocks / max(1, config.total_kv_blocks))
        metrics.kv_bytes.labels(*who).set(config.kv_bytes)
        metrics.kv_used_bytes.labels(*who).set(config.kv_bytes * load.used_blocks // max(1, config.total_kv_blocks))
        metrics.kv_total_blocks.labels(*who).set(config.total_kv_blocks)
        for part, size in ({} if config.memory is None else config.memory.parts()).items():
            metrics.memory_planned.labels(*who, part).set(size)
        metrics.step_age.labels(*who).set(load.step_age_ms / 1e3)
        metrics.unguarded.labels(*who).set(num_unguarded)
        metrics.adapters.labels(*who).set(num_adapters)
        metrics.kv_leases.labels(*who).set(num_leases)

    def set_loading(self, *, is_loading: bool) -> None:
        """Sets whether an engine is being started."""
        self._metrics.loading.labels(*self._own_labels).set(is_loading)

    def engine_unloaded(self) -> None:
        """Notes that there is no engine; the next one's counters start at 0."""
        self._last_load = messages.Load()
        self._metrics.ready.labels(*self._own_labels).set(0)

    def forget(self) -> None:
        """Stops exporting the replica's metrics."""
        for family in self._metrics.families():
            family.remove_by_labels({"worker_id": self._own_labels[1]})

    def request_finished(
        self,
        reason: str,
        usage: messages.Usage | None,
        timings: messages.Timings | None,
        *,
        has_failed: bool = False,
    ) -> None:
        """Observes the end of a request; durations after its start only if it got a token. `has_failed`: in a way that
        need not recur elsewhere."""
        self._metrics.finished.labels(*self._own_labels, reason).inc()
        self.failures_in_a_row = self.failures_in_a_row + 1 if has_failed else 0
        self._metrics.failures.labels(*self._own_labels).set(self.failures_in_a_row)
        if usage is None or timings is None:
            return
        self._prompt.inc(usage.prompt_tokens)
        self._e2e.observe(timings.total_ms / 1e3)
        self._queue.observe(timings.queue_ms / 1e3)
        if usage.completion_tokens:
            self._ttft.observe(timings.ttft_ms / 1e3)
            self._prefill.observe(timings.prefill_ms / 1e3)
            self._decode.observe(timings.decode_ms / 1e3)

    def client_gone(self) -> None:
        """Counts a request that is cancelled because its client is gone."""
        self._metrics.clients_gone.labels(*self._own_labels).inc()

    def blocks_fetched(self, outcome: str, num_bytes: int, seconds: float, *, was_remote_prefill: bool) -> None:
        """Observes a finished fetch of KV blocks. `was_remote_prefill`: the other worker had to compute them first."""
        metrics, own = self._metrics, self._own_labels
        metrics.kv_fetched_bytes.labels(*own).inc(num_bytes)
        if was_remote_prefill:
            metrics.remote_prefills_awaited.labels(*own, outcome).inc()
            return
        metrics.kv_fetches.labels(*own, outcome).inc()
        metrics.kv_fetch.labels(*own).observe(seconds)

    def remote_prefill_ended(self, outcome: str) -> None:
        """Counts a prompt computation for another worker by its outcome."""
        self._metrics.remote_prefills.labels(*self._own_labels, outcome).inc()

    def blocks_given(self, num_bytes: int) -> None:
        """Counts bytes of KV blocks that other workers have read."""
        self._metrics.kv_given_bytes.labels(*self._own_labels).inc(num_bytes)

    def request_refused(self, code: str) -> None:
        """Counts a refused run."""
        self._metrics.refused.labels(*self._own_labels, code).inc()

    def copies_recovered(self, recovery: RecoveredCopies) -> None:
        """Counts the copies of an earlier engine that a new one has found."""
        self._metrics.recovered_blocks.labels(*self._own_labels).inc(recovery.blocks)
        self._metrics.recovered_bytes.labels(*self._own_labels).inc(recovery.num_bytes)
        for reason, count in recovery.discarded.items():
            self._metrics.discarded_slots.labels(*self._own_labels, reason).inc(count)

    def engine_restarted(self) -> None:
        """Counts an engine that serves and is not the first."""
        self._metrics.restarts.labels(*self._own_labels).inc()

    def memory_poisoned(self) -> None:
        """Counts an engine that ends because non-finite numbers remain in its memory."""
        self._metrics.poisoned_engines.labels(*self._own_labels).inc()

    def inputs_embedded(self, count: int, num_tokens: int) -> None:
        """Counts embedded inputs and their tokens."""
        self._metrics.embeddings.labels(*self._own_labels).inc(count)
        self._metrics.embedded_tokens.labels(*self._own_labels).inc(num_tokens)

    def documents_scored(self, count: int) -> None:
        """Counts scored documents."""
        self._metrics.scored_documents.labels(*self._own_labels).inc(count)
