"""The text not yet read by a parser."""

from __future__ import annotations

import re

_WHITESPACE = re.compile(r"\s*")


class Malformed(Exception):
    """The text being read as a call can't become one. Caught inside the parser."""


class Cursor:
    """The text that has arrived and the position up to which it has been read."""

    __slots__ = ("at", "cut_off", "ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        """No more text will arrive."""
        self.cut_off = False
        """It ended because a limit was reached, not because the model was done."""

    def append(self, text: str) -> None:
        """Adds text, and drops what has been read."""
        self.text = self.text[self.at :] + text if self.at < len(self.text) else text
        self.at = 0

    def skip_whitespace(self) -> None:
        found = _WHITESPACE.match(self.text, self.at)
        assert found is not None
        self.at = found.end()


class ReadBack:
    """Everything read since a call or a section began, as long as it may still turn out to be content."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._parts: list[str] | None = None
        self._from = 0

    def begin(self, at: int) -> None:
        self._parts, self._from = [], at

    def forget(self) -> None:
        self._parts = None

    def restart(self) -> None:
        """Drops what has been read so far, and continues."""
        if self._parts is not None:
            self.begin(self._cursor.at)

    def keep(self) -> None:
        """Saves what has been read before the cursor drops it."""
        if self._parts is not None:
            self._parts.append(self._cursor.text[self._from : self._cursor.at])
        self._from = 0

    def text(self) -> str:
        if self._parts is None:
            return ""
        return "".join(self._parts) + self._cursor.text[self._from : self._cursor.at]

    def length_before(self, at: int) -> int:
        """Returns the length of the text up to a position."""
        return sum(map(len, self._parts or ())) + at - self._from
