"""Prometheus metrics as our server processes declare them: outside any global registry, with bounded label values.

The classes are prometheus_client's. Each process declares its metrics in one file and shows them on its status page.

Decision 0032 says what they cost.
"""

import bisect
import copy
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Self

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

MAX_LABEL_VALUES = 256
"""Values of a bounded label with series of their own; a histogram has two dozen lines for each."""
OTHER = "other"

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2_560.0,
)  # fmt: skip
"""Seconds to a first token: vLLM's buckets, so that its dashboards fit."""
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1_920.0, 7_680.0,
)  # fmt: skip
"""Seconds of whole requests and their phases: vLLM's buckets."""
ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
"""Seconds from one token to the next: vLLM's buckets."""
MICROSECOND_BUCKETS = (0.000_01, 0.000_02, 0.000_05, 0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.1, 1.0)
"""Seconds of what usually takes microseconds."""


class BoundedLabel:
    """Limits the values of a label that outsiders control, such as model names on workers' cards.

    The first `capacity` values have series of their own; all others share the series `OTHER`. Metrics that share a
    BoundedLabel show the same values."""

    def __init__(self, name: str, capacity: int = MAX_LABEL_VALUES) -> None:
        self._name = name
        self._capacity = capacity
        self._values: dict[str, None] = {}
        """In the order in which they were last seen, most recent last."""
        self._metrics: list[MetricWrapperBase] = []

    def __repr__(self) -> str:
        return f"<BoundedLabel {len(self._values)} of {self._capacity} {self._name}s>"

    def __contains__(self, value: str) -> bool:
        return value in self._values

    def attach(self, metric: MetricWrapperBase) -> None:
        """Makes `metric`, which has this label, drop the series of evicted values."""
        self._metrics.append(metric)

    def clamp(self, value: str) -> str:
        """Returns `value`, or `OTHER` if there are already too many values."""
        if value in self._values:
            return value
        if len(self._values) >= self._capacity:
            return OTHER
        self._values[value] = None
        return value

    def evict_stale(self, present: Collection[str]) -> None:
        """If the label is full, drops the values that have been absent longest, but none of those in `present`."""
        for value in present:
            if value in self._values:  # moves it to the end
                self._values[value] = self._values.pop(value)
        if len(self._values) < self._capacity:
            return
        absent = [value for value in self._values if value not in present]
        for value in absent[: max(1, self._capacity // 8)]:  # several at a time: this is called at each scrape
            del self._values[value]
            for metric in self._metrics:
                metric.remove_by_labels({self._name: value})


class _Metric(MetricWrapperBase):
    def __init__(
        self,
        name: str,
        documentation: str,
        labelnames: Sequence[str] = (),
        bound: BoundedLabel | None = None,
        known: Iterable[str] = (),
        registry: CollectorRegistry | None = None,
        **options: Any,
    ) -> None:
        """`bound` limits the values of the first label. `known` are values of the last one, for `bind`."""
        super().__init__(name, documentation, labelnames, registry=registry, **options)
        self._bound = bound
        self._known: dict[tuple[str, ...], Self] = {}
        """Children by label values: prometheus_client's own lookup takes a microsecond, and each request makes
        several."""
        self._last_values = tuple(known)
        if bound is not None:
            bound.attach(self)

    def labels(self, *values: str) -> Self:  # type: ignore[override]  # prometheus_client takes them by name as well
        if self._bound is not None:
            values = (self._bound.clamp(values[0]), *values[1:])
        child = self._known.get(values)
        if child is None:
            child = self._known[values] = super().labels(*values)
        return child

    def bind(self, *values: str) -> Self:
        """Returns the child with these label values, or a view of this metric whose `labels` takes the others, and
        which shows the known values of the last label from now on."""
        if len(values) == len(self._labelnames):
            return self.labels(*values)
        view = copy.copy(self)
        view.labels = functools.partial(self.labels, *values)  # type: ignore[method-assign]
        for value in self._last_values:
            view.labels(value)
        return view

    def clear(self) -> None:
        self._known.clear()
        super().clear()

    def remove_by_labels(self, labels: dict[str, str]) -> None:
        self._known.clear()
        super().remove_by_labels(labels)


class Counter(_Metric, prometheus_client.Counter):
    """A count that only grows, shown as `NAME_total`."""


class Gauge(_Metric, prometheus_client.Gauge):
    """A value that goes up and down."""


class Histogram(_Metric, prometheus_client.Histogram):
    """A distribution of times, in seconds."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labelnames: Sequence[str],
        buckets: Sequence[float],
        bound: BoundedLabel | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name, documentation, labelnames, bound, buckets=buckets, **options)

    def observe_all(self, values: Iterable[tuple[float, int]]) -> None:
        """Observes many values, each with the number of times that it was seen."""
        # prometheus_client has no public way, and observes a value at ten times the cost of adding it up here
        total, counts = 0.0, [0] * len(self._buckets)
        for seconds, count in values:
            total += seconds * count
            counts[bisect.bisect_left(self._upper_bounds, seconds)] += count
        self._sum.inc(total)
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)


class MetricFamilies:
    """Base of the class in which a process declares all its metrics, as attributes."""

    def families(self) -> list[Counter | Gauge | Histogram]:
        """Returns the metrics in the order of their declaration."""
        return [family for family in vars(self).values() if isinstance(family, Counter | Gauge | Histogram)]


class MetricsCollector(Collector):
    """Shows the metrics of a process in a registry of its own. Calls `refresh` before each scrape, to set gauges."""

    def __init__(self, metrics: Iterable[Collector], refresh: Callable[[], None]) -> None:
        # Otherwise each counter and histogram gets an additional, useless `_created` series.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._metrics = list(metrics)
        self._refresh = refresh
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def __repr__(self) -> str:
        return f"<MetricsCollector of {len(self._metrics)} metrics>"

    def collect(self) -> Iterator[Metric]:
        self._refresh()
        for metric in self._metrics:
            yield from metric.collect()
