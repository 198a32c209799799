"""What a dashboard is made of."""

from typing import Literal, NamedTuple

Shape = Literal["timeseries", "stacked", "stat", "heatmap", "table"]


class Query(NamedTuple):
    """An expression for Prometheus."""

    expr: str
    legend: str = ""
    """How Grafana names each series, as `{{model}}`."""


class Panel(NamedTuple):
    """One picture."""

    title: str
    """What one sees: a part of a sentence."""
    description: str
    """What it means, and what to do when it looks bad."""
    unit: str
    """One of Grafana's."""
    queries: tuple[Query, ...]
    shape: Shape = "timeseries"


class Row(NamedTuple):
    """Panels that belong together."""

    title: str
    panels: tuple[Panel, ...]


class Variable(NamedTuple):
    """What the reader of a dashboard can choose: any of the values of a label."""

    name: str
    label: str
    of: str
    """The series whose values are offered."""


class Dashboard(NamedTuple):
    """One page."""

    name: str
    """Of its file."""
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]


MODEL = Variable("model", "model", "tokenbus_router_workers")
WORKER = Variable("worker", "worker_id", 'tokenbus_worker_info{model=~"$model"}')
ROUTER = Variable("router", "instance", "tokenbus_router_ready")
