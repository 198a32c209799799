"""Reads calls whose arguments stand between markers, one after the other."""

from __future__ import annotations

import html
from collections.abc import Mapping

from tokenbus.worker.chat_format.chat_format import Values
from tokenbus.worker.chat_format.parsing import schema
from tokenbus.worker.chat_format.parsing.call_reader import Sink, Tools
from tokenbus.worker.chat_format.parsing.cursor import Cursor, Malformed
from tokenbus.worker.chat_format.parsing.header_call import HeaderCall
from tokenbus.worker.chat_format.parsing.markers import MAX_WHITESPACE, Marker, Match, first_of, skip_whitespace
from tokenbus.worker.chat_format.parsing.rules import CallRules
from tokenbus.worker.chat_format.parsing.values import ValueReader, escape


class TaggedCall(HeaderCall):
    """A header, then arguments, each with a key and a value."""

    def __init__(self, rules: CallRules, tools: Tools, sink: Sink, *, must_be_known: bool) -> None:
        super().__init__(rules, tools, sink, must_be_known=must_be_known)
        self._calls = rules.calls
        self._key = ""
        self._types: set[str] = set()
        """What the value that is being read may be."""
        self._parts: list[str] = []
        """The value that is being read, unless it goes out as it comes."""

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


def _overlap(text: str, start: int, edge: str) -> int:
    """Returns how much of the end of a text may be the beginning of `edge`."""
    for length in range(min(len(edge), len(text) - start, MAX_WHITESPACE), 0, -1):
        if text.endswith(edge[:length]):
            return length
    return 0
