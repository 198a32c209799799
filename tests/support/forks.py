"""Runs tests in several processes that are forked once all tests are collected: `pytest --forks=4`.

With pytest-xdist each process would import and collect all tests again. The tests of a file run in one process, in
their order, so that they share its fixtures. Files that take longest start first, as `tests/durations.md` tells."""

import atexit
import collections
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest

from tokenbus.protocol.process.parent import end_with_parent

_TABLE = Path(__file__).parents[1] / "durations.md"
_GRACE_S = 10.0
_FOLDERS = ("XDG_RUNTIME_DIR", "XDG_STATE_HOME")


def pytest_configure() -> None:
    _use_private_folders()


def _use_private_folders() -> None:
    """Gives this process folders of its own, removed at its end, for what the processes of a user share or keep.

    Whatever else runs on this machine, the workers of a test plan their memory as if they were alone, and nothing is
    written to the state folder of the person who runs the tests."""
    for name in _FOLDERS:
        os.environ[name] = tempfile.mkdtemp(prefix="tokenbus-tests-")
        atexit.register(shutil.rmtree, os.environ[name], ignore_errors=True)


class _Process:
    """A forked process, seen from its parent."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid = pid
        self.end = os.pidfd_open(pid)
        self.connection = connection
        self.tests: collections.deque[int] = collections.deque()
        """The tests that it has been given and has not finished."""
        self.is_dismissed = False
        """Whether it was told that there are no more."""

    def close(self) -> None:
        os.waitpid(self.pid, 0)
        os.close(self.end)
        self.connection.close()


class Forks:
    """Hands files of tests to forked processes and passes on what they report."""

    def __init__(self, session: pytest.Session, num_processes: int) -> None:
        self._session = session
        self._files = collections.deque(_files(session.items))
        self._num_processes = num_processes
        self._num_forked = 0
        self._processes: list[_Process] = []

    def run(self) -> None:
        """Runs all tests, or those until `-x` or `--maxfail` ends the run."""
        try:
            for _ in range(min(self._num_processes, len(self._files))):
                self._fork()
            while self._processes:
                self._follow()
                self._session_stops()
        finally:
            self._end()

    def _end(self) -> None:
        for process in self._processes:
            os.kill(process.pid, signal.SIGINT)
        for process in self._processes:
            if not wait([process.end], timeout=_GRACE_S):
                os.kill(process.pid, signal.SIGKILL)
            process.close()

    def _session_stops(self) -> None:
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _fork(self) -> None:
        number, self._num_forked = self._num_forked, self._num_forked + 1
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            ours.close()
            _Work(self._session, theirs).run(number)
        theirs.close()
        self._processes.append(_Process(pid, ours))

    def _follow(self) -> None:
        ready = wait([*(one.connection for one in self._processes), *(one.end for one in self._processes)])
        for process in list(self._processes):
            if process.connection in ready:
                self._read(process)
            elif process.end in ready:
                self._bury(process)

    def _read(self, process: _Process) -> None:
        try:
            said = json.loads(process.connection.recv_bytes())
        except EOFError:
            self._bury(process)
            return
        if said is None:  # it wants more
            file = self._files.popleft() if self._files else []
            process.tests += file
            process.is_dismissed = not file
            process.connection.send_bytes(json.dumps(file).encode())
            return
        config = self._session.config
        item = self._session.items[process.tests.popleft()]
        for data in said:
            report = config.hook.pytest_report_from_serializable(config=config, data=data)
            if report.skipped and isinstance(report.longrepr, list):
                report.longrepr = tuple(report.longrepr)  # as pytest expects it, and JSON has no tuples
            config.hook.pytest_runtest_logreport(report=report)
        config.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _bury(self, process: _Process) -> None:
        self._processes.remove(process)
        process.close()
        if not process.tests:
            if process.is_dismissed:
                return
            raise RuntimeError(f"process {process.pid} ended between two tests")
        item = self._session.items[process.tests.popleft()]
        what = f"process {process.pid} ended during this test"
        report = pytest.TestReport(item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", what, "call")
        self._session.config.hook.pytest_runtest_logreport(report=report)
        if process.tests:
            self._files.appendleft(list(process.tests))
        if self._files:
            self._fork()


class _Work:
    """What a forked process does."""

    def __init__(self, session: pytest.Session, connection: Connection) -> None:
        self._session = session
        self._connection = connection
        self._reports: list[dict[str, Any]] = []
        """Those of the test that runs."""

    def run(self, number: int) -> None:
        """Runs tests until there are no more, and ends the process."""
        status = 1
        try:
            self._begin(number)
            self._run_tests()
            status = 0
        except (KeyboardInterrupt, EOFError):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._session._setupstate.teardown_exact(None)  # type: ignore[attr-defined]
        finally:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _begin(self, number: int) -> None:
        end_with_parent()
        atexit._clear()  # what it has registered is the parent's to do
        _use_private_folders()
        config = self._session.config
        plugins = config.pluginmanager
        plugins.unregister(name="terminalreporter")
        plugins.register(self)
        plugins.getplugin("capturemanager").start_global_capturing()
        temporary = config._tmp_path_factory  # type: ignore[attr-defined]
        temporary._basetemp = temporary.getbasetemp() / f"fork-{number}"
        temporary._basetemp.mkdir()

    def _run_tests(self) -> None:
        tests = self._tests()
        now = next(tests, None)
        while now is not None and not self._session.shouldfail and not self._session.shouldstop:
            then = next(tests, None)
            item = self._session.items[now]
            item.config.hook.pytest_runtest_protocol(
                item=item, nextitem=None if then is None else self._session.items[then]
            )
            self._say(self._reports)
            self._reports = []
            now = then

    def _tests(self) -> Iterator[int]:
        while True:
            self._say(None)
            file = json.loads(self._connection.recv_bytes())
            if not file:
                return
            yield from file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        config = self._session.config
        self._reports.append(config.hook.pytest_report_to_serializable(config=config, report=report))

    def _say(self, what: Any) -> None:
        self._connection.send_bytes(json.dumps(what, default=str).encode())


def _files(items: Sequence[pytest.Item]) -> list[list[int]]:
    """Returns the numbers of the tests of each file, the file that takes longest first."""
    files: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        files.setdefault(item.nodeid.partition("::")[0], []).append(number)
    seconds = _seconds()
    return [files[name] for name in sorted(files, key=lambda name: -seconds.get(name, 0.0))]


def _seconds() -> dict[str, float]:
    cells = [line.strip("| ").split(" | ") for line in _TABLE.read_text().splitlines() if line.endswith("|")]
    return {row[0]: float(row[3]) for row in cells if row[0].endswith(".py")}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, help="number of processes that run the tests")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    num_processes = session.config.getoption("forks")
    if not num_processes or session.config.option.collectonly or session.testsfailed:
        return None
    plugins = session.config.pluginmanager
    plugins.getplugin("capturemanager").stop_global_capturing()
    reporter = plugins.getplugin("terminalreporter")
    if reporter is not None:
        reporter.showfspath = False  # tests of several files are mixed
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    Forks(session, num_processes).run()
    return True
