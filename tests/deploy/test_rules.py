"""The rules for Prometheus: they are well formed, tried one by one, explained, and about metrics that there are."""

import re
import subprocess

import pytest
import yaml

from tests.support import alert_rules
from tools import alert_rules as tools


def promtool(*arguments: str) -> None:
    ran = subprocess.run(["promtool", *arguments], cwd=alert_rules.FOLDER, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@alert_rules.needs("promtool")
def test_the_rules_are_well_formed() -> None:
    promtool("check", "rules", "rules.yml")
    promtool("check", "config", "prometheus.yml")


@alert_rules.needs("promtool")
def test_each_alert_fires_when_it_should_and_only_then() -> None:
    promtool("test", "rules", "rules_test.yml")


def test_every_rule_is_tried() -> None:
    tried = (alert_rules.FOLDER / "rules_test.yml").read_text()
    assert set(re.findall(r"alertname: (\w+)\n +eval_time: \w+\n +exp_alerts", tried)) == alert_rules.alerts()


def test_every_alert_has_a_severity_a_summary_and_a_runbook_of_its_own() -> None:
    text = alert_rules.RULES.read_text()
    assert len(alert_rules.alerts()) == len(alert_rules.runbooks()) == text.count("summary: ")
    assert len(re.findall(r"severity: (critical|warning|info) ", text)) == len(alert_rules.alerts())


def test_every_runbook_is_a_heading_and_every_heading_an_alert() -> None:
    _, _, section = (alert_rules.ROOT / "docs" / "operations.md").read_text().partition("\n## Alerts\n")
    section, _, _ = section.partition("\n## ")
    headings = re.findall(r"^### (.+)$", section, re.MULTILINE)
    pages, anchors = zip(*(link.split("#") for link in alert_rules.runbooks()), strict=True)
    assert set(anchors) == {heading.lower().replace(" ", "-") for heading in headings}
    (page,) = set(pages)
    assert tools.page(page) == page


def test_the_page_of_the_runbooks_is_set_in_every_file_that_has_it() -> None:
    for path in tools.WITH_LINKS:
        text = path.read_text()
        moved = tools.linked(text, "https://wiki.corp/on-call?page=7")
        assert moved.count("runbook_url: https://wiki.corp/on-call?page=7") == text.count("runbook_url: https://")
        assert tools.linked(moved, *{link.partition("#")[0] for link in alert_rules.runbooks()}) == text


@pytest.mark.parametrize(
    "url", ["docs/operations.md", "wiki.corp/operations", "file:///ops.md", "https://", "https://a/#b", "https://a/b c"]
)
def test_a_page_of_runbooks_that_an_alert_can_not_link_to_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(url))):
        tools.page(url)


def test_the_rules_for_kubernetes_are_those_for_prometheus() -> None:
    assert tools.PROMETHEUS_RULE.read_text() == tools.prometheus_rule(alert_rules.RULES.read_text()), "make rules"
    made = yaml.safe_load(tools.PROMETHEUS_RULE.read_text())
    assert made["spec"] == yaml.safe_load(alert_rules.RULES.read_text())


def test_the_rules_are_about_metrics_that_there_are() -> None:
    text = re.sub(r"summary: .*|runbook_url: .*|#.*", "", alert_rules.RULES.read_text())
    recorded = set(re.findall(r"record: (\S+)", text))
    asked = {name for name in alert_rules.METRIC.findall(text) if "_" in name}
    assert asked - recorded <= alert_rules.shown()
    assert recorded < asked
