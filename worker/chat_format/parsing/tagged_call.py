"""Reads calls whose arguments are written between markers, one after another, each an unquoted value or a JSON one."""

from __future__ import annotations

import html
from collections.abc import Collection

from tokenbus.worker.chat_format.parsing import values
from tokenbus.worker.chat_format.parsing.call_reader import HeaderCall, Sink, Tools
from tokenbus.worker.chat_format.parsing.cursor import Cursor, Malformed
from tokenbus.worker.chat_format.parsing.markers import CallRules, Marker, MarkerMatch, first_of, skip_whitespace
from tokenbus.worker.chat_format.parsing.schemas import TYPES
from tokenbus.worker.chat_format.parsing.values import ValueReader, escape
from tokenbus.worker.contract.chat_format import Values

_TEXT = frozenset({"string"})


class TextValue:
    """A value. Text is passed on as it arrives; anything that may be of another type is read whole and then converted.

    Models write closing markers inside values, and forget to close values: the following text decides."""

    def __init__(self, rules: CallRules, keys: Collection[str], types: frozenset[str]) -> None:
        """`keys` are those of the tool's arguments, `types` the types that the value may have."""
        self._rules = rules
        self._keys = keys
        self._types = types
        self._is_text = types == _TEXT
        self._parts: list[str] = []
        self._edge = rules.value_begin
        """Whitespace that may still precede the value, and is not part of it."""
        self._has_begun = False

    def read(self, cursor: Cursor, out: list[str]) -> bool:
        """Continues reading; returns whether the value is complete."""
        if not self._has_begun:
            if not self._skip_edge(cursor):
                return False
            self._has_begun = True
            if self._is_text:
                out.append('"')
        return self._read_text(cursor, out)

    def _skip_edge(self, cursor: Cursor) -> bool:
        edge = self._edge
        if cursor.text.startswith(edge, cursor.at):
            cursor.at += len(edge)
        elif edge.startswith(cursor.text[cursor.at :]) and not cursor.ended:
            return False
        return True

    def _read_text(self, cursor: Cursor, out: list[str]) -> bool:
        text, start, edge = cursor.text, cursor.at, self._rules.value_close.before
        at = start
        while found := self._rules.value_ends.search(text, at):
            at = found.start()
            end = self._end_at(cursor, at)
            if end is MarkerMatch.NO or (end is MarkerMatch.MORE and cursor.ended):
                at += 1
                continue
            cursor.at = at - len(edge) if edge and text.endswith(edge, start, at) else at
            self._add(text[start : cursor.at], out)
            if not isinstance(end, int):
                return False
            cursor.at = end
            out.append('"' if self._is_text else values.to_json("".join(self._parts), self._types))
            return True
        cursor.at = len(text) if cursor.ended else len(text) - _overlap(text, start, edge)
        self._add(text[start : cursor.at], out)
        return False

    def _add(self, text: str, out: list[str]) -> None:
        if not text:
            return
        text = self._rules.alphabet.decode(text)
        if self._is_text:
            out.append(escape(text))
        else:
            self._parts.append(text)

    def _end_at(self, cursor: Cursor, at: int) -> int | MarkerMatch:
        """Returns where the value's closing marker ends, if it is at `at`."""
        rules, text = self._rules, cursor.text
        outcomes = []
        end = rules.value_close.match(text, at)
        if isinstance(end, int):
            follows = skip_whitespace(text, end)
            more: int | MarkerMatch = first_of([rules.argument_open, *rules.closes], text, follows)
            end = end if isinstance(more, int) else more
        outcomes.append(end)
        if not isinstance(end, int):
            outcomes.append(self._call_ends(cursor, at))
        if not isinstance(end, int) and rules.argument_open:
            outcomes.append(self._next_begins(cursor, at))
        ends = [one for one in outcomes if isinstance(one, int)]
        if ends:
            return ends[0]
        return MarkerMatch.MORE if MarkerMatch.MORE in outcomes else MarkerMatch.NO

    def _call_ends(self, cursor: Cursor, at: int) -> int | MarkerMatch:
        """Returns `at` if the call, but not the value, is closed there."""
        end = first_of(self._rules.closes, cursor.text, at)
        if not isinstance(end, int):
            return end
        follows = skip_whitespace(cursor.text, end)
        if follows == len(cursor.text) and cursor.ended and not cursor.cut_off:
            return at
        behind = first_of(self._rules.follows, cursor.text, follows)
        return at if isinstance(behind, int) else behind

    def _next_begins(self, cursor: Cursor, at: int) -> int | MarkerMatch:
        """Returns `at` if another of the tool's arguments validly begins there."""
        text = cursor.text
        if not text.endswith(self._rules.value_close.before, cursor.at, at):
            return MarkerMatch.NO
        end = self._rules.argument_open.match(text, at)
        if not isinstance(end, int):
            return end
        outcome = MarkerMatch.NO
        for key in self._keys:
            if text.startswith(key, end):
                behind = self._rules.key_close.match(text, end + len(key))
                if isinstance(behind, int):
                    return at
                outcome = MarkerMatch.MORE if behind is MarkerMatch.MORE else outcome
            elif key.startswith(text[end : end + len(key)]):
                outcome = MarkerMatch.MORE
        return outcome


def _overlap(text: str, start: int, edge: str) -> int:
    """Returns how many characters at the end of a text may be the beginning of `edge`."""
    for length in range(min(len(edge), len(text) - start), 0, -1):
        if text.endswith(edge[:length]):
            return length
    return 0


class TaggedCall(HeaderCall):
    """A header, then arguments, each with a key and a value."""

    def __init__(self, rules: CallRules, tools: Tools, sink: Sink, *, must_be_known: bool) -> None:
        super().__init__(rules, tools, sink, must_be_known=must_be_known)
        self._calls = rules.calls
        self._key = ""
        self._value: TextValue | None = None

    def _header_ends(self) -> list[Marker]:
        rules = self._rules
        if not rules.name_close:
            return [rules.argument_open, rules.call_close]
        return [rules.name_close, *([rules.name_close_empty] if rules.name_close_empty else [])]

    def _behind_header(self, marker: Marker, end: int, cursor: Cursor) -> bool:
        if marker is self._rules.name_close_empty:
            self._closes = []
            self._closing = True
            self._write(["{}"])
        if self._rules.name_close:
            cursor.at = end
        return self._then(self._argument)

    def _argument(self, cursor: Cursor) -> bool:
        rules = self._rules
        cursor.skip_whitespace()
        text, at = cursor.text, cursor.at
        if at == len(text):
            return False
        end = rules.argument_separator.match(text, at) if rules.argument_separator and self._any else MarkerMatch.NO
        if isinstance(end, int):
            cursor.at = end
            return True
        closing = first_of(rules.closes, text, at)
        if isinstance(closing, int):
            self._write(["}" if self._any else "{}"])
            self._closing = True
            return True
        opening: int | MarkerMatch = at
        if rules.argument_open:
            opening = rules.argument_open.match(text, at)
        if MarkerMatch.MORE in (closing, opening) and not cursor.ended:
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
        tool = self._tools.get(self._name)
        return self._begin_value(frozenset() if tool is None else tool.types_of(tool.properties.get(self._key)))

    def _argument_type(self, cursor: Cursor) -> bool:
        found = self._until(cursor, [self._rules.type_close])
        if found is None:
            return False
        kind, _, cursor.at = found
        is_text = kind.strip() == self._calls.string_type
        return self._begin_value(_TEXT if is_text else TYPES - _TEXT)

    def _begin_value(self, types: frozenset[str]) -> bool:
        if self._calls.values is not Values.TEXT:
            self._reader = ValueReader(self._calls.values, self._rules.alphabet, self._rules.quote)
            return self._then(self._literal)
        tool = self._tools.get(self._name)
        self._value = TextValue(self._rules, () if tool is None else tool.properties, types)
        return self._then(self._text_value)

    def _text_value(self, cursor: Cursor) -> bool:
        assert self._value is not None
        out: list[str] = []
        done = self._value.read(cursor, out)
        self._write(out)
        return done and self._then(self._argument)

    def _literal(self, cursor: Cursor) -> bool:
        return self._read_value(cursor) and self._then(self._literal_close)

    def _literal_close(self, cursor: Cursor) -> bool:
        if self._rules.value_close:
            cursor.skip_whitespace()
            end = self._rules.value_close.match(cursor.text, cursor.at)
            if end is MarkerMatch.MORE and not cursor.ended:
                return False
            if not isinstance(end, int):
                raise Malformed
            cursor.at = end
        return self._then(self._argument)
