"""A command on a terminal of its own, as a person uses it: keys are typed and the screen is read."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from tests.support.zygote import own_terminal

_PATIENCE_S = 60.0


class Terminal:
    """Runs a command on a new pseudoterminal. Use it in a `with` block, which kills the command."""

    def __init__(self, arguments: list[str], variables: Mapping[str, str], columns: int = 80) -> None:
        self._terminal, end = pty.openpty()
        self._end = end
        """The command's side, which stays open, so that its settings can be read after the command has ended."""
        self.resize(columns)
        self.process = subprocess.Popen(
            arguments,
            stdin=end,
            stdout=end,
            stderr=end,
            env=_inherited() | {"TERM": "xterm"} | variables,
            start_new_session=True,
            preexec_fn=own_terminal,
        )
        self._unread = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._end)
        os.close(self._terminal)

    def until(self, text: str) -> str:
        """Returns what is shown up to the end of a text."""
        found = text.encode()
        deadline = time.monotonic() + _PATIENCE_S
        while found not in self._unread:
            is_possible = self.process.poll() is None and time.monotonic() < deadline
            assert is_possible, f"{text!r} is not shown, only {self._unread[-2000:]!r}"
            self._read(timeout_s=0.1)
        shown, _, self._unread = self._unread.partition(found)
        return (shown + found).decode()

    def press(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Returns the exit status of the command, whose output is read meanwhile: it could not end otherwise."""
        deadline = time.monotonic() + _PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it still runs: {self._unread!r}"
            self._read(timeout_s=0.02)
        self._read(timeout_s=0.0)
        return self.process.returncode

    @property
    def rest(self) -> str:
        """Everything shown that was not waited for."""
        return self._unread.decode()

    @property
    def is_as_before(self) -> bool:
        """Whether typed keys are echoed and wait for Enter, as in a shell."""
        flags = termios.tcgetattr(self._end)[3]
        return bool(flags & termios.ECHO and flags & termios.ICANON)

    def _read(self, timeout_s: float) -> None:
        while select.select([self._terminal], [], [], timeout_s)[0]:
            with contextlib.suppress(OSError):
                self._unread += os.read(self._terminal, 1 << 16)
            timeout_s = 0.0


def _inherited() -> dict[str, str]:
    """Returns our environment without the size of another terminal, which would count more than this one's."""
    return {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
