"""Answers on a terminal can't do more than be read."""

import asyncio
import io
import sys
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from tokenbus.cli.console.answers import print_stream, shown
from tokenbus.protocol.wire.messages import Chunk, FinishReason


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("\x1b]52;c;cm0=\x07", "␛]52;c;cm0=␇"),
        ("a\rb\x08\x7f", "a␍b␈␡"),
        ("\x9b2J", "\ufffd2J"),
        ("tab\tand\nline, naïve 漢字 🙂", "tab\tand\nline, naïve 漢字 🙂"),
    ],
)
def test_a_terminal_gets_pictures_of_control_characters_and_a_pipe_the_text_itself(text: str, seen: str) -> None:
    assert shown(text, Terminal()) == seen
    assert shown(text, io.StringIO()) == text


def printed(*chunks: dict[str, Any]) -> None:
    """Prints an answer in these chunks."""

    async def stream() -> AsyncIterator[Chunk]:
        for each in chunks:
            yield Chunk(
                **({"id": "a", "attempt": 1, "offset": 0, "worker_id": None, "model": "b", "created": 0} | each)
            )

    asyncio.run(print_stream(cast(Any, stream())))


LOADED = [{"load_progress": 0.0}, {"load_progress": 0.5}, {"text": "yes"}, {"finish_reason": FinishReason.STOP}]


def test_a_pipe_is_told_once_that_a_model_is_being_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    printed(*LOADED)
    out, err = capsys.readouterr()
    assert out == "yes\n"
    assert err == "[waiting: b is being loaded]\n[stop, router]\n"


def test_a_terminal_shows_how_far_a_model_is_loaded_until_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    printed(*LOADED)
    waits = ["[waiting: b is being loaded, 0%]", "[waiting: b is being loaded, 50%]", ""]
    assert terminal.getvalue() == "".join(f"\r{one}\x1b[K" for one in waits) + "[stop, router]\n"
