"""The lines that `tokenbus up` prints where there is no terminal."""

import errno
import os
from pathlib import Path

import pytest

from tests.router.builders import card
from tokenbus.cli.console.instructions import SystemAddresses, instructions
from tokenbus.cli.console.screen import GuardedScreen, PlainScreen, Screen
from tokenbus.protocol.wire import cards, messages

ADDRESSES = SystemAddresses("nats://127.0.0.1:4222", "", ("demo",), Path("logs"))


def serving(*worker_ids: str) -> messages.ModelsReply:
    workers = [card(one) for one in worker_ids]
    served = cards.ServedModel(model="demo", context_length=512, features=[], workers=workers)
    return messages.ModelsReply(models=[served], limits=cards.ServerLimits(max_request_bytes=1))


def test_workers_are_said_to_be_ready_before_the_system_is(capsys: pytest.CaptureFixture[str]) -> None:
    screen = PlainScreen()
    screen.loading(serving("worker-1"), 2)
    screen.ready(ADDRESSES, serving("worker-1", "worker-2"))
    begin = "starting: 1 of 2 workers have loaded the model\nworker-1 is ready\nworker-2 is ready\n"
    assert capsys.readouterr().out == begin + instructions(ADDRESSES) + "\n"


def test_later_only_changes_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    screen = PlainScreen()
    screen.ready(ADDRESSES, serving("worker-1"))
    capsys.readouterr()
    screen.show(serving("worker-1"))
    screen.show(serving())
    assert capsys.readouterr().out == "worker-1 is gone\n"


class FailingScreen(Screen):
    """A screen whose output fails."""

    def __init__(self, number: int) -> None:
        self._number = number

    def write(self, line: str) -> None:
        raise OSError(self._number, os.strerror(self._number))


def test_a_full_disk_or_a_closed_terminal_hides_lines_and_ends_nothing() -> None:
    for number in (errno.ENOSPC, errno.EIO):
        screen = GuardedScreen(FailingScreen(number))
        screen.write("a line")
        assert not screen.is_reader_gone


def test_it_is_told_once_nothing_reads_the_output_any_more() -> None:
    screen = GuardedScreen(FailingScreen(errno.EPIPE))
    told: list[str] = []
    screen.on_reader_gone = lambda: told.append("gone")
    screen.write("a line")
    assert screen.is_reader_gone
    assert told == ["gone"]
