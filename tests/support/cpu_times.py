"""A pytest plugin that adds up the CPU time of each test file, with all processes that its tests start.

Processes are sampled, since many are killed together with the parents that would have waited for them; what a process
used after its last sample counts for no file. `python -m tools.durations` knows the exact total."""

import json
import os
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_INTERVAL_S = 0.1


class Descendants:
    """The CPU time of all processes that this one has started, and that those have."""

    def __init__(self) -> None:
        self._cpu_s: dict[tuple[int, int], float] = {}
        """By pid and start time, as of the last sample."""
        self._pids: set[int] = {os.getpid()}
        self._lock = threading.Lock()

    def sample_forever(self) -> None:
        while True:
            time.sleep(_INTERVAL_S)
            self.cpu_s()

    def cpu_s(self) -> float:
        with self._lock:
            for pid in os.listdir("/proc"):
                if pid.isdigit():
                    try:
                        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                    except OSError:  # it has ended meanwhile
                        continue
                    if fields:  # empty if it ended between opening and reading
                        self._note(int(pid), fields)
            return sum(self._cpu_s.values())

    def _note(self, pid: int, fields: list[str]) -> None:
        one, parent = (pid, int(fields[19])), int(fields[1])
        if one in self._cpu_s or parent in self._pids:
            self._pids.add(pid)
            self._cpu_s[one] = (int(fields[11]) + int(fields[12])) * _TICK_S


class CpuTimes:
    """Notes the CPU time of each phase of each test in its report."""

    def __init__(self) -> None:
        self._descendants: Descendants | None = None
        self._marked_s = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> None:
        if self._descendants is None:  # this is the first test of this process
            self._descendants = Descendants()
            threading.Thread(target=self._descendants.sample_forever, daemon=True).start()
            self._marked_s = time.process_time()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):  # type: ignore[no-untyped-def]
        report = yield
        assert self._descendants is not None
        before, self._marked_s = self._marked_s, time.process_time() + self._descendants.cpu_s()
        report.cpu_s = self._marked_s - before
        return report


class Table:
    """Adds up what the reports say, and writes it to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cpu_s: dict[str, float] = defaultdict(float)
        self._wall_s: dict[str, float] = defaultdict(float)
        self._num_tests: dict[str, int] = defaultdict(int)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._cpu_s[file] += getattr(report, "cpu_s", 0.0)  # a crashed process says nothing
        self._wall_s[file] += report.duration
        self._num_tests[file] += report.when == "call"

    def pytest_sessionfinish(self) -> None:
        rows = {file: [self._num_tests[file], cpu_s, self._wall_s[file]] for file, cpu_s in self._cpu_s.items()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(rows))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", type=Path, help="write the CPU time of each test file to this file")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--cpu-times")
    if path is None:
        return
    config.pluginmanager.register(Table(path))
    config.pluginmanager.register(CpuTimes())
