"""The commands that `tokenbus up` prints can be copied at any width of the terminal."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenbus.cli.console.instructions import UNLIMITED, SystemAddresses, instructions

PLACE = SystemAddresses("nats://127.0.0.1:4222", "http://127.0.0.1:8000/v1", ("demo",), Path("/state/logs/run"))
OTHER = PLACE._replace(nats="nats://127.0.0.1:14222", models=("it's a model", "qwen2.5"))
WIDTHS = (20, 40, 80, 200, UNLIMITED)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKENBUS_API_KEYS", "TOKENBUS_NATS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["start.py", "up"])


def commands(text: str) -> list[list[str]]:
    """The commands of a text as a shell reads them, whose lines continue after a backslash."""
    lines = text.replace("\\\n", "").splitlines()
    return [
        shlex.split(line) for line in lines if line.startswith("  ") and not line.strip().startswith(("router", "w"))
    ]


def physical(text: str) -> Iterator[str]:
    """The lines of commands as they are shown."""
    yield from (line for line in text.splitlines() if line.startswith("  "))


@pytest.mark.parametrize("place", [PLACE, OTHER])
@pytest.mark.parametrize("width", WIDTHS)
def test_commands_mean_the_same_at_every_width_and_none_is_broken_within_quotes(
    place: SystemAddresses, width: int
) -> None:
    text = instructions(place, width)
    assert commands(text) == commands(instructions(place))
    for line in physical(text):
        shlex.split(line.removesuffix("\\"))  # raises ValueError for quotes that are not closed
        is_one_word = len(line.split(" -")) <= 2
        assert len(line) <= width or is_one_word, line


def test_where_there_is_room_each_command_is_one_line() -> None:
    assert "\\\n" not in instructions(OTHER)
    assert len(list(physical(instructions(PLACE)))) == 5


def test_with_defaults_commands_are_short_enough_for_any_terminal() -> None:
    generate, chat, top, curl, nats = commands(instructions(PLACE))
    assert generate == ["tokenbus", "generate", "What is 12 + 30?"]
    assert (chat, top) == (["tokenbus", "chat"], ["tokenbus", "top"])
    assert curl[:2] == ["curl", "http://127.0.0.1:8000/v1/responses"]
    assert json.loads(curl[-1]) == {"input": "What is 12 + 30?"}
    assert nats[-2:] == ["tokenbus.v1.generate.demo", '{"prompt": "12 + 30 ="}']


def test_another_broker_and_one_of_several_models_are_named() -> None:
    generate, chat, top, curl, nats = commands(instructions(OTHER))
    named = ["--nats", "nats://127.0.0.1:14222", "--model", "it's a model"]
    assert generate == ["tokenbus", "generate", *named, "What is 12 + 30?"]
    assert (chat[2:], top[2:]) == (named, named[:2])
    assert json.loads(curl[-1])["model"] == "it's a model"
    assert "nats://127.0.0.1:14222" in nats


def test_the_broker_is_named_where_commands_would_find_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENBUS_NATS", "nats://elsewhere:4222")
    assert commands(instructions(PLACE))[1] == ["tokenbus", "chat", "--nats", "nats://127.0.0.1:4222"]


def test_a_password_is_not_shown_and_it_is_said_where_it_goes() -> None:
    text = instructions(PLACE._replace(nats="nats://broker:4222", has_password=True))
    assert "Set TOKENBUS_NATS to its URL, with the password, for these commands:" in text
    assert commands(text)[1] == ["tokenbus", "chat"]


def test_where_keys_are_needed_it_says_so_and_shows_a_new_one_once() -> None:
    assert "Authorization" not in instructions(PLACE)
    needs_key = PLACE._replace(needs_key=True)
    assert 'Authorization: Bearer $KEY"' in instructions(needs_key)
    shown = instructions(needs_key._replace(first_key="tb_secret"))
    assert shown.count("tb_secret") == 1
    assert "  KEY=tb_secret\n" in shown
    assert "keys create" in shown


def test_the_commands_can_be_typed_as_up_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tokenbus").touch(0o755)
    installed = str(tmp_path / "tokenbus")
    monkeypatch.setenv("PATH", str(tmp_path))
    for called, shown in (
        (".venv/bin/tokenbus", ".venv/bin/tokenbus"),
        ("/my tools/tokenbus", "/my tools/tokenbus"),
        (installed, "tokenbus"),
        ("start.py", "tokenbus"),
    ):
        monkeypatch.setattr("sys.argv", [called, "up"])
        assert commands(instructions(PLACE))[1] == [shown, "chat"]


def test_without_a_gateway_nothing_is_said_of_it() -> None:
    assert "curl" not in instructions(PLACE._replace(http=""))


def test_where_metrics_are_is_said_only_where_they_are() -> None:
    assert "Metrics" not in instructions(PLACE)
    shown = instructions(PLACE._replace(metrics={"router": "http://127.0.0.1:9100/metrics"}))
    assert "  router     http://127.0.0.1:9100/metrics\n" in shown


def test_the_subject_that_is_shown_is_that_of_the_model() -> None:
    assert "tokenbus.v1.generate.qwen2=2E5" in commands(instructions(PLACE._replace(models=("qwen2.5",))))[-1]
