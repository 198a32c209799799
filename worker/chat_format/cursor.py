"""The text that a parser has not read yet."""

from __future__ import annotations

import re

_WHITESPACE = re.compile(r"\s*")


class Malformed(Exception):
    """What was read as a call can't become one. Caught inside of the parser."""


class Cursor:
    """The text that has arrived and the place in it up to which it has been read."""

    __slots__ = ("at", "cut_off", "ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        """No more text will come."""
        self.cut_off = False
        """It ended because a limit was reached, not because the model was done."""

    def append(self, text: str) -> None:
        """Adds text, and forgets what has been read."""
        self.text = self.text[self.at :] + text if self.at < len(self.text) else text
        self.at = 0

    def skip_whitespace(self) -> None:
        found = _WHITESPACE.match(self.text, self.at)
        assert found is not None
        self.at = found.end()
