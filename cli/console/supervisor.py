"""Child processes that are kept running: started, restarted with growing pauses when they exit, and stopped.

Children die with their parent: the kernel sends them SIGTERM when it ends, so that a killed `tokenbus up` leaves no
process behind. It binds them to the thread that forks, so only the main thread may start them. Linux only."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from tokenbus.cli.console.flags import EXIT_BAD_SETTINGS
from tokenbus.cli.console.plain_text import printable
from tokenbus.protocol import tasks
from tokenbus.protocol.process.parent import end_with_parent

_MAX_LAST_WORDS = 65_536
"""Bytes at the end of a log among which a process's reason to exit is sought."""
_MESSAGE_PREFIX = "tokenbus: "
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
_HEALTHY_AFTER_S = 30.0
"""After a process has run this long, its restarts begin with the first pause again."""


_SIGNALS = {one.value: one.name for one in signal.Signals}


def end_of(status: int) -> str:
    """Says how a process ended, given its return code: negative if a signal did it."""
    return f"exited with status {status}" if status >= 0 else f"was killed by {_SIGNALS.get(-status, -status)}"


class StartError(RuntimeError):
    """The system could not be started. The text says what to do, often in a child's own last line."""


class SupervisedProcess:
    """One `tokenbus` process with its own log file.

    `report` is called with a line of text whenever the process exits. The process inherits the file descriptors
    `fds` under the same numbers; they must stay open here."""

    def __init__(
        self,
        name: str,
        arguments: list[str],
        log_path: Path,
        report: Callable[[str], None],
        fds: tuple[int, ...] = (),
    ) -> None:
        self.name = name
        self._arguments = arguments
        self._fds = fds
        self._log_path = log_path
        self._report = report
        self._log_start = 0
        """Where in the log the last start's lines begin."""
        self._process: asyncio.subprocess.Process | None = None

    def __repr__(self) -> str:
        return f"<SupervisedProcess {self.name} pid {self.pid}>"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def supervise(self) -> None:
        """Runs the process until cancelled, restarting it when it exits. Raises StartError if that would not help."""
        pause_s, was_healthy = _FIRST_PAUSE_S, False
        while True:
            began = time.monotonic()
            try:
                self._process = await self._start()
            except OSError as error:  # for now there is no memory, no process id, or no space for its log
                problem = f"can't be started ({error.strerror})"
            else:
                status = await self._process.wait()
                was_healthy = was_healthy or time.monotonic() - began > _HEALTHY_AFTER_S
                if status == EXIT_BAD_SETTINGS and not was_healthy:
                    raise StartError(self._last_words() or f"{self.name} wrote nothing to {self._log_path}")
                problem = f"{end_of(status)} ({self._last_words() or f'see {self._log_path}'})"
            # Pauses double as long as the process keeps failing soon after its start.
            pause_s = _FIRST_PAUSE_S if time.monotonic() - began > _HEALTHY_AFTER_S else pause_s
            self._report(printable(f"{self.name} {problem}; restarting in {pause_s:g} s"))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def terminate(self) -> None:
        """Asks the process to finish its work and exit."""
        if self.pid is not None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Ends the process at once. Its own children notice that their parent has died."""
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)

    async def wait_stopped(self, timeout_s: float) -> None:
        """Waits until the process has exited, and kills it after `timeout_s`."""
        if self._process is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)  # someone may have tidied up
        with self._log_path.open("ab") as log:
            self._log_start = log.tell()
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tokenbus.cli.start",
                *self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"TOKENBUS_LOG_FORMAT": "json"},
                start_new_session=True,  # Ctrl-C must reach only the parent, which stops its children
                pass_fds=self._fds,
                preexec_fn=end_with_parent,
            )

    def _last_words(self) -> str:
        """Returns the last line that was written for people since the last start, or else the last one that is not a
        structured log line; nothing if there is neither."""
        try:
            with self._log_path.open("rb") as log:
                size = os.fstat(log.fileno()).st_size
                start = self._log_start if self._log_start <= size else 0  # it has been shortened since
                begin = max(start, size - _MAX_LAST_WORDS)
                log.seek(begin)
                text = log.read().decode(errors="replace")
        except OSError:  # it has been removed since
            return ""
        if begin > start:
            text = text.partition("\n")[2]  # it began within a line
        lines = text.strip().splitlines()
        for_people = [line.removeprefix(_MESSAGE_PREFIX) for line in lines if line.startswith(_MESSAGE_PREFIX)]
        unstructured = [line for line in lines if not line.startswith("{")]
        return (for_people or unstructured or [""])[-1]


class ProcessSupervisor:
    """The supervised processes of one system."""

    def __init__(self, log_folder: Path, report: Callable[[str], None]) -> None:
        self.processes: list[SupervisedProcess] = []
        self._log_folder = log_folder
        self._report = report
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"<ProcessSupervisor of {len(self.processes)} processes>"

    def start(self, name: str, arguments: list[str], fds: tuple[int, ...] = ()) -> None:
        """Starts a process and keeps it running."""
        process = SupervisedProcess(name, arguments, self._log_folder / f"{name}.log", self._report, fds)
        self.processes.append(process)
        self.keep(process.supervise())

    def keep(self, supervise: Coroutine[Any, Any, None]) -> None:
        """Runs what looks after another process, until `stop`."""
        self._tasks.append(tasks.awaited(supervise))

    def check(self) -> None:
        """Raises StartError if a process has given up, and what was raised by what else is kept running."""
        for task in self._tasks:
            if task.done():
                task.result()

    def kill(self) -> None:
        """Ends all processes at once."""
        for process in self.processes:
            process.kill()

    async def stop(self, grace_s: float) -> None:
        """Asks all processes to exit and kills those that take longer than `grace_s` seconds."""
        for task in self._tasks:  # first, so that nothing is restarted
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in reversed(self.processes):
            process.terminate()
        await asyncio.gather(*(process.wait_stopped(grace_s) for process in self.processes))
