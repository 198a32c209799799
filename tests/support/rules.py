"""The rules for Prometheus as they lie in `deploy`, and the programs that read them."""

import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
RULES = FOLDER / "rules.yml"
METRIC = re.compile(r"\b(?:[a-z]+:)?tokenbus[a-z0-9_:]+|\bup\b")
"""Names of series in an expression."""


def needs(program: str) -> pytest.MarkDecorator:
    """For tests that run a program of Prometheus."""
    return pytest.mark.skipif(
        shutil.which(program) is None, reason=f"{program} is not on the PATH"
    )


def alerts() -> set[str]:
    return set(re.findall(r"- alert: (\w+)", RULES.read_text()))


def runbooks() -> set[str]:
    """Where the alerts say that one should read on."""
    return set(re.findall(r"runbook: (\S+)", RULES.read_text()))
