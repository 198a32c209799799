from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.hostile import scale
from tests.hostile.forged_worker import Stage
from tests.sim.world import world
from tests.support.system import System


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    """A system with only a broker; the test starts what it attacks."""
    system = await System.start(tmp_path)
    yield system
    await system.stop()


@pytest.fixture
def stage() -> Iterator[Stage]:
    """A simulated router and client for forged workers."""
    with world(seed=7) as made:
        yield Stage(made)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Reports after a long run what was tried, how often, and how it ended."""
    if not scale.IS_LONG:
        return
    terminalreporter.section("what hostile use was tried")
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.getreports(outcome):
            if getattr(report, "when", None) == "call" or outcome in ("error", "skipped"):
                _, _, rule = report.nodeid.rpartition("::test_")
                counts = ", ".join(map(str, scale.chosen.get(report.nodeid, ())))
                times = f" ({counts} times)" if counts else ""
                terminalreporter.line(f"{outcome} in {report.duration:.1f} s: {rule.replace('_', ' ')}{times}")
