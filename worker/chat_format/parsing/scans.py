"""The markers that end a text: in content, in reasoning and in the messages of channels."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from tokenbus.worker.chat_format.parsing import deltas
from tokenbus.worker.chat_format.parsing.markers import Alphabet, Marker, class_of, is_token
from tokenbus.worker.chat_format.parsing.rules import CallRules, call_rules
from tokenbus.worker.contract.chat_format import ChatFormat

TextKind = type[deltas.Content] | type[deltas.ReasoningDelta] | None
"""None: text not for the client."""


class To(Enum):
    """The states to which a marker in a text leads."""

    REASONING = 0
    CONTENT = 1
    ANNOUNCED = 2
    SECTION = 3
    CALL = 4
    SAME = 5
    """No change: the marker is dropped."""
    MESSAGE_END = 6
    HEADER = 7


class Exit(NamedTuple):
    """A marker that ends a text."""

    marker: Marker
    to: To
    only_first: bool = False
    """It counts only at the beginning of the text."""


class Scan:
    """The markers that end a kind of text."""

    def __init__(self, kind: TextKind, exits: list[Exit]) -> None:
        self.kind = kind
        self.exits: dict[str, list[Exit]] = {}
        for one in exits:
            if one.marker:
                self.exits.setdefault(one.marker.first, []).append(one)
        self.search = re.compile(class_of(set(self.exits))).search
        """Finds potential markers."""
        self.owns_whitespace = any(one.marker.before for one in exits)
        """Whether whitespace at the end of the text may belong to a marker."""


class Rules:
    """A format prepared for any number of parsers."""

    def __init__(self, form: ChatFormat) -> None:
        self.form = form
        self.alphabet = Alphabet(form.tokens)
        self.calls = call_rules(form, self.alphabet)
        openings = _openings(self.calls) if self.calls and form.channels is None else []
        content, reasoning, calls_in_reasoning = self._texts(form, openings)
        self.content = {True: Scan(deltas.Content, content + openings), False: Scan(deltas.Content, content)}
        """The markers in content, when calls are looked for and when they are not."""
        self.reasoning = {
            True: Scan(deltas.ReasoningDelta, reasoning + calls_in_reasoning),
            False: Scan(deltas.ReasoningDelta, reasoning),
        }
        self.start = self.channel = self.body = Marker("")
        self.message_ends: list[Marker] = []
        ends: list[Exit] = []
        if form.channels is not None:
            self.start, self.channel = self._marker(form.channels.start), self._marker(form.channels.channel)
            self.body = self._marker(form.channels.body)
            self.message_ends = [self._marker(one) for one in form.channels.ends]
            ends = [Exit(one, To.MESSAGE_END) for one in self.message_ends]
            ends += [Exit(self.start, To.HEADER), Exit(self.channel, To.HEADER)]
        self.messages = {kind: Scan(kind, ends) for kind in (deltas.Content, deltas.ReasoningDelta, None)}

    def _marker(self, text: str) -> Marker:
        return Marker(self.alphabet.encode(text))

    def _texts(self, form: ChatFormat, openings: list[Exit]) -> tuple[list[Exit], list[Exit], list[Exit]]:
        """Returns what ends content, what ends reasoning, and which calls end reasoning too."""
        always = [Exit(self._marker(form.content_open), To.CONTENT)]
        always += [Exit(self._marker(one), To.SAME) for one in form.turn_close]
        content = [*always, Exit(self._marker(form.content_close), To.SAME)]
        if form.reasoning is None:
            return content, always, []
        opens, ends = self._marker(form.reasoning.open), self._marker(form.reasoning.close)
        content.append(Exit(opens, To.REASONING, only_first=bool(opens) and not is_token(opens.first)))
        calls = [one for one in openings if not one.only_first] if form.reasoning.ended_by_call else []
        return content, [*always, Exit(ends, To.CONTENT)], calls


def _openings(calls: CallRules) -> list[Exit]:
    """Returns the markers that lead from content to calls."""
    found = [Exit(calls.announce, To.ANNOUNCED), Exit(calls.announce_close, To.SAME)]
    if calls.section_open:
        found.append(Exit(calls.section_open, To.SECTION, only_first=calls.is_bare))
    if calls.call_open and (not calls.section_open or calls.calls.section_optional):
        found.append(Exit(calls.call_open, To.CALL))
    if calls.is_bare and not calls.section_open:
        found.append(Exit(Marker("{"), To.CALL, only_first=True))
    return found
