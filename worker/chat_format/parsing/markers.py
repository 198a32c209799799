"""A format's markers, prepared for parsing: special tokens as single characters, and matching of partial markers.

A parser reads one text in which each special token of the format is a single surrogate, a character that no decoded
text can contain. So one search finds both kinds of markers, and text that spells out a special token does not match it.
`CallRules` has the markers of calls, `Scan` those that end a text: content, reasoning, or a message in a channel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from tokenbus.worker.chat_format.parsing import deltas
from tokenbus.worker.contract.chat_format import Calls, ChatFormat, Kind, Values

FIRST_SURROGATE, LAST_SURROGATE = 0xD800, 0xDFFF
MAX_WHITESPACE = 64
"""The most whitespace characters that may occur inside a marker, or are held back because they may belong to one."""
WHITESPACE = re.compile(rf"\s{{0,{MAX_WHITESPACE}}}")
_SURROGATES = re.compile("[\ud800-\udfff]")
_SURROGATES_APART = re.compile("([\ud800-\udfff])")


_SEAMS = re.compile("\\s+|(?<=>)(?=<)|(?<=[\ud800-\udfff])(?=[\ud800-\udfff])")
"""Places where a model may write whitespace that the template does not: between two tags or special tokens."""


class MarkerMatch(Enum):
    """The outcomes of matching a marker that was not found."""

    NO = 0
    MORE = 1
    """The text ends before this can be decided."""


class Alphabet:
    """The characters that stand for a format's special tokens."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        longest_first = sorted(tokens, key=len, reverse=True)[: LAST_SURROGATE - FIRST_SURROGATE + 1]
        self._characters = {text: chr(FIRST_SURROGATE + place) for place, text in enumerate(longest_first)}
        self._texts = {ord(character): text for text, character in self._characters.items()}
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self.by_token = {tokens[text]: character for text, character in self._characters.items()}

    def encode(self, text: str) -> str:
        """Replaces special tokens spelled out in a format's own texts with their characters."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda found: self._characters[found[0]], text)

    def split(self, text: str) -> list[str | int]:
        """Returns the parts of a format's own text: special tokens by id, and the texts between them."""
        ids = {character: token for token, character in self.by_token.items()}
        return [ids.get(part, part) for part in _SURROGATES_APART.split(self.encode(text)) if part]

    def decode(self, text: str) -> str:
        """Spells out the special tokens in a text that turned out not to be a marker."""
        return text if text.isascii() else text.translate(self._texts)


def without_surrogates(text: str) -> str:
    """Makes sure that a text forges no special token."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def is_token(character: str) -> bool:
    return FIRST_SURROGATE <= ord(character) <= LAST_SURROGATE


class Marker:
    """A marker's characters, and the whitespace at its edges, which may be missing or longer in a model's output."""

    __slots__ = ("after", "before", "first", "pieces")

    def __init__(self, text: str) -> None:
        core = text.strip()
        self.pieces = tuple(_SEAMS.split(core)) if core else ()
        self.first = core[:1]
        self.before = text[: len(text) - len(text.lstrip())]
        self.after = text[len(text.rstrip()) :] if core else ""

    def __bool__(self) -> bool:
        return bool(self.pieces)

    def match(self, text: str, at: int) -> int | MarkerMatch:
        """Returns where the marker, without the whitespace at its edges, ends if it is at `at`."""
        for place, piece in enumerate(self.pieces):
            if place:
                at = skip_whitespace(text, at)
            if text.startswith(piece, at):
                at += len(piece)
            elif len(text) - at < len(piece) and piece.startswith(text[at:]):
                return MarkerMatch.MORE
            else:
                return MarkerMatch.NO
        return at


def skip_whitespace(text: str, at: int) -> int:
    found = WHITESPACE.match(text, at)
    return found.end() if found else at


def first_of(markers: list[Marker], text: str, at: int) -> int | MarkerMatch:
    """Returns where the first of the markers found at `at` ends."""
    outcome: int | MarkerMatch = MarkerMatch.NO
    for marker in markers:
        if marker:
            end = marker.match(text, at)
            if isinstance(end, int):
                return end
            if end is MarkerMatch.MORE:
                outcome = end
    return outcome


def class_of(characters: set[str]) -> str:
    """Returns a pattern that finds any of these characters."""
    return f"[{re.escape(''.join(sorted(characters)))}]" if characters else r"(?!)"


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
