"""Reads calls that are one JSON object with the name and the arguments."""

from __future__ import annotations

from enum import Enum

import msgspec

from tokenbus.worker.chat_format.parsing.call_reader import CallReader, Sink, Tools
from tokenbus.worker.chat_format.parsing.cursor import Cursor, Malformed
from tokenbus.worker.chat_format.parsing.rules import CallRules
from tokenbus.worker.chat_format.parsing.values import ValueReader
from tokenbus.worker.contract.chat_format import Values


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
                self._begin(self._key)
        elif field is _Field.NAME:
            if self._begun:
                raise Malformed
            self._begin(_decode_text(text))
        elif field is _Field.ID:
            self._id = text.strip('"')
        elif field is _Field.ENCODED and text != "null":
            self._write([_decode_object(text)])

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
