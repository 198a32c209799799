"""The Prometheus rules in `deploy`, and the programs that check them."""

import re
import shutil
from pathlib import Path

import pytest

from tokenbus.auth.callout_metrics import CalloutMetrics
from tokenbus.gateway.admission.metrics import GatewayMetrics
from tokenbus.protocol.telemetry.metrics import MetricFamilies
from tokenbus.router.telemetry.metrics import RouterMetrics
from tokenbus.worker.telemetry.metrics import WorkerMetrics

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
DASHBOARDS = ROOT / "deploy" / "grafana" / "dashboards"
RULES = FOLDER / "rules.yml"
METRIC = re.compile(r"\b(?:[a-z]+:)?tokenbus[a-z0-9_:]+|\bup\b")
"""Matches the names of series in an expression."""


def needs(program: str) -> pytest.MarkDecorator:
    """Marks tests that run a program of Prometheus, which may not be installed."""
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not on the PATH")


def shown() -> set[str]:
    """Returns the names of all samples of a router, a worker, a gateway and the service of keys."""
    names: set[str] = set()
    for one in (RouterMetrics(), WorkerMetrics(), GatewayMetrics(), CalloutMetrics()):
        names |= samples(one)
    return names


def samples(metrics: MetricFamilies) -> set[str]:
    names = set()
    for family in metrics.families():
        (metric,) = family.describe()
        if metric.type == "histogram":
            names |= {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}
        else:
            names.add(f"{metric.name}_total" if metric.type == "counter" else metric.name)
    return names


def alerts() -> set[str]:
    return set(re.findall(r"- alert: (\w+)", RULES.read_text()))


def runbooks() -> set[str]:
    """Returns the runbook links of the alerts."""
    return set(re.findall(r"runbook_url: (\S+)", RULES.read_text()))
