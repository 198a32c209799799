"""The rules for Prometheus: they are well formed, tried one by one, explained, and about metrics that there are."""

import re
import subprocess

from tests.support import alert_rules


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
    assert alert_rules.runbooks() == {f"docs/operations.md#{heading.lower().replace(' ', '-')}" for heading in headings}


def test_the_rules_are_about_metrics_that_there_are() -> None:
    text = re.sub(r"summary: .*|#.*|docs/.*", "", alert_rules.RULES.read_text())
    recorded = set(re.findall(r"record: (\S+)", text))
    asked = {name for name in alert_rules.METRIC.findall(text) if "_" in name}
    assert asked - recorded <= alert_rules.shown()
    assert recorded < asked
