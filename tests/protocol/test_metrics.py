"""Metrics: what is counted is what is shown, and no client can make them grow without end."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tokenbus.gateway.metrics import GatewayMetrics
from tokenbus.protocol.telemetry import metrics
from tokenbus.router.metrics import RouterMetrics
from tokenbus.worker.frontend.metrics import WorkerMetrics

BOUNDS = (0.1, 1.0, 10.0)


def shown(*families: metrics.Counter | metrics.Gauge | metrics.Histogram) -> dict[tuple[str, ...], float]:
    """Samples by name and label values, as a scraper reads them."""
    text = generate_latest(metrics.MetricsCollector(families, lambda: None).registry).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[(sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items())))] = sample.value
    return found


def test_a_counter_is_shown_with_its_labels_and_total() -> None:
    counter = metrics.Counter("apples", "Apples.", ("kind",))
    counter.labels("red").inc()
    counter.labels("red").inc(2)
    assert shown(counter) == {("apples_total", "kind=red"): 3.0}


@given(st.lists(st.floats(0, 100)))
def test_a_histogram_counts_every_value_in_each_bucket_that_is_not_below_it(values: list[float]) -> None:
    histogram = metrics.Histogram("t_seconds", "Times.", (), BOUNDS)
    child = histogram.labels()
    for value in values:
        child.observe(value)
    found = shown(histogram)
    for bound in (*BOUNDS, math.inf):
        name = "+Inf" if bound == math.inf else str(bound)
        assert found["t_seconds_bucket", f"le={name}"] == sum(value <= bound for value in values)
    assert found["t_seconds_count",] == len(values)
    assert found["t_seconds_sum",] == pytest.approx(sum(values))


def test_several_equal_values_are_one_call() -> None:
    histogram = metrics.Histogram("t_seconds", "Times.", (), BOUNDS)
    histogram.labels().observe(0.5, 64)
    assert shown(histogram)["t_seconds_count",] == 64


def test_label_values_beyond_the_limit_are_counted_together() -> None:
    counter = metrics.Counter("requests", "Requests.", ("model",))
    for number in range(metrics.MAX_CHILDREN + 50):
        counter.labels(f"model-{number}").inc()
    found = shown(counter)
    assert found["requests_total", f"model={metrics.OTHER}"] == 50
    assert len(found) == metrics.MAX_CHILDREN + 1


def test_families_that_share_names_show_the_same_ones_and_the_rest_together() -> None:
    names = metrics.BoundedLabel(2)
    asked = metrics.Counter("asked", "Asked.", ("model", "code"), names)
    times = metrics.Histogram("t_seconds", "Times.", ("model",), BOUNDS, names)
    for model in ("a", "b"):
        asked.labels(model, "ok").inc()
    for model in ("c", "d", "a"):
        times.labels(model).observe(0.5)
        asked.labels(model, "bad").inc()
    counts = {key[1]: value for key, value in shown(times).items() if key[0] == "t_seconds_count"}
    assert counts == {f"model={metrics.OTHER}": 2.0, "model=a": 1.0}
    assert shown(asked)["asked_total", "code=bad", f"model={metrics.OTHER}"] == 2.0


def test_names_that_have_been_away_longest_make_room_and_those_that_are_there_stay() -> None:
    names = metrics.BoundedLabel(16)
    for number in range(16):
        assert names.clamp(f"m{number}") == f"m{number}"
    assert names.evict_stale({"m0"}) == ["m1", "m2"]
    assert [names.clamp(name) for name in ("x", "y", "z")] == ["x", "y", metrics.OTHER]
    assert names.evict_stale({"m3"}) == ["m4", "m5"]
    there = {name for number in range(16) if (name := f"m{number}") in names} | {"x", "y"}
    assert names.evict_stale(there) == []


def lines(families: list[metrics.Counter | metrics.Gauge | metrics.Histogram]) -> int:
    return sum(len(family.collect().samples) for family in families)


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


def test_somebody_who_is_forgotten_is_shown_no_more() -> None:
    counter = metrics.Counter("requests", "Requests.", ("model", "worker_id"))
    counter.labels("m", "one").inc()
    counter.labels("m", "two").inc()
    counter.remove_by_label("worker_id", "one")
    assert shown(counter) == {("requests_total", "model=m", "worker_id=two"): 1.0}


@pytest.mark.parametrize(
    "declared", [WorkerMetrics().families(), RouterMetrics().families(), GatewayMetrics().families()]
)
def test_every_metric_is_named_as_prometheus_wants_it_once_and_explained(
    declared: list[metrics.Counter | metrics.Gauge | metrics.Histogram],
) -> None:
    assert len({family.name for family in declared}) == len(declared)
    for family in declared:
        assert family.name.startswith(("tokenbus_worker_", "tokenbus_router_", "tokenbus_gateway_"))
        assert family.help_text.endswith((".", ")."))
        assert isinstance(family, metrics.Histogram) <= family.name.endswith("_seconds")
        assert not family.name.endswith("_total"), "the library adds it"
