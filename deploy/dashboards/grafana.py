"""Converts a dashboard to Grafana's JSON, with Grafana's own library."""

import json
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as values
from grafana_foundation_sdk.models import dashboard as parts
from grafana_foundation_sdk.models import heatmap as heat
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from deploy.dashboards.spec import Dashboard, Panel, Query, Variable

_SOURCE = parts.DataSourceRef("prometheus", "${datasource}")
_HIDDEN = ("Time", "Value", "__name__")
"""Columns that a table of labels does not show."""


def to_json(of: Dashboard) -> str:
    """Returns the JSON file of a dashboard."""
    made = dashboard.Dashboard(of.title).uid(f"tokenbus-{of.name}").description(of.description).tags(["tokenbus"])
    made.timezone("browser").refresh("10s").time("now-30m", "now").tooltip(parts.DashboardCursorSync.CROSSHAIR)
    made.link(dashboard.DashboardLink("Tokenbus").type(parts.DashboardLinkType.DASHBOARDS).tags(["tokenbus"]))
    made.with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    for variable in of.variables:
        made.with_variable(_variable(variable))
    for row in of.rows:
        made.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            made.with_panel(_SHAPES[panel.shape](panel).datasource(_SOURCE))
    built = made.build()
    for number, placed in enumerate(built.panels or [], 1):
        placed.id_val = number
    return json.dumps(built, cls=JSONEncoder, indent=2) + "\n"


def _variable(of: Variable) -> Any:
    everything = parts.VariableOption(True, "All", "$__all")
    made = dashboard.QueryVariable(of.name).label(of.name.capitalize()).datasource(_SOURCE)
    made.query(f"label_values({of.of}, {of.label})").refresh(parts.VariableRefresh.ON_TIME_RANGE_CHANGED)
    return made.multi(True).include_all(True).all_value(".*").current(everything)


def _target(query: Query, number: int) -> Any:
    made = prometheus.Dataquery().expr(query.expr).ref_id(chr(ord("A") + number))
    return made.legend_format(query.legend or "__auto")


def _base_panel(builder: Any, panel: Panel, span: int, height: int) -> Any:
    """Sets what all kinds of panels have."""
    return builder.title(panel.title).description(panel.description).unit(panel.unit).span(span).height(height)


def _timeseries(panel: Panel) -> Any:
    made = _base_panel(timeseries.Panel(), panel, 8, 8).min(0).line_width(1.5).show_points(values.VisibilityMode.NEVER)
    made.tooltip(common.VizTooltipOptions().mode(values.TooltipDisplayMode.MULTI))
    made.legend(common.VizLegendOptions().show_legend(True).calcs(["lastNotNull", "max"]))
    for number, query in enumerate(panel.queries):
        made.with_target(_target(query, number).range())
    return made


def _stacked(panel: Panel) -> Any:
    return _timeseries(panel).fill_opacity(30).stacking(common.StackingConfig().mode(values.StackingMode.NORMAL))


def _stat(panel: Panel) -> Any:
    made = _base_panel(stat.Panel(), panel, 4, 4).graph_mode(values.BigValueGraphMode.AREA)
    made.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    (query,) = panel.queries
    return made.with_target(_target(query, 0).range())


def _heatmap(panel: Panel) -> Any:
    made = _base_panel(heatmap.Panel(), panel, 12, 8).calculate(False)
    made.y_axis(heatmap.YAxisConfig().unit(panel.unit))
    made.color(heatmap.HeatmapColorOptions().mode(heat.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64))
    (query,) = panel.queries
    return made.with_target(_target(query, 0).range().format(PromQueryFormat.HEATMAP))


def _table(panel: Panel) -> Any:
    made = _base_panel(table.Panel(), panel, 24, 8)
    options: dict[str, object] = {"excludeByName": dict.fromkeys(_HIDDEN, True)}
    made.with_transformation(parts.DataTransformerConfig(id_val="organize", options=options))
    (query,) = panel.queries
    return made.with_target(_target(query, 0).instant().format(PromQueryFormat.TABLE))


_SHAPES = {"timeseries": _timeseries, "stacked": _stacked, "stat": _stat, "heatmap": _heatmap, "table": _table}
