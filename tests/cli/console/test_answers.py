"""Answers on a terminal can't do more than be read."""

import io

import pytest

from tokenbus.cli.console.answers import shown


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
