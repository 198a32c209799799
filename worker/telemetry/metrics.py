"""Every metric of a worker process, declared once. Names follow vLLM's where vLLM has the metric."""

from collections.abc import Iterable

from tokenbus.protocol.access.audit_log import LOST, STORED
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
from tokenbus.worker.contract.contract import RecoveredCopies
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine_client.listener import Observation

_LABELS = ("model", "worker_id")
FETCH_OUTCOMES = (
    "complete", "partial", "timeout", "failed", "nothing", "busy", "lost", "evicted", "corrupt", "refused"
)  # fmt: skip
"""The outcomes of a fetch of blocks: all blocks, some, or none for a reason."""
_MAX_NEW_STEPS = 1_024
"""Steps that wait to be counted."""
_ON_DEMAND = ("memory_budget", "memory_reserved", "model_load_seconds")
"""The metrics that are shown only for models on demand."""
_OF_PROCESS = "audit_records"
"""The metric of the whole process, without the labels of a replica."""


class WorkerMetrics(MetricFamilies):
    """Metric families, labelled by `model` and `worker_id`, since a process may hold several replicas."""

    def __init__(self) -> None:
        # further labels are named with the values that are exported as 0 from the start: without them, the first
        # increase of each would go unseen
        def gauge(name: str, text: str, **labels: Iterable[str]) -> Gauge:
            return Gauge(f"tokenbus_worker_{name}", text, (*_LABELS, *labels), known=_only(labels))

        def counter(name: str, text: str, **labels: Iterable[str]) -> Counter:
            return Counter(f"tokenbus_worker_{name}", text, (*_LABELS, *labels), known=_only(labels))

        def histogram(name: str, text: str, buckets: tuple[float, ...], **labels: Iterable[str]) -> Histogram:
            return Histogram(f"tokenbus_worker_{name}", text, (*_LABELS, *labels), buckets, known=_only(labels))

        self.info = gauge(
            "info",
            "Always 1; the labels name the model that a worker serves and its engine.",
            engine=(),
            engine_version=(),
            source=(),
        )
        self.ready = gauge("ready", "1 while the worker accepts requests.")
        self.running = gauge("requests_running", "Running requests, each in a lane of the engine.")
        self.waiting = gauge("requests_waiting", "Accepted requests that wait for a lane.")
        self.max_running = gauge("max_num_seqs", "Requests that can run at once.")
        self.queued_prefill = gauge("queued_prefill_tokens", "Prompt tokens that are not yet computed.")
        self.kv_blocks = gauge(
            "kv_blocks", "Blocks on the device, by state: used, cached (used by no request) or free.", state=()
        )
        self.logits = gauge(
            "logits",
            "Mean, smallest and largest logit of a row; about one row a second is examined.",
            stat=("mean", "smallest", "largest"),
        )
        self.non_finite_logits = counter(
            "non_finite_logits",
            "Logits found to be nan, inf or, in rows with any of these, -inf, by kind.",
            kind=("nan", "inf", "-inf"),
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
            device=(),
            state=(),
        )
        self.resident = gauge(
            "resident_bytes", "Resident memory of the worker's processes, `front` and `engine`, in bytes.", process=()
        )
        self.uptime = gauge("uptime_seconds", "Time since a process started; 0 if there is no engine.", process=())
        self.kv_pool = gauge(
            "kv_pool_bytes", "KV memory that a process's workers share: held, share, cap, and budget of all.", part=()
        )
        self.kv_reclaimed = counter(
            "kv_reclaimed_bytes", "KV memory given up for other workers: idle or of preempted sequences.", kind=()
        )
        self.memory_planned = gauge("memory_planned_bytes", "Memory that the engine is planned to take.", part=())
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
            kind=("restored", "recomputed"),
        )
        self.ahead_tokens = counter(
            "next_turn_tokens", "Tokens of next turns computed while idle, and those used.", event=("computed", "used")
        )
        self.transferred = counter(
            "kv_transferred_bytes",
            "Keys and values copied between device and host memory, by direction: offload or onload.",
            direction=("offload", "onload"),
        )
        self.checkpoints = counter(
            "checkpoints",
            "Checkpoints of models whose state can't be cut at a token, by event: saved, restored or evicted.",
            event=("saved", "restored", "evicted"),
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
            reason=("torn",),
        )
        self.poisoned = counter(
            "poisoned_shares", "Sequences' parts of steps discarded because their numbers were NaN or infinite."
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
            finish_reason=(*messages.FinishReason, "stopped"),
        )
        self.failures = gauge(
            "failures_in_a_row", "Requests since the last success that ended in an error that need not recur elsewhere."
        )
        self.clients_gone = counter("clients_gone", "Requests cancelled because their client was gone.")
        self.held = gauge("streams_held", "Open streams that nothing is published for, since a link may be down.")
        self.held_streams = counter(
            "held_streams", "Streams held because their client or their router was out of reach."
        )
        self.released_streams = counter("released_streams", "Held streams that have flowed again.")
        self.refused = counter("refusals", "Refused runs, by error code.", code=errors.Code)
        self.constrained = counter(
            "constrained_requests",
            "Requests with constrained output, by the language of the constraint.",
            kind=engine_request.ConstraintKind,
        )
        self.compile = histogram("constraint_compile_seconds", "Time to compile a request's constraint.", TTFT_BUCKETS)
        self.constraint_refusals = counter(
            "constraint_refusals",
            "Refused constraints: invalid, taking too much time or memory to compile (too_costly), or "
            "during generation (given_up).",
            reason=("invalid", "too_costly", "given_up"),
        )
        self.follower_tokens = counter(
            "follower_tokens", "Tokens that followed with certainty from sampled ones and were not sampled."
        )
        self.tool_calls = counter(
            "tool_calls", "Tool calls in answers, by whether they were complete.", complete=("true", "false")
        )
        self.reasoning_tokens = counter("reasoning_tokens", "Tokens of completions that belong to the reasoning.")
        self.reasoning_budgets_spent = counter(
            "reasoning_budgets_spent", "Answers whose reasoning was closed because its budget was spent."
        )
        self.kv_fetches = counter(
            "kv_fetches", "Fetches of KV blocks from other workers, by outcome.", outcome=FETCH_OUTCOMES
        )
        self.kv_refused_blocks = counter(
            "kv_refused_blocks", "Fetched blocks that were not cached because one of them holds unusable numbers."
        )
        self.kv_fetched_bytes = counter("kv_fetched_bytes", "Bytes of KV blocks fetched from other workers.")
        self.kv_given_bytes = counter("kv_given_bytes", "Bytes of KV blocks read by other workers.")
        self.kv_fetch = histogram("kv_fetch_seconds", "Duration of fetches of KV blocks.", TTFT_BUCKETS)
        self.remote_prefills = counter(
            "remote_prefills",
            "Prompts computed for other workers, by outcome: complete, cancelled or failed.",
            outcome=("complete", "cancelled", "failed"),
        )
        self.remote_prefills_awaited = counter(
            "remote_prefills_awaited",
            "Prompts that another worker should compute for this one, by outcome.",
            outcome=FETCH_OUTCOMES,
        )
        self.loading = gauge("loading", "1 while an engine is being started.")
        self.model_loads = counter("model_loads", "Loads of models on demand, by outcome: ok or failed.", outcome=())
        self.model_unloads = counter(
            "model_unloads", "Unloaded models, by reason: idle, room for another, or an operator.", reason=()
        )
        self.model_load_seconds = histogram(
            "model_load_seconds", "From the decision to load a model on demand until it serves.", REQUEST_BUCKETS
        )
        self.model_state = gauge(
            "model_state", "1 for the state of an on-demand model: unloaded, loading, loaded or unloading.", state=()
        )
        self.memory_budget = gauge(
            "memory_budget_bytes", "Memory that all on-demand models of the process may take together; 0: what is free."
        )
        self.memory_reserved = gauge(
            "memory_reserved_bytes", "Memory that an on-demand model is expected to take; 0 while it is not loaded."
        )
        self.audit_records = Counter(
            "tokenbus_worker_audit_records", "Records for the audit log, by outcome: stored or lost.", ("outcome",)
        )
        for outcome in (STORED, LOST):
            self.audit_records.labels(outcome)
        self.kv_leases = gauge("kv_leases", "Workers that are reading KV blocks here.")
        self.embeddings = counter("embeddings", "Embedded inputs.")
        self.embedded_tokens = counter("embedded_tokens", "Tokens of embedded inputs.")
        self.scored_documents = counter("scored_documents", "Scored documents.")
        self.steps = histogram(
            "step_seconds", "Duration of steps, by kind: prefill, decode or mixed.", ITL_BUCKETS, kind=ipc.StepKind
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
        self.tpot = histogram(
            "time_per_output_token_seconds",
            "Of each request: from the first token to its end, divided by the tokens after the first.",
            ITL_BUCKETS,
        )
        self.queue = histogram("queue_time_seconds", "From the accept to the first step.", REQUEST_BUCKETS)
        self.prefill = histogram("prefill_time_seconds", "From the first step to the first token.", REQUEST_BUCKETS)
        self.decode = histogram("decode_time_seconds", "From the first token to the last.", REQUEST_BUCKETS)
        self.e2e = histogram("e2e_request_latency_seconds", "From the accept to the terminal.", REQUEST_BUCKETS)


def _only(labels: dict[str, Iterable[str]]) -> Iterable[str]:
    """Returns the known values of a metric's last label, if it has one of its own."""
    return next(reversed(labels.values()), ())


class ReplicaMetrics(WorkerMetrics):
    """The same metrics for one replica: each has the replica's labels, so that `labels` takes the others only."""

    def __init__(self, families: WorkerMetrics, model: str, worker_id: str) -> None:
        self._families = families
        self._worker_id = worker_id
        for name, family in vars(families).items():
            if name not in (*_ON_DEMAND, _OF_PROCESS):
                setattr(self, name, family.bind(model, worker_id))
        self._devices: set[str] = set()
        """The devices whose memory is exported."""
        self._last_load = messages.Load()
        self.failures_in_a_row = 0
        """The requests that have failed here since the last success."""
        self._new_steps: list[ipc.StepStats] = []
        """Steps that are not in the metrics yet."""
        self._new_intervals: list[tuple[float, int]] = []
        """Times between tokens, in seconds, that are not in the metrics yet, and how many requests had each."""
        self._step_counters = [
            (self.preemptions, "preemptions"),
            (self.preempted_tokens.labels("restored"), "restored_tokens"),
            (self.preempted_tokens.labels("recomputed"), "recomputed_tokens"),
            (self.evicted, "evicted_blocks"),
            (self.transferred.labels("offload"), "offloaded_bytes"),
            (self.transferred.labels("onload"), "onloaded_bytes"),
            (self.follower_tokens, "follower_tokens"),
            (self.checkpoints.labels("saved"), "saved_checkpoints"),
            (self.checkpoints.labels("restored"), "restored_checkpoints"),
            (self.checkpoints.labels("evicted"), "evicted_checkpoints"),
            (self.poisoned, "poisoned_shares"),
            (self.ahead_tokens.labels("computed"), "ahead_tokens"),
            (self.ahead_tokens.labels("used"), "used_ahead_tokens"),
        ]
        self._load_counters = [
            (self.generation_tokens, "generated_tokens"),
            (self.computed_tokens, "computed_tokens"),
            (self.cache_queries, "prompt_tokens"),
            (self.cache_hits, "cached_tokens"),
        ]

    def __repr__(self) -> str:
        return f"<ReplicaMetrics of {self._worker_id}>"

    def observe(self, seen: Observation) -> None:
        """Counts what an engine reports."""
        match seen:
            case ipc.StepStats():
                self._new_steps.append(seen)
                if len(self._new_steps) >= _MAX_NEW_STEPS:
                    self.add_up()
            case ipc.KvPoolStats():
                for part in ("held", "share", "cap", "budget"):
                    self.kv_pool.labels(part).set(getattr(seen, part))
                self.kv_reclaimed.labels("idle").inc(seen.reclaimed_idle)
                self.kv_reclaimed.labels("preempted").inc(seen.reclaimed_used)
            case ipc.ConstraintCompiled():
                self.compile.observe(seen.seconds)
                if seen.problem is not None:
                    self.constraint_refusals.labels("too_costly" if seen.is_too_costly else "invalid").inc()
            case ipc.BlocksRefused(count):
                self.kv_refused_blocks.inc(count)
            case ipc.MemoryPoisoned():
                self.poisoned_engines.inc()
            case RecoveredCopies():
                self.recovered_blocks.inc(seen.blocks)
                self.recovered_bytes.inc(seen.num_bytes)
                for reason, num_slots in seen.discarded.items():
                    self.discarded_slots.labels(reason).inc(num_slots)

    def token_interval(self, seconds: float, count: int) -> None:
        """Counts `count` requests that got a token, each `seconds` after its previous one."""
        self._new_intervals.append((seconds, count))
        if len(self._new_intervals) >= _MAX_NEW_STEPS:
            self.add_up()

    def add_up(self) -> None:
        """Moves what steps have reported into the metrics. Call it before these are read, and a few times a second.

        A busy worker has hundreds of steps a second, and everything that prometheus_client adds up takes it as long as
        a token."""
        steps, self._new_steps = self._new_steps, []
        intervals, self._new_intervals = self._new_intervals, []
        if intervals:
            self.itl.observe_all(intervals)
        if not steps:
            return
        for kind in {one.kind for one in steps}:
            self.steps.labels(kind).observe_all([(one.seconds, 1) for one in steps if one.kind is kind])
        self.inference_seconds.inc(sum([one.seconds for one in steps]))
        self.idle_seconds.inc(sum([one.gap_s for one in steps]))
        self.checkpoint_bytes.set(steps[-1].checkpoint_bytes)
        if (logits := next((one.logits for one in reversed(steps) if one.logits is not None), None)) is not None:
            for stat in ("mean", "smallest", "largest"):
                self.logits.labels(stat).set(getattr(logits, stat))
        for place, value in enumerate(("nan", "inf", "-inf")):
            if count := sum([one.non_finite_logits[place] for one in steps]):
                self.non_finite_logits.labels(value).inc(count)
        for child, name in self._step_counters:
            if count := sum([getattr(one, name) for one in steps]):
                child.inc(count)

    def count_load(self, load: messages.Load) -> None:
        """Adds an engine's counts since the last call; a new engine counts from 0."""
        for child, name in self._load_counters:
            now, before = getattr(load, name), getattr(self._last_load, name)
            if now != before:  # smaller than before: a new engine counts from 0
                child.inc(now - before if now > before else now)
        self._last_load = load

    def update_gauges(self, load: messages.Load, config: contract.EngineConfig) -> None:
        """Sets every gauge that follows from an engine's load and configuration."""
        self.count_load(load)
        self.info.labels(config.engine, config.engine_version, config.source).set(1)
        self.running.set(load.running)
        self.waiting.set(load.waiting)
        self.max_running.set(config.max_num_seqs)
        self.queued_prefill.set(load.queued_prefill_tokens)
        self.kv_blocks.labels("used").set(load.used_blocks)
        self.kv_blocks.labels("cached").set(load.cached_blocks)
        self.kv_blocks.labels("free").set(load.free_blocks)
        self.host_blocks.set(load.host_blocks)
        self.kept_blocks.set(load.kept_blocks)
        total_blocks = max(1, config.total_kv_blocks)
        self.kv_expected.set(load.expected_blocks / total_blocks)
        self.expected_tokens.set(load.expected_answer_tokens)
        self.kv_usage.set(load.used_blocks / total_blocks)
        self.kv_bytes.set(config.kv_bytes)
        self.kv_used_bytes.set(config.kv_bytes * load.used_blocks // total_blocks)
        self.kv_total_blocks.set(config.total_kv_blocks)
        for part, size in ({} if config.memory is None else config.memory.parts()).items():
            self.memory_planned.labels(part).set(size)
        self.step_age.set(load.step_age_ms / 1e3)

    def update_health(self, health: messages.WorkerHealth) -> None:
        """Sets the gauges of memory and uptime, and stops exporting the memory of devices that have vanished."""
        names = {device.name for device in health.devices}
        for gone in self._devices - names:
            self._families.device_memory.remove_by_labels({"worker_id": self._worker_id, "device": gone})
        self._devices = names
        for device in health.devices:
            self.device_memory.labels(device.name, "used").set(device.total_bytes - device.free_bytes)
            self.device_memory.labels(device.name, "free").set(device.free_bytes)
        self.resident.labels("front").set(health.front_bytes)
        self.resident.labels("engine").set(health.engine_bytes)
        self.uptime.labels("front").set(health.uptime_s)
        self.uptime.labels("engine").set(health.engine_uptime_s)

    def engine_unloaded(self) -> None:
        """Notes that there is no engine; the next one's counters start at 0."""
        self._last_load = messages.Load()
        self.ready.set(0)

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
        self.finished.labels(reason).inc()
        self.failures_in_a_row = self.failures_in_a_row + 1 if has_failed else 0
        self.failures.set(self.failures_in_a_row)
        if usage is None or timings is None:
            return
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.e2e.observe(timings.total_ms / 1e3)
        self.queue.observe(timings.queue_ms / 1e3)
        if usage.completion_tokens:
            self.ttft.observe(timings.ttft_ms / 1e3)
            self.prefill.observe(timings.prefill_ms / 1e3)
            self.decode.observe(timings.decode_ms / 1e3)
        if usage.completion_tokens > 1:
            self.tpot.observe(timings.decode_ms / 1e3 / (usage.completion_tokens - 1))

    def forget(self) -> None:
        """Stops exporting the replica's metrics."""
        for family in self._families.families():
            if family is not self._families.audit_records:
                family.remove_by_labels({"worker_id": self._worker_id})
