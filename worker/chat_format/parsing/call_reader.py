"""Reads one tool call: an object with the name and the arguments, or a header with the name and an arguments object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Protocol

import msgspec

from tokenbus.worker.chat_format.parsing.cursor import Cursor, Malformed
from tokenbus.worker.chat_format.parsing.markers import NAME, CallRules, Marker, MarkerMatch, first_of, skip_whitespace
from tokenbus.worker.chat_format.parsing.schemas import SchemaReader
from tokenbus.worker.chat_format.parsing.values import ValueReader
from tokenbus.worker.contract.chat_format import Values

Tools = Mapping[str, SchemaReader]
"""The parameters of each tool: a JSON schema."""


class Sink(Protocol):
    """Receives a call while it is read."""

    def begin_call(self, name: str, given: str | None, number: int | None) -> None:
        """Takes the name and, if the model has written them, the id and the number."""

    def add_arguments(self, fragment: str) -> None:
        """Takes more of the arguments."""


class CallReader:
    """One call, from after `call_open` to the end of `call_close`."""

    def __init__(self, rules: CallRules, tools: Tools, sink: Sink, *, must_be_known: bool) -> None:
        self._rules = rules
        self._tools = tools
        self._sink = sink
        self._must_be_known = must_be_known
        self._closes = rules.closes
        self._name = ""
        self._id: str | None = None
        self._begun = False
        self._pending: list[str] = []
        """Arguments read before the name."""
        self._any = False
        """Whether any part of the arguments has been read."""
        self._reader = ValueReader(rules.calls.values, rules.alphabet, rules.quote)
        self._step: Callable[[Cursor], bool]
        """Continues reading; returns false if it needs more text."""
        self._closing = False

    def read(self, cursor: Cursor) -> bool:
        """Continues reading; returns whether the call is complete; raises `Malformed` if it can't become a call."""
        while not self._closing:
            if not self._step(cursor):
                return False
        return self._close(cursor)

    def _then(self, step: Callable[[Cursor], bool]) -> bool:
        self._step = step
        return True

    def _begin(self, name: str, number: int | None = None) -> None:
        if not NAME.fullmatch(name) or (self._must_be_known and name not in self._tools):
            raise Malformed
        self._name = name
        self._begun = True
        self._sink.begin_call(name, self._id, number)
        for fragment in self._pending:
            self._sink.add_arguments(fragment)
        self._pending = []

    def _write(self, fragments: list[str]) -> None:
        if not fragments:
            return
        self._any = True
        if self._begun:
            self._sink.add_arguments("".join(fragments))
        else:
            self._pending += fragments

    def _close(self, cursor: Cursor) -> bool:
        """Reads what closes the call. A model that ends its turn after the arguments has also closed it."""
        if not any(self._closes):
            return True
        at = skip_whitespace(cursor.text, cursor.at)
        end = first_of(self._closes, cursor.text, at)
        if isinstance(end, int):
            cursor.at = end
            return True
        if end is MarkerMatch.MORE and not cursor.ended:
            return False
        if at == len(cursor.text):
            return not cursor.cut_off
        follows = first_of(self._rules.follows, cursor.text, at)
        if follows is MarkerMatch.MORE and not cursor.ended:
            return False
        if isinstance(follows, int):
            return True
        raise Malformed

    def _read_value(self, cursor: Cursor) -> bool:
        """Continues reading a value that is passed on as it arrives, up to where it is malformed, if it is."""
        out: list[str] = []
        try:
            return self._reader.read(cursor, out)
        finally:
            self._write(out)


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


class _Field(Enum):
    OPEN = 0
    KEY = 1
    KEY_TEXT = 2
    COLON = 3
    VALUE = 4
    NAME = 5
    ID = 6
    ARGUMENTS = 7
    ENCODED = 8
    IGNORED = 9
    NEXT = 10


class JsonCall(CallReader):
    """An object whose fields may be in any order. Arguments before the name wait for it."""

    def __init__(self, rules: CallRules, tools: Tools, sink: Sink, *, must_be_known: bool) -> None:
        super().__init__(rules, tools, sink, must_be_known=must_be_known)
        self._calls = rules.calls
        self._field = _Field.OPEN
        self._key = ""
        self._parts: list[str] = []
        self._step = self._object

    def _object(self, cursor: Cursor) -> bool:
        if self._field in (_Field.KEY_TEXT, _Field.NAME, _Field.ID, _Field.ARGUMENTS, _Field.ENCODED, _Field.IGNORED):
            return self._read_field(cursor)
        cursor.skip_whitespace()
        if cursor.at == len(cursor.text):
            return False
        character = cursor.text[cursor.at]
        if self._field is _Field.OPEN:
            self._expect(cursor, "{", _Field.KEY)
        elif self._field is _Field.COLON:
            self._expect(cursor, ":", _Field.VALUE)
        elif self._field is _Field.VALUE:
            self._begin_field(character)
        elif character == "}":
            self._end_object(cursor)
        elif self._field is _Field.NEXT:
            self._expect(cursor, ",", _Field.KEY)
        elif character == '"':
            self._begin_text(_Field.KEY_TEXT)
        else:
            raise Malformed
        return True

    def _expect(self, cursor: Cursor, character: str, then: _Field) -> None:
        if cursor.text[cursor.at] != character:
            raise Malformed
        cursor.at += 1
        self._field = then

    def _begin_text(self, field: _Field) -> None:
        self._field = field
        self._parts = []
        self._reader = ValueReader(Values.JSON, self._rules.alphabet)

    def _begin_field(self, character: str) -> None:
        if not self._calls.name_key or self._key in (self._calls.arguments_key, "arguments", "parameters"):
            if character == "{" and not self._any:
                self._begin_text(_Field.ARGUMENTS)
            elif character in '"n':
                self._begin_text(_Field.ENCODED)
            else:
                raise Malformed
        elif self._key == self._calls.name_key:
            self._begin_text(_Field.NAME)
        elif self._key == self._calls.id_key:
            self._begin_text(_Field.ID)
        else:
            self._begin_text(_Field.IGNORED)

    def _read_field(self, cursor: Cursor) -> bool:
        is_argument = self._field is _Field.ARGUMENTS
        done = self._read_value(cursor) if is_argument else self._reader.read(cursor, self._parts)
        if self._field is _Field.IGNORED:
            self._parts = []
        if done:
            self._end_field()
        return done

    def _end_field(self) -> None:
        field, self._field = self._field, _Field.NEXT
        text = "".join(self._parts)
        if field is _Field.KEY_TEXT:
            self._key = _decode_text(text)
            self._field = _Field.COLON
            if not self._calls.name_key:
                self._begin_once(self._key)
        elif field is _Field.NAME:
            self._begin_once(_decode_text(text))
        elif field is _Field.ID:
            self._id = text.strip('"')
        elif field is _Field.ENCODED and text != "null":
            self._write([_decode_object(text)])

    def _begin_once(self, name: str) -> None:
        if self._begun:
            raise Malformed
        self._begin(name)

    def _end_object(self, cursor: Cursor) -> None:
        if not self._begun:
            raise Malformed
        cursor.at += 1
        if not self._any:
            self._write(["{}"])
        self._closing = True


def _decode_text(text: str) -> str:
    try:
        return msgspec.json.decode(text, type=str)
    except msgspec.MsgspecError as error:
        raise Malformed from error


def _decode_object(text: str) -> str:
    """Returns arguments written as a JSON string."""
    inner = _decode_text(text)
    try:
        msgspec.json.decode(inner, type=dict)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Malformed from error
    return inner.strip()
