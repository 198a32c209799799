"""The parts of a dashboard, independent of Grafana's JSON."""

from typing import Literal, NamedTuple

Shape = Literal["timeseries", "stacked", "stat", "heatmap", "table"]


class Query(NamedTuple):
    """An expression for Prometheus."""

    expr: str
    legend: str = ""
    """The name of each series, such as `{{model}}`."""


class Panel(NamedTuple):
    """One graph, number or table."""

    title: str
    """A noun phrase that names what is shown."""
    description: str
    """The meaning of the panel, and what to do about bad values."""
    unit: str
    """A unit of Grafana."""
    queries: tuple[Query, ...]
    shape: Shape = "timeseries"


class Row(NamedTuple):
    """Panels that belong together."""

    title: str
    panels: tuple[Panel, ...]


class Variable(NamedTuple):
    """A selection among the values of a label, at the top of a dashboard."""

    name: str
    label: str
    of: str
    """The series whose label values are offered."""


class Dashboard(NamedTuple):
    """One dashboard."""

    name: str
    """The name of its file and, with a prefix, its uid."""
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]


MODEL = Variable("model", "model", "tokenbus_router_workers")
WORKER = Variable("worker", "worker_id", 'tokenbus_worker_info{model=~"$model"}')
ROUTER = Variable("router", "instance", "tokenbus_router_ready")
