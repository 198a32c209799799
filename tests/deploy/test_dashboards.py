"""The dashboards: their files are what the code makes, and each panel can be read by somebody who did not make it."""

import json
import re
from typing import Any

import pytest

from tests.support import alert_rules

FILES = sorted(alert_rules.DASHBOARDS.glob("*.json"))


def panels(text: str) -> list[dict[str, Any]]:
    return [panel for panel in json.loads(text)["panels"] if panel["type"] != "row"]


def expressions(text: str) -> list[str]:
    return [target["expr"] for panel in panels(text) for target in panel["targets"]]


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def text(request: pytest.FixtureRequest) -> str:
    return str(request.param.read_text())


def test_the_files_are_what_the_code_makes() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is not installed")
    from deploy.dashboards.__main__ import ALL
    from deploy.dashboards.grafana import to_json

    assert {path.stem for path in FILES} == {dashboard.name for dashboard in ALL}
    for dashboard in ALL:
        written = (alert_rules.DASHBOARDS / f"{dashboard.name}.json").read_text()
        assert written == to_json(dashboard), "make dashboards"


def test_every_panel_says_what_one_sees_in_which_unit_and_what_to_do(text: str) -> None:
    titles = [panel["title"] for panel in panels(text)]
    assert len(titles) == len(set(titles))
    for panel in panels(text):
        assert len(panel["title"].split()) >= 3, panel["title"]
        assert not panel["title"].endswith(".")
        assert re.search(r"\b[Ii]f .+\.$", panel["description"]), panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]


def test_panels_are_about_metrics_that_there_are(text: str) -> None:
    for expression in expressions(text):
        asked = {name for name in alert_rules.METRIC.findall(expression) if "_" in name}
        assert asked <= alert_rules.shown(), expression
        assert asked or "ALERTS" in expression


def test_windows_are_grafanas_and_choices_are_offered_and_used(text: str) -> None:
    offered = {variable["name"] for variable in json.loads(text)["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", "".join(expressions(text))))
    assert used - {"__rate_interval"} == offered - {"datasource"}
    assert set(re.findall(r"\[(.+?)\]", "".join(expressions(text)))) <= {"$__rate_interval"}


def test_every_metric_is_on_a_dashboard() -> None:
    asked = {
        name for path in FILES for text in expressions(path.read_text()) for name in alert_rules.METRIC.findall(text)
    }
    parts = re.compile(r"_(bucket|sum|count)$")
    assert {parts.sub("", name) for name in alert_rules.shown()} - {parts.sub("", name) for name in asked} == {
        "tokenbus_router_ready",  # the alert and /readyz
    }
