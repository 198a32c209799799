"""Exports a worker's metrics under vLLM's names too, so that dashboards and autoscalers made for vLLM can read them."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenbus.protocol.telemetry.metrics import Counter, Gauge, Histogram
from tokenbus.protocol.wire.messages import FinishReason
from tokenbus.worker.telemetry.metrics import WorkerMetrics

_LABELS = {"model": "model_name", "worker_id": "engine"}
"""vLLM's names for our labels. Its `engine` numbers the engines of a process; here it is the worker's id."""
_REASONS: dict[str, str] = {
    FinishReason.STOP: "stop",
    FinishReason.TOOL_CALLS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ERROR: "error",
}
_OTHER_REASON = "abort"
"""vLLM's word for a request that was cancelled or abandoned."""


class _Alias(Collector):
    """Shows a metric under another name, with vLLM's label names."""

    def __init__(self, name: str, metric: Counter | Gauge | Histogram) -> None:
        self._name = name
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        for metric in self._metric.collect():
            alias = Metric(self._name, metric.documentation, metric.type)
            for sample in metric.samples:
                labels = {_LABELS.get(label, label): value for label, value in sample.labels.items()}
                alias.add_sample(self._name + sample.name.removeprefix(metric.name), labels, sample.value)
            yield alias


class _RequestSuccess(Collector):
    """Shows how many requests ended with each of vLLM's finish reasons, which are fewer than ours."""

    def __init__(self, finished: Counter) -> None:
        self._finished = finished

    def collect(self) -> Iterator[Metric]:
        for metric in self._finished.collect():
            counts: dict[tuple[str, str, str], float] = {}
            for sample in metric.samples:
                reason = _REASONS.get(sample.labels["finish_reason"], _OTHER_REASON)
                key = sample.labels["model"], sample.labels["worker_id"], reason
                counts[key] = counts.get(key, 0.0) + sample.value
            labels = (*_LABELS.values(), "finished_reason")
            success = CounterMetricFamily("vllm:request_success", metric.documentation, labels=labels)
            for key, count in counts.items():
                success.add_metric(key, count)
            yield success


def aliases(of: WorkerMetrics) -> list[Collector]:
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
        _Alias("vllm:request_time_per_output_token_seconds", of.tpot),
        _Alias("vllm:e2e_request_latency_seconds", of.e2e),
        _Alias("vllm:request_queue_time_seconds", of.queue),
        _Alias("vllm:request_prefill_time_seconds", of.prefill),
        _Alias("vllm:request_decode_time_seconds", of.decode),
        _RequestSuccess(of.finished),
    ]
