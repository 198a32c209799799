"""Reads calls that begin with a header: the name, possibly with an id or a number."""

from __future__ import annotations

from tokenbus.worker.chat_format.parsing.call_reader import CallReader, Sink, Tools
from tokenbus.worker.chat_format.parsing.cursor import Cursor, Malformed
from tokenbus.worker.chat_format.parsing.markers import Marker, MarkerMatch
from tokenbus.worker.chat_format.parsing.rules import CallRules

MAX_HEADER = 1024
"""The most characters of a header, a key or a type."""
_BRACE = Marker("{")


class HeaderCall(CallReader):
    """A call with a header."""

    def __init__(self, rules: CallRules, tools: Tools, sink: Sink, *, must_be_known: bool) -> None:
        super().__init__(rules, tools, sink, must_be_known=must_be_known)
        self._step = self._header

    def _header_ends(self) -> list[Marker]:
        """Returns the markers that may follow the header."""
        raise NotImplementedError

    def _behind_header(self, marker: Marker, end: int, cursor: Cursor) -> bool:
        """Continues after the header, which ends with `marker`."""
        raise NotImplementedError

    def _header(self, cursor: Cursor) -> bool:
        found = self._until(cursor, self._header_ends())
        if found is None:
            return False
        text, marker, end = found
        header = self._rules.header.fullmatch(text.strip())
        if header is None:
            raise Malformed
        parts = header.groupdict()
        self._id, number = parts.get("id"), parts.get("index")
        name = self._rules.alphabet.decode(parts["name"]).strip()
        self._begin(name, int(number) if number and len(number) < 10 else None)
        return self._behind_header(marker, end, cursor)

    def _until(self, cursor: Cursor, markers: list[Marker]) -> tuple[str, Marker, int] | None:
        """Returns the text before the first of the markers, that marker, and where it ends. Moves the cursor up to the
        marker if it is found."""
        text, start = cursor.text, cursor.at
        limit = start + MAX_HEADER
        places = [(text.find(one.first, start, limit), one) for one in markers if one]
        while places := [(at, one) for at, one in places if at >= 0]:
            at, marker = min(places, key=lambda place: place[0])
            end = marker.match(text, at)
            if isinstance(end, int):
                cursor.at = at
                return text[start:at], marker, end
            if end is MarkerMatch.MORE and not cursor.ended:
                return None
            places.remove((at, marker))
            places.append((text.find(marker.first, at + 1, limit), marker))
        if len(text) >= limit:
            raise Malformed
        return None


class NamedCall(HeaderCall):
    """A header, then one arguments object."""

    def begin(self, name: str) -> None:
        """Starts with the arguments, since the name is already known."""
        self._begin(name)
        self._step = self._arguments

    def _header_ends(self) -> list[Marker]:
        return [self._rules.name_close or _BRACE]

    def _behind_header(self, marker: Marker, end: int, cursor: Cursor) -> bool:
        if marker is not _BRACE:
            cursor.at = end
        return self._then(self._arguments)

    def _arguments(self, cursor: Cursor) -> bool:
        """Reads the arguments object."""
        if not self._any:
            cursor.skip_whitespace()
            if cursor.at == len(cursor.text):
                return False
            if cursor.text[cursor.at] != "{":
                raise Malformed
        self._closing = self._read_value(cursor)
        return self._closing
