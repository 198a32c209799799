"""Exports a worker's metrics under vLLM's names too, so that dashboards and autoscalers made for vLLM can read them."""

from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from tokenbus.protocol.telemetry.metrics import Counter, Gauge, Histogram
from tokenbus.protocol.wire.messages import FinishReason
from tokenbus.worker.frontend.metrics import WorkerMetrics

_LABELS = ("model_name", "engine")
"""vLLM's labels. `engine`, which is an engine's number in vLLM, is the worker's id."""
_REASONS: dict[str, str] = {
    FinishReason.STOP: "stop",
    FinishReason.TOOL_CALLS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ERROR: "error",
}
_OTHER_REASON = "abort"
"""vLLM's word for a request that was cancelled or abandoned."""


class _Alias(NamedTuple):
    """Another name for a family, whose values it reads at each scrape."""

    name: str
    family: Counter | Gauge | Histogram

    def collect(self) -> Metric:
        name, text = self.name, self.family.help_text
        if isinstance(self.family, Histogram):
            times = HistogramMetricFamily(name, text, labels=_LABELS)
            for values, child in self.family.children():
                times.add_metric(values, child.buckets(), child.total)
            return times
        numbers = CounterMetricFamily if isinstance(self.family, Counter) else GaugeMetricFamily
        shown = numbers(name, text, labels=_LABELS)
        for values, number in self.family.children():
            shown.add_metric(values, number.value)
        return shown


class _RequestSuccess(NamedTuple):
    """Requests that have ended, by vLLM's finish reasons, of which there are fewer."""

    family: Counter

    def collect(self) -> Metric:
        counts: dict[tuple[str, ...], float] = {}
        for (model, worker_id, reason), child in self.family.children():
            own = (model, worker_id, _REASONS.get(reason, _OTHER_REASON))
            counts[own] = counts.get(own, 0.0) + child.value
        shown = CounterMetricFamily("vllm:request_success", self.family.help_text, labels=(*_LABELS, "finished_reason"))
        for values, value in counts.items():
            shown.add_metric(values, value)
        return shown


def aliases(of: WorkerMetrics) -> "list[_Alias | _RequestSuccess]":
    """Returns the aliases, which count nothing themselves."""
    return [
        _Alias("vllm:num_requests_running", of.running),
        _Alias("vllm:num_requests_waiting", of.waiting),
        _Alias("vllm:kv_cache_usage_perc", of.kv_usage),
        _Alias("vllm:prompt_tokens", of.prompt_tokens),
        _Alias("vllm:generation_tokens", of.generation_tokens),
        _Alias("vllm:prefix_cache_queries", of.cache_queries),
        _Alias("vllm:prefix_cache_hits", of.cache_hits),
        _Alias("vllm:num_preemptions", of.preemptions),
        _Alias("vllm:time_to_first_token_seconds", of.ttft),
        _Alias("vllm:inter_token_latency_seconds", of.itl),
        _Alias("vllm:e2e_request_latency_seconds", of.e2e),
        _Alias("vllm:request_queue_time_seconds", of.queue),
        _Alias("vllm:request_prefill_time_seconds", of.prefill),
        _Alias("vllm:request_decode_time_seconds", of.decode),
        _RequestSuccess(of.finished),
    ]
