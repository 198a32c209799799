"""Reads content and reasoning up to the next marker."""

from __future__ import annotations

from typing import NamedTuple

from tokenbus.worker.chat_format.parsing.cursor import Cursor
from tokenbus.worker.chat_format.parsing.markers import MAX_WHITESPACE, MarkerMatch
from tokenbus.worker.chat_format.parsing.output import ParsedOutput
from tokenbus.worker.chat_format.parsing.scans import Exit, Scan, To


class Found(NamedTuple):
    """A marker after a text."""

    to: To
    at: int
    text_end: int
    """Where the text before it ends, excluding whitespace that belongs to the marker."""
    skip: str
    """Whitespace after the marker that belongs to it."""


class TextReader:
    """Passes on text as it arrives. Holds back potential markers, and whitespace that belongs to a marker if one
    follows; whitespace alone does not count as text."""

    def __init__(self, cursor: Cursor, output: ParsedOutput) -> None:
        self._cursor = cursor
        self._output = output
        self.scan = Scan(None, [])
        self._skip = ""
        """Whitespace that belongs to the marker before the text."""
        self.is_first = True
        """Only whitespace has been read of this text."""
        self.after_marker = False
        """A marker has been read, so whitespace alone does not count as an answer."""
        self.in_prompt = False

    def begin(self, scan: Scan, *, skip: str = "", is_first: bool = True) -> None:
        self.scan, self._skip, self.is_first = scan, skip, is_first

    def read(self) -> Found | None:
        """Continues reading; returns the marker that ends the text, once found."""
        cursor, scan = self._cursor, self.scan
        text = cursor.text
        if self._skip and not self._skip_edge():
            return None
        at = cursor.at
        while found := scan.search(text, at):
            at = found.start()
            is_first = self.is_first and at - cursor.at <= MAX_WHITESPACE and not text[cursor.at : at].strip()
            for one in scan.exits[text[at]]:
                if one.only_first and not is_first and not (self.in_prompt and one.to is To.REASONING):
                    continue
                end = one.marker.match(text, at)
                if isinstance(end, int) or (end is MarkerMatch.MORE and not cursor.ended):
                    self._say_until(at, one, is_first=is_first)
                    return self._exit(one, at, end) if isinstance(end, int) else None
            at += 1
        self._say_rest()
        return None

    def _exit(self, one: Exit, at: int, end: int) -> Found:
        text_end, self._cursor.at = self._cursor.at, end
        self.after_marker = True
        return Found(one.to, at, text_end, one.marker.after)

    def _skip_edge(self) -> bool:
        """Skips whitespace after a marker. Returns false if there may be more."""
        text, at = self._cursor.text, self._cursor.at
        while at < len(text) and text[at] in self._skip:
            at += 1
        self._cursor.at = at
        if at == len(text):
            return False
        self._skip = ""
        return True

    def _say_until(self, at: int, found: Exit, *, is_first: bool) -> None:
        """Passes on the text before a potential marker."""
        text, start = self._cursor.text, self._cursor.at
        end = start if is_first else at
        if found.marker.before and not is_first:
            edge = max(start, at - MAX_WHITESPACE)
            end = edge + len(text[edge:at].rstrip())
        self.is_first = is_first
        self._cursor.at = end
        self._output.say(text[start:end], self.scan.kind)

    def _say_rest(self) -> None:
        """Passes on text in which no marker begins."""
        cursor, scan = self._cursor, self.scan
        text, start = cursor.text, cursor.at
        end = len(text)
        if start == end:
            return
        if (self.is_first or scan.owns_whitespace) and text[-1].isspace():
            end = max(start, len(text.rstrip()), end - MAX_WHITESPACE)
            if cursor.ended and (end > start or not self.is_first or not self.after_marker):
                end = len(text)
        if end > start:
            self.is_first = False
            self._output.say(text[start:end] if start or end < len(text) else text, scan.kind)
        cursor.at = len(text) if cursor.ended else end
