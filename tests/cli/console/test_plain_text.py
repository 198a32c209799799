"""What others have chosen, such as the names of workers, is shown as it is, and commands no terminal."""

import argparse
import asyncio
from typing import cast

import pytest
from rich.console import Console

from tests.cli.test_top import Viewer
from tests.router.builders import card
from tokenbus.cli.commands import models, top
from tokenbus.cli.console import screen, session
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import cards, messages

HOSTILE = "[/a]\x1b"
SHOWN = "[/a]\\x1b"
SERVED = cards.ServedModel(model=HOSTILE, context_length=512, features=[HOSTILE], workers=[card(HOSTILE)])
REPLY = messages.ModelsReply(models=[SERVED], limits=cards.ServerLimits(max_request_bytes=1))


class Client:
    """A client of a fleet with hostile names."""

    async def models(self, **_: object) -> messages.ModelsReply:
        return REPLY


def check(shown: str, times: int) -> None:
    assert shown.count(SHOWN) == times, shown
    assert all(char.isprintable() or char == "\n" for char in shown)


@pytest.mark.parametrize("summary", [True, False])
async def test_the_list_of_models(summary: bool, capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(model=None, summary=summary, json=False)
    assert await models._list(options, cast("WireClient", Client())) == 0
    shown = capsys.readouterr().out
    check(shown, 3 if summary else 4)
    head, row, *_ = shown.splitlines()
    assert (head.index("context") + len("context"), head.split()[-1]) == (row.index("512") + 3, "waiting")


async def test_the_table_of_top(capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(once=True, json=False, model=None)
    assert await asyncio.wait_for(top._top(options, cast("WireClient", Viewer(HOSTILE))), 5.0) == 0
    check(capsys.readouterr().out, 1)


def test_the_lines_below_the_table_of_top() -> None:
    limits = [messages.ClientLimits(tenant=HOSTILE)]
    console = Console(width=200)
    with console.capture() as captured:
        console.print(top.make_table([], (), 200, limits=limits))
    assert SHOWN in "".join(captured.get().split())


def test_what_up_shows(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(screen._table(REPLY))
    check(captured.get(), 2)
    screen.PlainScreen().show(REPLY)
    check(capsys.readouterr().out, 1)


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert session.print_error(f"{HOSTILE}\nand more") == 1
    said = capsys.readouterr().err
    check(said, 1)
    assert said.count("tokenbus: ") == 2
