"""The lines that `tokenbus up` prints where there is no terminal."""

from pathlib import Path

import pytest

from tests.router.builders import card
from tokenbus.cli.console.screen import PlainScreen, SystemAddresses, instructions
from tokenbus.protocol.wire import cards, messages

ADDRESSES = SystemAddresses("nats://127.0.0.1:4222", "", "demo", Path("logs"))


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


def test_the_subject_that_is_shown_is_that_of_the_model() -> None:
    assert " tokenbus.v1.generate.qwen2=2E5 '" in instructions(ADDRESSES._replace(model="qwen2.5"))
