"""Reads unquoted values between two markers."""

from __future__ import annotations

from collections.abc import Collection

from tokenbus.worker.chat_format.parsing import schema
from tokenbus.worker.chat_format.parsing.cursor import Cursor
from tokenbus.worker.chat_format.parsing.markers import MarkerMatch, first_of, skip_whitespace
from tokenbus.worker.chat_format.parsing.rules import CallRules
from tokenbus.worker.chat_format.parsing.values import escape


class TextValue:
    """A value. Text is passed on as it arrives; anything that may be of another type is read whole and then converted.

    Models write closing markers inside values, and forget to close values: the following text decides."""

    def __init__(self, rules: CallRules, keys: Collection[str], types: set[str]) -> None:
        """`keys` are those of the tool's arguments, `types` the types that the value may have."""
        self._rules = rules
        self._keys = keys
        self._types = types
        self._is_text = schema.is_text(types)
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
            out.append('"' if self._is_text else schema.to_json("".join(self._parts), self._types))
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
