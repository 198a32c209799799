"""Runs a long command and shows how it gets on: it is never silent for longer than a few seconds."""

import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

ON_TERMINAL_S = 0.5
IN_LOG_S = 4.0
_TAIL_LINES = 30
_WIDTH = 100
_CLEAN_UP_S = 10.0
_START_OF_LINE = "\r\x1b[K"

Describe = Callable[[str], str]
"""Returns what a line of output says about the progress, or an empty string."""


class CommandFailedError(RuntimeError):
    """A command failed, and the end of its output has been printed."""

    def __init__(self, text: str, output: str) -> None:
        super().__init__(text)
        self.output = output
        """The end of its output."""


class Progress:
    """The elapsed time and the last news: on a terminal one line that changes, elsewhere a line every few seconds."""

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self._on_terminal = sys.stderr.isatty()
        self._shown_at = self._began_at
        self._is_line_open = False

    def __repr__(self) -> str:
        return f"<Progress {self.elapsed_s:.1f} s>"

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_at

    @property
    def due_s(self) -> float:
        """Seconds until something has to be shown."""
        interval_s = ON_TERMINAL_S if self._on_terminal else IN_LOG_S
        return max(0.0, self._shown_at + interval_s - time.monotonic())

    def show(self, news: str) -> None:
        start, end = (_START_OF_LINE, "") if self._on_terminal else ("", "\n")
        print(f"{start}  {self.elapsed_s:3.0f} s  {news[:_WIDTH]}", end=end, file=sys.stderr, flush=True)
        self._shown_at, self._is_line_open = time.monotonic(), self._on_terminal

    def close(self) -> None:
        """Removes the line that changes, so that others can follow."""
        if self._is_line_open:
            print(_START_OF_LINE, end="", file=sys.stderr, flush=True)
            self._is_line_open = False


def run(command: Sequence[str], news: str, describe: Describe, environment: Mapping[str, str] | None = None) -> None:
    """Runs a command and shows its progress on standard error, beginning with `news`. Raises CommandFailedError, after
    the end of its output was printed."""
    progress, tail = Progress(), deque[str](maxlen=_TAIL_LINES)
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        pipe, rest = process.stdout.fileno(), b""
        progress.show(news)
        try:
            while True:
                if not select.select([pipe], [], [], progress.due_s)[0]:
                    progress.show(news)
                    continue
                data = os.read(pipe, 65_536)
                if not data:
                    break
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    text = line.decode(errors="replace").rstrip()
                    tail.append(text)
                    news = describe(text) or news
                if not progress.due_s:
                    progress.show(news)
        except BaseException:
            end(process)
            raise
        finally:
            progress.close()
    if process.returncode:
        output = "\n".join(tail)
        print(output, file=sys.stderr)
        raise CommandFailedError(f"{' '.join(command[:4])} ... ended with status {process.returncode}", output)


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a command. Ctrl-C has interrupted it too: then it has a few seconds to remove its files."""
    try:
        process.wait(_CLEAN_UP_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
