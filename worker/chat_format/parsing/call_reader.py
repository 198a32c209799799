"""Reads one tool call: the common part of the three kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from tokenbus.worker.chat_format.parsing import schema
from tokenbus.worker.chat_format.parsing.cursor import Cursor, Malformed
from tokenbus.worker.chat_format.parsing.markers import MarkerMatch, first_of, skip_whitespace
from tokenbus.worker.chat_format.parsing.rules import NAME, CallRules
from tokenbus.worker.chat_format.parsing.values import ValueReader

Tools = Mapping[str, schema.Schema]
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
