"""Texts that somebody else has chosen, such as a worker's name: nothing in them is a command to the terminal or markup
to rich."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text


def printable(text: str, *, lines: bool = False) -> str:
    """Returns a text without what a terminal could take for a command. With `lines` it keeps its line breaks."""
    if lines:
        return "\n".join(map(printable, text.split("\n")))
    return text if text.isprintable() else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def cells(*texts: str) -> "list[Text]":
    """Returns a row of a table."""
    from rich.text import Text  # slow, and most commands print no table

    return [Text(printable(text)) for text in texts]
