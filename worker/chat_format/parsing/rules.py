"""A format prepared for parsing: its markers, with special tokens as single characters."""

from __future__ import annotations

import re

from tokenbus.worker.chat_format.parsing.markers import Alphabet, Marker, class_of
from tokenbus.worker.contract.chat_format import Calls, ChatFormat, Kind, Values

NAME = re.compile(r"[^\s\x00-\x1f\ud800-\udfff<>\"'{}()\[\],;]{1,256}")
_PLACE = re.compile(r"\{(name|id|index)\}")
_PLACES = {"name": ".+?", "id": r"[^\s\ud800-\udfff]+?", "index": r"\d+"}


class CallRules:
    """The markers of calls."""

    def __init__(self, calls: Calls, alphabet: Alphabet, turn_close: list[Marker]) -> None:
        def marker(text: str) -> Marker:
            return Marker(alphabet.encode(text))

        self.calls = calls
        self.alphabet = alphabet
        self.section_open, self.section_close = marker(calls.section_open), marker(calls.section_close)
        self.announce, self.announce_close = marker(calls.announce), marker(calls.announce_close)
        self.call_open, self.call_close = marker(calls.call_open), marker(calls.call_close)
        self.separator = marker(calls.separator)
        self.header = _header(alphabet.encode(calls.header))
        self.argument_open, self.value_close = marker(calls.argument_open), marker(calls.value_close)
        self.argument_separator = marker(calls.argument_separator)
        self.key_close, self.type_close = marker(calls.key_close), marker(calls.type_close)
        self.name_close = marker(calls.name_close)
        self.name_close_empty: Marker | None = None
        """Closes both the name and the call, as in XML."""
        if calls.kind is Kind.TAGGED and self.name_close and self.name_close.pieces[-1].endswith(">"):
            self.name_close_empty = Marker(alphabet.encode(calls.name_close.strip()[:-1] + "/>"))
        self.quote = alphabet.encode(calls.quote) if calls.values is Values.BARE_KEYS else '"'
        self.value_begin = calls.type_close if self.type_close else calls.key_close
        self.value_begin = self.value_begin[len(self.value_begin.rstrip()) :]
        self.closes = [self.call_close]
        """Markers that end a call and belong to it."""
        self.follows = [self.section_close, self.call_open, self.section_open, self.announce_close, *turn_close]
        """Markers that may follow a call."""
        self.value_ends = re.compile(
            class_of({one.first for one in (self.value_close, self.call_close, self.argument_open) if one})
        )
        opening = self.section_open.pieces + self.call_open.pieces
        self.is_bare = opening in ((), ("[",))
        """Only its text distinguishes a call from content."""

    def may_begin(self, character: str) -> bool:
        """Returns whether a call without its own marker may begin with this character."""
        if self.calls.kind is Kind.JSON:
            return character == "{"
        return character.isalpha() or character == "_"


def _header(form: str) -> re.Pattern[str]:
    """Returns a pattern for a header, in which everything but the name is optional."""
    pattern, at = "", 0
    for place in _PLACE.finditer(form):
        text, name = re.escape(form[at : place.start()]), place[1]
        if name == "name":
            pattern += f"{text}(?P<name>.+?)" if at else f"(?:{text})?(?P<name>.+?)"
        else:
            pattern += f"(?:{text}(?P<{name}>{_PLACES[name]}))?"
        at = place.end()
    return re.compile(f"{pattern}(?:{re.escape(form[at:])})?", re.DOTALL)


def call_rules(form: ChatFormat, alphabet: Alphabet) -> CallRules | None:
    """Returns the rules for a format's calls, which in channels end where a message does."""
    if form.calls is None:
        return None
    rules = CallRules(form.calls, alphabet, [Marker(alphabet.encode(one)) for one in form.turn_close])
    if form.channels is not None:
        rules.closes = [Marker(alphabet.encode(one)) for one in form.channels.ends]
        rules.follows = [Marker(alphabet.encode(one)) for one in (form.channels.start, form.channels.channel)]
        rules.is_bare = False
    return rules
