"""A worker's metrics under vLLM's names: the same numbers, counted once."""

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tokenbus.protocol.telemetry import metrics
from tokenbus.protocol.wire import messages
from tokenbus.worker.telemetry import vllm_metric_aliases
from tokenbus.worker.telemetry.metrics import ReplicaMetrics, WorkerMetrics

SAME = {
    "num_requests_running": "requests_running",
    "num_requests_waiting": "requests_waiting",
    "kv_cache_usage_perc": "kv_usage_ratio",
    "prompt_tokens_total": "prompt_tokens_total",
    "generation_tokens_total": "generation_tokens_total",
    "prefix_cache_queries_total": "prefix_cache_queries_tokens_total",
    "prefix_cache_hits_total": "prefix_cache_hits_tokens_total",
    "num_preemptions_total": "preemptions_total",
} | {
    f"{name}_seconds_{part}": f"{name.removeprefix('request_') if 'e2e' not in name else name}_seconds_{part}"
    for part in ("bucket", "sum", "count")
    for name in (
        "time_to_first_token",
        "inter_token_latency",
        "request_time_per_output_token",
        "e2e_request_latency",
        "request_queue_time",
        "request_prefill_time",
        "request_decode_time",
    )
}
"""vLLM's names, and ours."""

Samples = dict[str, list[tuple[list[str], float]]]


def read(counted: WorkerMetrics) -> Samples:
    """Model, worker, what else tells samples apart, and value, by the name of the sample, as a scraper reads them."""
    page = metrics.MetricsCollector([*counted.families(), *vllm_metric_aliases.aliases(counted)], lambda: None)
    found: Samples = {}
    for family in text_string_to_metric_families(generate_latest(page.registry).decode()):
        for sample in family.samples:
            own = sample.labels
            if not {"model", "model_name"} & own.keys():  # of the process, and no replica's
                continue
            who = [own.get("model") or own["model_name"], own.get("worker_id") or own["engine"]]
            kinds = [own[label] for label in ("le", "finished_reason") if label in own]
            found.setdefault(sample.name, []).append((who + kinds, sample.value))
    return found


def busy(counted: WorkerMetrics) -> list[ReplicaMetrics]:
    """Two replicas of one model that have each done something."""
    replicas = [ReplicaMetrics(counted, "m", worker_id) for worker_id in ("W-1", "W-2")]
    for number, replica in enumerate(replicas, 1):
        prompt = 10 * number
        usage = messages.Usage(prompt_tokens=prompt, completion_tokens=2, cached_tokens=0, total_tokens=prompt + 2)
        timings = messages.Timings(queue_ms=1, prefill_ms=20, ttft_ms=21, decode_ms=30 * number, total_ms=60)
        replica.request_finished("stop", usage, timings)
        replica.token_interval(0.03 * number, 1)
        replica.add_up()
        replica.count_load(messages.Load(generated_tokens=2 * number, prompt_tokens=10, cached_tokens=number))
        replica.running.set(number)
        replica.waiting.set(number + 3)
        replica.kv_usage.set(number / 8)
    return replicas


def test_every_alias_has_the_samples_of_our_metric_for_each_replica() -> None:
    busy(counted := WorkerMetrics())
    found = read(counted)
    for theirs, ours in SAME.items():
        assert found[f"vllm:{theirs}"] == found[f"tokenbus_worker_{ours}"], theirs
        assert {values[1] for values, _ in found[f"vllm:{theirs}"]} == {"W-1", "W-2"}
    assert {name for name in found if name.startswith("vllm:")} == {
        "vllm:request_success_total",
        *(f"vllm:{theirs}" for theirs in SAME),
    }


def test_finish_reasons_that_vllm_lacks_are_counted_as_its_own() -> None:
    replica, _ = busy(counted := WorkerMetrics())
    for reason in ("tool_calls", "length", "cancelled", "error", "abandoned"):
        replica.request_finished(reason, None, None)
    ended = {tuple(values): value for values, value in read(counted)["vllm:request_success_total"] if "W-1" in values}
    assert ended == {("m", "W-1", "stop"): 2, ("m", "W-1", "length"): 1, ("m", "W-1", "abort"): 2} | {
        ("m", "W-1", "error"): 1
    }


def test_a_replica_that_is_drained_has_no_aliases() -> None:
    replica, _ = busy(counted := WorkerMetrics())
    replica.forget()
    found = read(counted)
    assert all("W-1" not in values for samples in found.values() for values, _ in samples)
    assert found["vllm:prompt_tokens_total"] == [(["m", "W-2"], 20.0)]
