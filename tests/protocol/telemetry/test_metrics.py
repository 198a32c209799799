"""Metrics: what is counted is what is shown, and no client can make them grow without end."""

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tokenbus.gateway.admission.metrics import GatewayMetrics
from tokenbus.protocol.telemetry import metrics
from tokenbus.router.telemetry.metrics import RouterMetrics
from tokenbus.worker.telemetry.metrics import WorkerMetrics

BOUNDS = (0.1, 1.0, 10.0)


def shown(*families: metrics.Counter | metrics.Gauge | metrics.Histogram) -> dict[tuple[str, ...], float]:
    """Samples by name and label values, as a scraper reads them."""
    text = generate_latest(metrics.MetricsCollector(families, lambda: None).registry).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[(sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items())))] = sample.value
    return found


def test_a_counter_is_shown_with_its_labels_and_total_and_nothing_else() -> None:
    counter = metrics.Counter("apples", "Apples.", ("kind",))
    counter.labels("red").inc()
    counter.labels("red").inc(2)
    assert shown(counter) == {("apples_total", "kind=red"): 3.0}


def test_two_processes_in_one_do_not_share_metrics() -> None:
    first, second = (metrics.Histogram("t_seconds", "Times.", (), BOUNDS) for _ in range(2))
    first.observe(0.5)
    assert (shown(first)["t_seconds_count",], shown(second)["t_seconds_count",]) == (1, 0)


def test_values_that_are_observed_together_count_as_each_of_them_alone() -> None:
    single, many = (metrics.Histogram("t_seconds", "Times.", (), BOUNDS) for _ in range(2))
    seen = [(seconds, count) for count, seconds in enumerate([0.05, 0.1, 0.5, 0.1, 10.0, 99.0], start=1)]
    for seconds, count in seen:
        for _ in range(count):
            single.observe(seconds)
    many.observe_all(seen[:4])
    many.observe_all(seen[4:])
    assert shown(many) == pytest.approx(shown(single))


def test_metrics_that_share_a_bounded_label_show_the_same_values_and_the_rest_together() -> None:
    models = metrics.BoundedLabel("model", 2)
    asked = metrics.Counter("asked", "Asked.", ("model", "code"), models)
    times = metrics.Histogram("t_seconds", "Times.", ("model",), BOUNDS, models)
    for model in ("a", "b"):
        asked.labels(model, "ok").inc()
    for model in ("c", "d", "a"):
        times.labels(model).observe(0.5)
        asked.labels(model, "bad").inc()
    counts = {key[1]: value for key, value in shown(times).items() if key[0] == "t_seconds_count"}
    assert counts == {f"model={metrics.OTHER}": 2.0, "model=a": 1.0}
    assert shown(asked)["asked_total", "code=bad", f"model={metrics.OTHER}"] == 2.0


def test_values_that_have_been_away_longest_make_room_and_those_that_are_there_stay() -> None:
    models = metrics.BoundedLabel("model", 16)
    counter = metrics.Counter("requests", "Requests.", ("model",), models)
    for number in range(16):
        counter.labels(f"m{number}").inc()
    models.evict_stale({"m0"})
    assert [name for name in ("m0", "m1", "m2", "m3") if name in models] == ["m0", "m3"]
    assert ("requests_total", "model=m1") not in shown(counter)
    assert [models.clamp(name) for name in ("x", "y", "z")] == ["x", "y", metrics.OTHER]
    models.evict_stale({"m3"})
    assert [name for name in ("m3", "m4", "m5", "m6") if name in models] == ["m3", "m6"]
    there = {name for number in range(16) if (name := f"m{number}") in models} | {"x", "y"}
    models.evict_stale(there)
    assert all(name in models for name in there)


def lines(families: list[metrics.Counter | metrics.Gauge | metrics.Histogram]) -> int:
    return sum(len(metric.samples) for family in families for metric in family.collect())


def test_a_router_shows_few_of_thousands_of_models_and_those_that_serve_on() -> None:
    router = RouterMetrics()
    router.show_models({"real"}, ["real"])
    router.received.labels("real").inc()
    for wave in range(10):
        forged = {f"forged-{wave}-{number}" for number in range(600)}
        router.show_models({"real", *forged}, ["real", *forged])
        for model in forged:
            router.received.labels(model).inc()
            router.queue_wait.labels(model).observe(1.0)
        assert lines(router.families()) < 12_000
    assert shown(router.received)["tokenbus_router_requests_total", "model=real"] == 1.0
    assert sum(shown(router.received).values()) <= 6_001
    router.show_models({"real"}, ["real"])
    router.show_models({"real", "late"}, ["real", "late"])
    router.received.labels("late").inc()
    assert shown(router.received)["tokenbus_router_requests_total", "model=late"] == 1.0


@pytest.mark.parametrize(
    "declared", [WorkerMetrics().families(), RouterMetrics().families(), GatewayMetrics().families()]
)
def test_every_metric_is_named_as_prometheus_wants_it_once_and_explained(
    declared: list[metrics.Counter | metrics.Gauge | metrics.Histogram],
) -> None:
    described = [metric for family in declared for metric in family.describe()]
    assert len({metric.name for metric in described}) == len(declared)
    for metric in described:
        assert metric.name.startswith(("tokenbus_worker_", "tokenbus_router_", "tokenbus_gateway_"))
        assert metric.documentation.endswith((".", ")."))
        assert (metric.type == "histogram") <= metric.name.endswith("_seconds")


def test_a_series_that_was_removed_counts_from_zero_again() -> None:
    counter = metrics.Counter("apples", "Apples.", ("kind", "tree"))
    for remove in (counter.clear, lambda: counter.remove_by_labels({"kind": "red"})):
        counter.labels("red", "old").inc(2)
        remove()
        assert shown(counter) == {}
        counter.labels("red", "old").inc()
        assert shown(counter)["apples_total", "kind=red", "tree=old"] == 1.0
