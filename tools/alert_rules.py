"""`python -m tools.alert_rules [--runbooks URL]` writes the alert rules for Kubernetes from those for Prometheus
(`make rules`), and sets the page with the runbooks that alerts link to."""

import argparse
import re
import sys
import textwrap
from pathlib import Path
from urllib.parse import urlsplit

DEPLOY = Path(__file__).parents[1] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
MONITORING = DEPLOY / "kubernetes" / "monitoring"
PROMETHEUS_RULE = MONITORING / "prometheus-rule.yaml"
WITH_LINKS = (RULES, DEPLOY / "prometheus" / "rules_test.yml", MONITORING / "runbooks.yaml")
_LINK = re.compile(r"(?<=runbook_url: )[^\s#]+")
_HEAD = """\
# Written by `make rules` from deploy/prometheus/rules.yml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata: { name: tokenbus }
spec:
"""


def page(url: str) -> str:
    """Returns the URL of a page, without the section of a single alert. Raises ValueError unless it is absolute."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{url!r} must begin with http:// or https:// and a host, since alerts are read elsewhere")
    if parts.fragment or re.search(r"[\s\"'{}#]", url):
        raise ValueError(f"{url!r} must be a page without # and spaces; each alert adds its own section")
    return url


def linked(text: str, url: str) -> str:
    """Returns rules whose alerts link to sections of another page."""
    return _LINK.sub(lambda _: url, text)


def prometheus_rule(rules: str) -> str:
    """Returns the object for Kubernetes whose `spec` is a file of rules for Prometheus."""
    _, groups, text = rules.partition("groups:\n")
    return _HEAD + textwrap.indent(groups + text, "  ")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.alert_rules")
    parser.add_argument("--runbooks", metavar="URL", help="where you publish docs/operations.md (as it is)")
    options = parser.parse_args(arguments)
    if options.runbooks:
        try:
            url = page(options.runbooks)
        except ValueError as error:
            parser.error(f"--runbooks: {error}")
        for path in WITH_LINKS:
            path.write_text(linked(path.read_text(), url))
    PROMETHEUS_RULE.write_text(prometheus_rule(RULES.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
