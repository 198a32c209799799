"""Reads calls whose arguments are written between markers, one after another."""

from __future__ import annotations

import html

from tokenbus.worker.chat_format.parsing import schema
from tokenbus.worker.chat_format.parsing.call_reader import Sink, Tools
from tokenbus.worker.chat_format.parsing.cursor import Cursor, Malformed
from tokenbus.worker.chat_format.parsing.header_call import HeaderCall
from tokenbus.worker.chat_format.parsing.markers import Marker, MarkerMatch, first_of
from tokenbus.worker.chat_format.parsing.rules import CallRules
from tokenbus.worker.chat_format.parsing.text_value import TextValue
from tokenbus.worker.chat_format.parsing.values import ValueReader, escape
from tokenbus.worker.contract.chat_format import Values


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
        whole = self._tools.get(self._name, {})
        return self._begin_value(schema.types_of(schema.properties(whole).get(self._key), whole))

    def _argument_type(self, cursor: Cursor) -> bool:
        found = self._until(cursor, [self._rules.type_close])
        if found is None:
            return False
        kind, _, cursor.at = found
        is_text = kind.strip() == self._calls.string_type
        return self._begin_value({"string"} if is_text else schema.TYPES - {"string"})

    def _begin_value(self, types: set[str]) -> bool:
        if self._calls.values is not Values.TEXT:
            self._reader = ValueReader(self._calls.values, self._rules.alphabet, self._rules.quote)
            return self._then(self._literal)
        self._value = TextValue(self._rules, schema.properties(self._tools.get(self._name, {})), types)
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
