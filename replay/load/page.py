"""The HTML page of a benchmark, with tables and plots."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from tokenbus.replay.load.histogram import LatencyHistogram
from tokenbus.replay.load.points import LoadKind
from tokenbus.replay.load.results import LoadReport, RunResult
from tokenbus.replay.load.table import ROWS, number, run_lines
from tokenbus.replay.svg import Axis, Series, bar_chart, document, line_chart

_PERCENTILES = ("p50", "p90", "p99")
_PLOTTED = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
_MOST_RUNS = 8
"""The number of runs drawn as separate lines: as many as there are colours."""
_LOADS = {
    LoadKind.CONCURRENCY: "clients",
    LoadKind.RATE: "requests per second offered",
    LoadKind.SPEEDUP: "× the trace's speed",
}


def page(report: LoadReport, times: Sequence[Mapping[str, LatencyHistogram]]) -> str:
    """Returns the page; `times` are the histograms of the report's runs."""
    parts = [f"<p>{escape(report.began_at)}, seed {report.seed}</p>"]
    parts += ['<div class="plots">', *_sweep(report.runs), *_distributions(report.runs, times)]
    parts += [*_by_worker(report.runs), "</div>", *map(_section, report.runs)]
    return document(f"{report.model}: {report.workload}", parts)


def _sweep(runs: Sequence[RunResult]) -> Iterator[str]:
    """Plots the runs by load, if there are several."""
    runs = sorted(runs, key=lambda run: run.value)
    if len(runs) < 2:
        return
    load = Axis(_LOADS[runs[0].load], is_log=runs[-1].value >= 8 * runs[0].value)
    tokens = Series("output tokens/s", [(run.value, run.output_tokens_per_s) for run in runs])
    yield line_chart("Output tokens per second", [tokens], load, Axis("tokens/s"))
    for name in _PLOTTED:
        series = [Series(percentile, _points(runs, name, percentile)) for percentile in _PERCENTILES]
        yield line_chart(f"{_title(name)} by load", series, load, Axis("ms", is_log=True))


def _title(name: str) -> str:
    return ROWS[name][0].upper() + ROWS[name][1:]


def _points(runs: Sequence[RunResult], name: str, percentile: str) -> list[tuple[float, float]]:
    values = [(run.value, getattr(getattr(run, name), percentile)) for run in runs]
    return [point for point in values if point[1] is not None]


def _distributions(runs: Sequence[RunResult], times: Sequence[Mapping[str, LatencyHistogram]]) -> Iterator[str]:
    for name in _PLOTTED:
        series = [
            Series(str(run.point), [(value, 100 * share) for value, share in one[name].cumulative()])
            for run, one in zip(runs[:_MOST_RUNS], times, strict=False)
        ]
        yield line_chart(f"{_title(name)}: cumulative share", series, Axis("ms", is_log=True), Axis("%"))


def _by_worker(runs: Sequence[RunResult]) -> Iterator[str]:
    names = sorted({name for run in runs for name in run.workers})
    if 1 < len(names) <= _MOST_RUNS and len(runs) <= _MOST_RUNS:
        series = [Series(name, [(place, run.workers.get(name, 0)) for place, run in enumerate(runs)]) for name in names]
        yield bar_chart("Requests by worker", [f"{run.value:g}" for run in runs], series, Axis("requests"))


def _section(run: RunResult) -> str:
    heads = "".join(f"<th>{head}</th>" for head in ("ms", "mean", *_PERCENTILES, "max"))
    rows = "".join(_row(run, name, title) for name, title in ROWS.items())
    lines = escape("\n".join(run_lines(run)))
    return f"<h2>{escape(str(run.point))}</h2>\n<table><tr>{heads}</tr>{rows}</table>\n<pre>{lines}</pre>"


def _row(run: RunResult, name: str, title: str) -> str:
    spread = getattr(run, name)
    cells = "".join(f"<td>{number(getattr(spread, field))}</td>" for field in ("mean", *_PERCENTILES, "max"))
    return f"<tr><td>{title}</td>{cells}</tr>"
