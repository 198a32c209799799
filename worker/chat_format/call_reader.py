"""Reads one tool call."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Protocol

import msgspec

from tokenbus.worker.chat_format import schema
from tokenbus.worker.chat_format.chat_format import Kind, Values
from tokenbus.worker.chat_format.cursor import Cursor, Malformed
from tokenbus.worker.chat_format.markers import MAX_WHITESPACE, Marker, Match, first_of, skip_whitespace
from tokenbus.worker.chat_format.rules import NAME, CallRules
from tokenbus.worker.chat_format.values import ValueReader, escape

MAX_HEADER = 1024
"""Characters of a header, a key or a type."""
Tools = Mapping[str, schema.Schema]
"""The parameters of each tool: a JSON schema."""


class Sink(Protocol):
    """Where a call goes to while it is read."""

    def begin_call(self, name: str, given: str | None, number: int | None) -> None:
        """Takes the name and, if the model has written them, the id and the number."""

    def add_arguments(self, fragment: str) -> None:
        """Takes more of the arguments."""


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


class CallReader:
    """One call, from what stands behind `call_open` to the end of `call_close`."""

    def __init__(self, rules: CallRules, tools: Tools, sink: Sink, *, must_be_known: bool) -> None:
        self._rules = rules
        self._calls = rules.calls
        self._closes = rules.closes
        self._tools = tools
        self._sink = sink
        self._must_be_known = must_be_known
        self._name = ""
        self._id: str | None = None
        self._begun = False
        self._pending: list[str] = []
        self._any = False
        """Whether any of the arguments has been written."""
        self._field = _Field.OPEN
        self._key = ""
        self._types: set[str] = set()
        self._parts: list[str] = []
        self._reader = ValueReader(self._calls.values, rules.alphabet, rules.quote)
        self._step: Callable[[Cursor], bool] = self._object if self._calls.kind is Kind.JSON else self._header
        self._closing = False

    @classmethod
    def of_arguments(cls, rules: CallRules, tools: Tools, sink: Sink, name: str) -> CallReader:
        """Returns a reader of a call whose name is known already."""
        reader = cls(rules, tools, sink, must_be_known=False)
        reader._begin(name)
        reader._step = reader._arguments
        return reader

    def read(self, cursor: Cursor) -> bool:
        """Reads on, and returns whether the call is complete; raises `Malformed` if it can't become one."""
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
        """Reads what closes the call. A model that ends its turn behind the arguments has closed it, too."""
        if not any(self._closes):
            return True
        at = skip_whitespace(cursor.text, cursor.at)
        end = first_of(self._closes, cursor.text, at)
        if isinstance(end, int):
            cursor.at = end
            return True
        if end is Match.MORE and not cursor.ended:
            return False
        if at == len(cursor.text):
            return not cursor.cut_off
        follows = first_of(self._rules.follows, cursor.text, at)
        if follows is Match.MORE and not cursor.ended:
            return False
        if isinstance(follows, int):
            return True
        raise Malformed

    # JSON: an object with the name and the arguments.

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
        if self._field is _Field.ARGUMENTS:
            done = self._read_value(cursor)
        else:
            done = self._reader.read(cursor, self._parts)
        if self._field is _Field.IGNORED:
            self._parts = []
        if done:
            self._end_field()
        return done

    def _read_value(self, cursor: Cursor) -> bool:
        """Reads on in a value that goes out as it comes, up to where it is malformed if it is."""
        out: list[str] = []
        try:
            return self._reader.read(cursor, out)
        finally:
            self._write(out)

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

    # NAMED and TAGGED: a header with the name.

    def _header(self, cursor: Cursor) -> bool:
        rules = self._rules
        if self._calls.kind is Kind.NAMED:
            found = self._until(cursor, [rules.name_close] if rules.name_close else [_BRACE])
        elif rules.name_close:
            found = self._until(
                cursor, [rules.name_close, *([rules.name_close_empty] if rules.name_close_empty else [])]
            )
        else:
            found = self._until(cursor, [rules.argument_open, rules.call_close])
        if found is None:
            return False
        text, marker, end = found
        header = rules.header.fullmatch(text.strip())
        if header is None:
            raise Malformed
        parts = header.groupdict()
        self._id = parts.get("id")
        number = parts.get("index")
        self._begin(rules.alphabet.decode(parts["name"]).strip(), int(number) if number and len(number) < 10 else None)
        if marker is rules.name_close or marker is rules.name_close_empty:
            cursor.at = end
        if marker is rules.name_close_empty:
            self._write(["{}"])
            self._closes = []
            self._closing = True
            return True
        return self._then(self._arguments if self._calls.kind is Kind.NAMED else self._argument)

    def _until(self, cursor: Cursor, markers: list[Marker]) -> tuple[str, Marker, int] | None:
        """Returns the text before the first of the markers, that marker, and where it ends. Moves the cursor up to
        the marker if it is there."""
        text, start = cursor.text, cursor.at
        places = [(text.find(one.pieces[0][0], start), one) for one in markers]
        while places := [(at, one) for at, one in places if at >= 0]:
            at, marker = min(places, key=lambda place: place[0])
            end = marker.match(text, at)
            if isinstance(end, int):
                if at - start > MAX_HEADER:
                    break
                cursor.at = at
                return text[start:at], marker, end
            if end is Match.MORE and not cursor.ended:
                return None
            places.remove((at, marker))
            places.append((text.find(marker.first, at + 1), marker))
        if len(text) - start > MAX_HEADER:
            raise Malformed
        return None

    def _arguments(self, cursor: Cursor) -> bool:
        """NAMED: reads the object of the arguments."""
        if not self._any:
            cursor.skip_whitespace()
            if cursor.at == len(cursor.text):
                return False
            if cursor.text[cursor.at] != "{":
                raise Malformed
        self._closing = self._read_value(cursor)
        return self._closing

    # TAGGED: one argument after the other.

    def _argument(self, cursor: Cursor) -> bool:
        rules = self._rules
        cursor.skip_whitespace()
        text, at = cursor.text, cursor.at
        if at == len(text):
            return False
        end = rules.argument_separator.match(text, at) if rules.argument_separator and self._any else Match.NO
        if isinstance(end, int):
            cursor.at = end
            return True
        closing = first_of(rules.closes, text, at)
        if isinstance(closing, int):
            self._write(["}" if self._any else "{}"])
            self._closing = True
            return True
        opening: int | Match = at
        if rules.argument_open:
            opening = rules.argument_open.match(text, at)
        if Match.MORE in (closing, opening) and not cursor.ended:
            return False
        if not isinstance(opening, int):
            raise Malformed
        cursor.at = opening
        return self._then(self._argument_key)

    def _argument_key(self, cursor: Cursor) -> bool:
        found = self._until(cursor, [self._rules.key_close])
        if found is None:
            return False
        key, _, cursor.at = found
        key = self._rules.alphabet.decode(key)
        self._key = html.unescape(key) if self._calls.keys_escaped else key.strip()
        self._write([", " if self._any else "{", f'"{escape(self._key)}": '])
        if self._rules.type_close:
            return self._then(self._argument_type)
        properties = self._tools.get(self._name, {}).get("properties")
        self._types = schema.types_of(properties.get(self._key)) if isinstance(properties, Mapping) else set()
        return self._begin_value()

    def _argument_type(self, cursor: Cursor) -> bool:
        found = self._until(cursor, [self._rules.type_close])
        if found is None:
            return False
        kind, _, cursor.at = found
        self._types = {"string"} if kind.strip() == self._calls.string_type else schema.TYPES - {"string"}
        return self._begin_value()

    def _begin_value(self) -> bool:
        self._parts = []
        if self._calls.values is not Values.TEXT:
            self._reader = ValueReader(self._calls.values, self._rules.alphabet, self._rules.quote)
            return self._then(self._literal)
        return self._then(self._skip_edge if self._rules.value_begin else self._begin_text_value)

    def _skip_edge(self, cursor: Cursor) -> bool:
        """Skips the whitespace that the format writes before a value, if it is there."""
        edge = self._rules.value_begin
        if cursor.text.startswith(edge, cursor.at):
            cursor.at += len(edge)
        elif edge.startswith(cursor.text[cursor.at :]) and not cursor.ended:
            return False
        return self._begin_text_value(cursor)

    def _begin_text_value(self, cursor: Cursor) -> bool:
        if schema.is_text(self._types):
            self._write(['"'])
        return self._then(self._text_value)

    def _literal(self, cursor: Cursor) -> bool:
        return self._read_value(cursor) and self._then(self._literal_close)

    def _literal_close(self, cursor: Cursor) -> bool:
        if self._rules.value_close:
            cursor.skip_whitespace()
            end = self._rules.value_close.match(cursor.text, cursor.at)
            if end is Match.MORE and not cursor.ended:
                return False
            if not isinstance(end, int):
                raise Malformed
            cursor.at = end
        return self._then(self._argument)

    def _text_value(self, cursor: Cursor) -> bool:
        """Reads a text up to what closes it; holds back only what may do so."""
        text, start, edge = cursor.text, cursor.at, self._rules.value_close.before
        at = start
        while True:
            found = self._rules.value_ends.search(text, at)
            if found is None:
                cursor.at = len(text) if cursor.ended else len(text) - _overlap(text, start, edge)
                self._write_text(text[start : cursor.at])
                return False
            at = found.start()
            end = self._value_end(cursor, at)
            if end is Match.NO or (end is Match.MORE and cursor.ended):
                at += 1
                continue
            cut = at - len(edge) if edge and text.endswith(edge, start, at) else at
            self._write_text(text[start:cut])
            cursor.at = cut
            if not isinstance(end, int):
                return False
            cursor.at = end
            self._end_text_value()
            return self._then(self._argument)

    def _write_text(self, text: str) -> None:
        if not text:
            return
        text = self._rules.alphabet.decode(text)
        if schema.is_text(self._types):
            self._write([escape(text)])
        else:
            self._parts.append(text)

    def _end_text_value(self) -> None:
        if schema.is_text(self._types):
            self._write(['"'])
        else:
            self._write([schema.to_json("".join(self._parts), self._types)])

    def _value_end(self, cursor: Cursor, at: int) -> int | Match:
        """Returns where the value's end ends, if it is at `at`. Models write what closes a value inside of values, and
        forget to close them: what follows decides."""
        rules, text = self._rules, cursor.text
        outcomes = []
        end = rules.value_close.match(text, at)
        if isinstance(end, int):
            follows = skip_whitespace(text, end)
            more: int | Match = first_of([rules.argument_open, *rules.closes], text, follows)
            end = end if isinstance(more, int) else more
        outcomes.append(end)
        if not isinstance(end, int):
            outcomes.append(self._call_ends(cursor, at))
        if not isinstance(end, int) and rules.argument_open:
            outcomes.append(self._next_begins(cursor, at))
        ends = [one for one in outcomes if isinstance(one, int)]
        if ends:
            return ends[0]
        return Match.MORE if Match.MORE in outcomes else Match.NO

    def _call_ends(self, cursor: Cursor, at: int) -> int | Match:
        """Returns `at` if the call is closed there, though the value is not."""
        end = first_of(self._rules.closes, cursor.text, at)
        if not isinstance(end, int):
            return end
        follows = skip_whitespace(cursor.text, end)
        if follows == len(cursor.text) and cursor.ended and not cursor.cut_off:
            return at
        behind = first_of(self._rules.follows, cursor.text, follows)
        return at if isinstance(behind, int) else behind

    def _next_begins(self, cursor: Cursor, at: int) -> int | Match:
        """Returns `at` if another argument that the tool has begins there, where one may."""
        text = cursor.text
        if not text.endswith(self._rules.value_close.before, cursor.at, at):
            return Match.NO
        end = self._rules.argument_open.match(text, at)
        if not isinstance(end, int):
            return end
        properties = self._tools.get(self._name, {}).get("properties")
        outcome = Match.NO
        for key in properties if isinstance(properties, Mapping) else ():
            if text.startswith(key, end):
                behind = self._rules.key_close.match(text, end + len(key))
                if isinstance(behind, int):
                    return at
                outcome = Match.MORE if behind is Match.MORE else outcome
            elif key.startswith(text[end : end + len(key)]):
                outcome = Match.MORE
        return outcome


_BRACE = Marker("{")


def _overlap(text: str, start: int, edge: str) -> int:
    """Returns how much of the end of a text may be the beginning of `edge`."""
    for length in range(min(len(edge), len(text) - start, MAX_WHITESPACE), 0, -1):
        if text.endswith(edge[:length]):
            return length
    return 0


def _decode_text(text: str) -> str:
    try:
        return msgspec.json.decode(text, type=str)
    except msgspec.MsgspecError as error:
        raise Malformed from error


def _decode_object(text: str) -> str:
    """Returns arguments that were written as a string of JSON."""
    inner = _decode_text(text)
    try:
        msgspec.json.decode(inner, type=dict)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Malformed from error
    return inner.strip()
