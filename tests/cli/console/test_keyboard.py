"""Keys that leave a command which redraws the terminal."""

import os
import pty
import sys
import tty

import pytest

from tokenbus.cli.console import keyboard


@pytest.mark.parametrize(
    ("pressed", "leaves"),
    [("q", True), ("Q", True), ("\x04", True), ("x", False), ("\x1bOQ", False), ("\x1b[A", False)],
    ids=["q", "Q", "Ctrl-D", "x", "F2", "up"],
)
def test_keys_that_leave_do_and_others_are_passed_on(
    pressed: str, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    left: list[bool] = []
    others: list[bytes] = []
    with os.fdopen(ours, "wb", buffering=0) as hands, os.fdopen(theirs) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        hands.write(pressed.encode())
        keyboard._Keys(lambda: left.append(True), others.append)._read()
    assert left == [True] * leaves
    assert others == ([] if leaves else [pressed.encode()])
