"""Which tests may be skipped where all that tests use is installed: a pytest plugin, used by `tests/conftest.py`.

With `CI` set in the environment, a run in which any other test was skipped fails, and names it."""

import os

import pytest

ALLOWED = (
    "runs in `make hostile`",
    "runs in `make console-check`",
    "there are no adapters of this model",
    "it exchanges no blocks, or they hold nothing",
    "only the binding's own embed has it",
    "it does not pool where the file names no pooling",
    "its cells have no token ids",
)
"""The reasons that say what does not apply, rather than what this machine lacks."""


def _others(config: pytest.Config) -> list[str]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or "CI" not in os.environ:
        return []
    found = []
    for report in reporter.stats.get("skipped", ()):
        reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
        if not hasattr(report, "wasxfail") and reason not in ALLOWED:
            found.append(f"{report.nodeid}: {reason}")
    return found


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.OK and _others(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for one in _others(config):
        terminalreporter.write_line(f"SKIPPED, and must not be in CI: {one}", red=True)
