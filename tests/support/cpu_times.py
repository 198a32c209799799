"""A pytest plugin that adds up the CPU time of each test file, with all processes that its tests start.

Processes are sampled, since many are killed together with the parents that would have waited for them; what a process
used after its last sample counts for no file. `python -m tools.durations` knows the exact total."""

import contextlib
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
    """The CPU time of this process and of all that it has started, and that those have."""

    def __init__(self) -> None:
        self._cpu_s: dict[tuple[int, int], float] = {}
        """By pid and start time, as of the last sample."""
        self._living: set[int] = set()
        """Those of the last sample: the children of one that is killed have another parent from then on."""
        self._measuring_s = 0.0
        self._lock = threading.Lock()

    def sample_forever(self) -> None:
        while True:
            time.sleep(_INTERVAL_S)
            self.cpu_s()

    def cpu_s(self) -> float:
        """Returns what all have used, without what it takes to measure that."""
        with self._lock:
            began = time.thread_time()
            pending, living = [os.getpid(), *self._living], set[int]()
            while pending:
                pid = pending.pop()
                if pid not in living and (pid == os.getpid() or self._note(pid)):
                    living.add(pid)
                    pending += _children(pid)
            self._living = living
            self._measuring_s += time.thread_time() - began
            return time.process_time() - self._measuring_s + sum(self._cpu_s.values())

    def _note(self, pid: int) -> bool:
        """Returns False if the process has ended."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return False
        if not fields:  # it has ended between opening and reading
            return False
        self._cpu_s[pid, int(fields[19])] = (int(fields[11]) + int(fields[12])) * _TICK_S
        return True


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended, or one of its threads
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


class CpuTimes:
    """Notes the CPU time of each test in its last report."""

    def __init__(self) -> None:
        self._descendants: Descendants | None = None
        self._marked_s = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> None:
        if self._descendants is None:  # this is the first test of this process
            self._descendants = Descendants()
            threading.Thread(target=self._descendants.sample_forever, daemon=True).start()
            self._marked_s = self._descendants.cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):  # type: ignore[no-untyped-def]
        report = yield
        if call.when == "teardown":
            assert self._descendants is not None
            before, self._marked_s = self._marked_s, self._descendants.cpu_s()
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
