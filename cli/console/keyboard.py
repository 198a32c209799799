"""Single keys pressed on a terminal that a command redraws, which is left as it was in every way of ending."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.live import Live

from tokenbus.protocol.process import signals

if sys.platform != "win32":
    import termios
    import tty

LEAVING = frozenset(b"qQ\x04")
"""The keys that leave a command: q, and Ctrl-D."""
_ESCAPE = b"\x1b"
"""Begins what keys without a character send, such as F2, whose sequence has a Q."""
FORWARD = frozenset((b"\x1b[B", b"\x1bOB", b"\x1b[6~", b" ", b"n", b"j"))
"""Sent by the keys for the next page: arrow down, page down, space, n and j."""
BACKWARD = frozenset((b"\x1b[A", b"\x1bOA", b"\x1b[5~", b"b", b"p", b"k"))
"""Sent by the keys for the page before: arrow up, page up, b, p and k."""
SIGNALS = (*signals.SIGNALS, *signals.HANGUP)


@contextlib.contextmanager
def watched(
    live: Live, leave: Callable[[], object], press: Callable[[bytes], object] = lambda key: None
) -> Iterator[None]:
    """Within the block, `live` is shown and calls `leave` for a key that leaves, and for the first signal to stop. The
    second ends the process. Ctrl-Z suspends it. `press` gets what each other key sends. Windows has Ctrl-C only."""
    loop, keys = asyncio.get_running_loop(), _Keys(leave, press)

    def suspend() -> None:
        live.stop()
        keys.release()
        loop.remove_signal_handler(signal.SIGTSTP)  # which leaves the default action, to stop
        signal.raise_signal(signal.SIGTSTP)
        loop.add_signal_handler(signal.SIGTSTP, suspend)
        keys.take()
        live.start(refresh=True)

    def restore() -> None:
        live.stop()
        keys.release()

    keys.take()
    try:
        with live, signals.on_stop(leave, restore, SIGNALS):
            if sys.platform != "win32":
                loop.add_signal_handler(signal.SIGTSTP, suspend)
            try:
                yield
            finally:
                if sys.platform != "win32":
                    loop.remove_signal_handler(signal.SIGTSTP)
    finally:
        keys.release()


class _Keys:
    """Standard input, if it is a terminal: keys arrive at once and are not echoed while they are taken."""

    def __init__(self, leave: Callable[[], object], press: Callable[[bytes], object]) -> None:
        self._leave = leave
        self._press = press
        self._before: list[Any] | None = None
        """The terminal's attributes before its keys were taken; None if they are not."""

    def take(self) -> None:
        if sys.platform != "win32" and sys.stdin.isatty():
            file = sys.stdin.fileno()
            self._before = termios.tcgetattr(file)
            tty.setcbreak(file, termios.TCSADRAIN)
            asyncio.get_running_loop().add_reader(file, self._read)

    def release(self) -> None:
        """Restores the terminal. Idempotent."""
        if sys.platform != "win32" and self._before is not None:
            file = sys.stdin.fileno()
            asyncio.get_running_loop().remove_reader(file)
            with contextlib.suppress(termios.error):  # it is gone
                termios.tcsetattr(file, termios.TCSADRAIN, self._before)
            self._before = None

    def _read(self) -> None:
        try:
            pressed = os.read(sys.stdin.fileno(), 1_024)
        except OSError:
            pressed = b""
        # nothing is read from a terminal that is gone
        if not pressed or (LEAVING & set(pressed) and not pressed.startswith(_ESCAPE)):
            self._leave()
        else:
            self._press(pressed)
