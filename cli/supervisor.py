"""Child processes that are kept running: started, watched, started again with growing pauses, and ended."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tokenbus.cli.parent_death import end_with_parent

EXIT_BAD_SETTINGS = 2
"""Exit status of a process whose settings or model are wrong: starting it again won't help."""

_SAYS = "tokenbus: "
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
_HEALTHY_AFTER_S = 30.0


class StartError(RuntimeError):
    """A child refused its settings; the message is its own last line."""


class SupervisedProcess:
    """One `tokenbus` process with its own log file. `say` is told, in a line each, what happens to it.

    It inherits the files `fds`, under the same numbers; they must stay open here."""

    def __init__(
        self,
        name: str,
        arguments: list[str],
        log_path: Path,
        say: Callable[[str], None],
        fds: tuple[int, ...] = (),
    ) -> None:
        self.name = name
        self._arguments = arguments
        self._fds = fds
        self._log_path = log_path
        self._say = say
        self._process: asyncio.subprocess.Process | None = None

    def __repr__(self) -> str:
        return f"<Child {self.name} pid {self.pid}>"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def supervise(self) -> None:
        """Runs it, again and again, until cancelled. Raises StartError when that would not help.

        Must run on the main thread, to which the child's life is bound."""
        pause_s = _FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            self._process = await self._start()
            status = await self._process.wait()
            if status == EXIT_BAD_SETTINGS:
                raise StartError(self._last_line())
            pause_s = _FIRST_PAUSE_S if time.monotonic() - began > _HEALTHY_AFTER_S else pause_s
            self._say(
                f"{self.name} ended with status {status} ({self._last_line()}); starting it again in {pause_s:g} s"
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def terminate(self) -> None:
        """Asks it to finish what it has and leave."""
        if self.pid is not None:
            assert self._process is not None
            self._process.terminate()

    def kill(self) -> None:
        """Ends it at once, and with it all that it has started."""
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)

    async def wait_stopped(self, timeout_s: float) -> None:
        """Waits for its end, and brings it about after that time."""
        if self._process is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        with self._log_path.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tokenbus.cli.start",
                *self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"TOKENBUS_LOG_FORMAT": "json"},
                start_new_session=True,
                pass_fds=self._fds,
                preexec_fn=end_with_parent,
            )

    def last_logged(self, event: str, key: str) -> object | None:
        """What its newest line of that event says; None where there is none."""
        lines = self._log_path.read_text(errors="replace").splitlines()
        found = (json.loads(line) for line in reversed(lines) if line.startswith("{") and f'"{event}"' in line)
        return next((line.get(key) for line in found if line["event"] == event), None)

    def _last_line(self) -> str:
        """What it said last, and rather what it said to people than what it logged."""
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        said = [line.removeprefix(_SAYS) for line in lines if line.startswith(_SAYS)]
        return (said or lines or [f"{self.name} said nothing"])[-1]
