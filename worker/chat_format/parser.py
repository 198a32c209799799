"""Reads a model's output while it is generated: reasoning, content and tool calls.

The parser is a machine of five states that all read from one cursor: text (content, or reasoning, or a message that is
for nobody here), the section around calls, a call, the header of a message, and the places between messages. A state
reads as much as it can and holds back only what may turn out to be the beginning of a marker. Everything is a function
of the tokens: how they are cut into pieces changes nothing, and so a parser is rebuilt by feeding the tokens again.

A call goes out as it is generated. If it is cut off, a client has been told of a call that never ends (`CallEnd`), and
the finish reason says so; the arguments are not valid JSON then and nothing completes them. With `hold_calls` a call
goes out as a whole when it is complete; one that is cut off is dropped, and one that is malformed becomes content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import Enum

from tokenbus.worker.chat_format import deltas
from tokenbus.worker.chat_format.call_ids import call_id
from tokenbus.worker.chat_format.call_reader import CallReader, Tools
from tokenbus.worker.chat_format.chat_format import ChatFormat, Kind
from tokenbus.worker.chat_format.cursor import Cursor, Malformed
from tokenbus.worker.chat_format.markers import (
    MAX_WHITESPACE,
    Alphabet,
    Marker,
    Match,
    class_of,
    is_token,
    skip_whitespace,
    without_surrogates,
)
from tokenbus.worker.chat_format.rules import CallRules, call_rules

MAX_HELD = 1024
"""Characters of a message's header, or of what stands around calls."""


class _Exit(Enum):
    """What a marker in a text leads to."""

    REASONING = 0
    CONTENT = 1
    ANNOUNCED = 2
    SECTION = 3
    CALL = 4
    DROP = 5
    MESSAGE_END = 6
    HEADER = 7


class _Scan:
    """Which markers end a kind of text."""

    def __init__(
        self, kind: type[deltas.Content | deltas.Reasoning] | None, exits: list[tuple[Marker, _Exit, bool]]
    ) -> None:
        self.kind = kind
        self.exits: dict[str, list[tuple[Marker, _Exit, bool]]] = {}
        for marker, leads_to, only_first in exits:
            if marker:
                self.exits.setdefault(marker.first, []).append((marker, leads_to, only_first))
        self.search = re.compile(class_of(set(self.exits))).search
        """Finds what may be a marker."""
        self.owns_whitespace = any(marker.before for marker, _, _ in exits)
        """Whitespace at the end of the text may belong to a marker."""


class Rules:
    """A format, prepared for any number of parsers."""

    def __init__(self, form: ChatFormat) -> None:
        self.form = form
        self.alphabet = alphabet = Alphabet(form.tokens)

        def marker(text: str) -> Marker:
            return Marker(alphabet.encode(text))

        self.calls = call_rules(form, alphabet)
        closes = [(marker(one), _Exit.DROP, False) for one in form.turn_close]
        content = [(marker(form.content_open), _Exit.CONTENT, False), (marker(form.content_close), _Exit.DROP, False)]
        openings = _openings(self.calls) if self.calls and not form.channels else []
        self.after_reasoning = ""
        self.before_reasoning = ""
        reasoning: list[tuple[Marker, _Exit, bool]] = []
        inside: list[tuple[Marker, _Exit, bool]] = [*content[:1], *closes]
        calls_inside: list[tuple[Marker, _Exit, bool]] = []
        if form.reasoning is not None:
            opens, ends = marker(form.reasoning.open), marker(form.reasoning.close)
            reasoning = [(opens, _Exit.REASONING, bool(opens) and not is_token(opens.first))]
            inside.append((ends, _Exit.CONTENT, False))
            if form.reasoning.ended_by_call:
                calls_inside = [one for one in openings if not one[2]]
            self.before_reasoning, self.after_reasoning = opens.after, ends.after
        content += [*reasoning, *closes]
        self.content = {True: _Scan(deltas.Content, content + openings), False: _Scan(deltas.Content, content)}
        """The markers in content, if calls are looked for and if they are not."""
        self.reasoning = {
            True: _Scan(deltas.Reasoning, inside + calls_inside),
            False: _Scan(deltas.Reasoning, inside),
        }
        self.start = self.channel = self.body = Marker("")
        ends_of_messages: list[tuple[Marker, _Exit, bool]] = []
        if form.channels is not None:
            self.start, self.channel = marker(form.channels.start), marker(form.channels.channel)
            self.body = marker(form.channels.body)
            ends_of_messages = [(marker(one), _Exit.MESSAGE_END, False) for one in form.channels.ends]
            ends_of_messages += [(self.start, _Exit.HEADER, False), (self.channel, _Exit.HEADER, False)]
        self.message_ends = [one for one, leads_to, _ in ends_of_messages if leads_to is _Exit.MESSAGE_END]
        self.messages = {kind: _Scan(kind, ends_of_messages) for kind in (deltas.Content, deltas.Reasoning, None)}


def _openings(calls: CallRules) -> list[tuple[Marker, _Exit, bool]]:
    """Returns what leads from content to calls."""
    found = [(calls.announce, _Exit.ANNOUNCED, False), (calls.announce_close, _Exit.DROP, False)]
    if calls.section_open:
        found.append((calls.section_open, _Exit.SECTION, calls.is_bare))
    if calls.call_open and (not calls.section_open or calls.calls.section_optional):
        found.append((calls.call_open, _Exit.CALL, False))
    if calls.is_bare and not calls.section_open:
        found.append((Marker("{"), _Exit.CALL, True))
    return found


class Parser:
    """Reads one answer."""

    def __init__(
        self,
        rules: Rules,
        *,
        tools: Tools | None,
        key: str,
        generation_prompt: str | None = None,
        hold_calls: bool = False,
    ) -> None:
        """`tools` has the parameters of each tool by its name; None: calls are not looked for. `key` makes the ids of
        calls that have none, the same ones whenever the same answer is read. `generation_prompt` is what the prompt
        says of this answer, such as `<think>\\n`; None: what it says by default."""
        self._rules = rules
        self._tools = tools or {}
        self._calls = rules.calls if tools is not None else None
        self._key = key
        self._hold_calls = hold_calls
        self._cursor = Cursor()
        self._out: list[deltas.Delta] = []
        self._held: list[deltas.Delta] = []
        """Of the call that is being read, if calls are held."""
        self._kind: type[deltas.Content | deltas.Reasoning] | None = None
        self._parts: list[str] = []
        self._fragments: list[str] = []
        self._raw: list[str] | None = None
        """All that was read since a call or a section began, if it may still become content."""
        self._raw_from = 0
        self._scan = rules.content[self._calls is not None]
        self._skip = ""
        """Whitespace that belongs to the marker before a text."""
        self._is_first = True
        """Nothing but whitespace has been read of this text."""
        self._after_marker = False
        self._reader: CallReader | None = None
        self._in_section = False
        self._section_calls = 0
        self._noise = False
        self._indices = 0
        self._is_open = False
        self._in_prompt = False
        self._state: Callable[[], bool] = self._text if rules.form.channels is None else self._outside
        self._begin(rules.form.generation_prompt if generation_prompt is None else generation_prompt)

    @property
    def calls(self) -> int:
        """How many calls have begun."""
        return self._indices

    @property
    def has_open_call(self) -> bool:
        """Whether a call that has gone out is not complete."""
        return self._is_open

    def feed(self, token: int, text: str) -> list[deltas.Delta]:
        """Reads a token and its text, and returns what can be said now."""
        special = self._rules.alphabet.by_token.get(token)
        self._cursor.append(without_surrogates(text) if special is None else special)
        return self._read()

    def feed_tokens(self, tokens: Iterable[tuple[int, str]]) -> list[deltas.Delta]:
        """Reads many tokens at once."""
        by_token = self._rules.alphabet.by_token
        self._cursor.append("".join(by_token.get(token) or without_surrogates(text) for token, text in tokens))
        return self._read()

    def feed_text(self, text: str) -> list[deltas.Delta]:
        """Reads a text whose tokens are not known: no special token is found in it."""
        self._cursor.append(without_surrogates(text))
        return self._read()

    def finish(self, *, cut_off: bool) -> list[deltas.Delta]:
        """Says what was held back. `cut_off`: the answer has reached a limit, the model was not done."""
        self._cursor.append("")
        self._cursor.ended, self._cursor.cut_off = True, cut_off
        return self._read()

    def _begin(self, generation_prompt: str) -> None:
        """Reads what the prompt says of the answer, as if the model had written it."""
        self._in_prompt = True
        self._cursor.append(self._rules.alphabet.encode(generation_prompt))
        self._read()
        self._in_prompt = False
        if not self._cursor.text[self._cursor.at :].strip():
            self._cursor.at = len(self._cursor.text)
        self._is_first, self._after_marker, self._indices, self._is_open = True, False, 0, False

    def _read(self) -> list[deltas.Delta]:
        while self._state():
            pass
        self._keep_raw()
        self._flush_text()
        self._flush_arguments()
        out, self._out = self._out, []
        return out

    # What goes out.

    def _say(self, text: str, kind: type[deltas.Content | deltas.Reasoning] | None) -> None:
        if not text or kind is None:
            return
        if kind is not self._kind:
            self._flush_text()
            self._kind = kind
        self._parts.append(self._rules.alphabet.decode(text))

    def _flush_text(self) -> None:
        if self._parts:
            assert self._kind is not None
            self._out.append(self._kind("".join(self._parts)))
            self._parts = []

    def _flush_arguments(self) -> None:
        if self._fragments:
            self._tell(deltas.CallArguments(self._indices - 1, "".join(self._fragments)))
            self._fragments = []

    def _tell(self, delta: deltas.Delta) -> None:
        self._flush_text()
        (self._held if self._hold_calls else self._out).append(delta)

    def begin_call(self, name: str, given: str | None, number: int | None) -> None:
        """Takes a call's name from its reader."""
        assert self._calls is not None
        index = self._indices
        self._indices += 1
        made = given or call_id(self._calls.calls, self._key, index, name, number)
        self._tell(deltas.CallBegin(index, made, name))
        self._is_open = not self._hold_calls
        if not self._hold_calls:
            self._raw = None

    def add_arguments(self, fragment: str) -> None:
        """Takes a piece of a call's arguments from its reader."""
        self._fragments.append(fragment)

    def _end_call(self) -> None:
        self._flush_arguments()
        self._tell(deltas.CallEnd(self._indices - 1))
        self._is_open = False
        self._out += self._held
        self._held = []
        self._raw = None
        self._reader = None
        self._section_calls += 1
        self._after_marker = True

    # What may become content after all.

    def _begin_raw(self, at: int) -> None:
        self._raw, self._raw_from = [], at

    def _keep_raw(self) -> None:
        if self._raw is not None:
            self._raw.append(self._cursor.text[self._raw_from : self._cursor.at])
        self._raw_from = 0
        self._cursor.append("")

    def _give_up(self) -> bool:
        """Makes content of what was read as a call, unless it has gone out as one."""
        if self._held:
            self._indices -= 1
        elif not self._hold_calls:
            self._flush_arguments()
        self._held, self._fragments, self._reader = [], [], None
        if self._raw is not None:
            raw = "".join(self._raw) + self._cursor.text[self._raw_from : self._cursor.at]
            self._say(raw, deltas.Content)
        self._raw = None
        self._begin_text(self._content())
        self._is_first = False
        return True

    def _drop(self) -> bool:
        """Forgets what was read of a call that was cut off."""
        self._indices -= 1 if self._held else 0
        if not self._hold_calls:
            self._flush_arguments()
        self._held, self._fragments, self._raw = [], [], None
        self._cursor.at = len(self._cursor.text)
        return False

    # Text.

    def _content(self) -> _Scan:
        if self._rules.form.channels is not None:
            return self._rules.messages[deltas.Content]
        return self._rules.content[self._calls is not None]

    def _begin_text(self, scan: _Scan, skip: str = "") -> None:
        self._scan, self._skip, self._is_first, self._state = scan, skip, True, self._text

    def _text(self) -> bool:
        cursor, scan = self._cursor, self._scan
        text = cursor.text
        if self._skip and not self._skip_edge():
            return False
        start = at = cursor.at
        while True:
            found = scan.search(text, at)
            if found is None:
                return self._say_rest()
            at = found.start()
            is_first = self._is_first and at - start <= MAX_WHITESPACE and not text[start:at].strip()
            for marker, leads_to, only_first in scan.exits[text[at]]:
                if only_first and not is_first and not (self._in_prompt and leads_to is _Exit.REASONING):
                    continue
                end = marker.match(text, at)
                if end is Match.NO or (end is Match.MORE and cursor.ended):
                    continue
                cursor.at = start if is_first else at
                if marker.before and not is_first:
                    edge = max(start, at - MAX_WHITESPACE)
                    cursor.at = edge + len(text[edge:at].rstrip())
                self._is_first = is_first
                self._say(text[start : cursor.at], scan.kind)
                if not isinstance(end, int):
                    return False
                raw_from, cursor.at = cursor.at, end
                self._after_marker = True
                return self._leave(leads_to, raw_from, at)
            at += 1

    def _skip_edge(self) -> bool:
        """Skips the whitespace after a marker. Returns false if there may be more of it."""
        text, at = self._cursor.text, self._cursor.at
        while at < len(text) and text[at] in self._skip:
            at += 1
        self._cursor.at = at
        if at == len(text):
            return False
        self._skip = ""
        return True

    def _say_rest(self) -> bool:
        """Says a text in which no marker begins. Holds back whitespace at its end that belongs to a marker if one
        follows. Whitespace alone is no content, except between other content."""
        cursor, scan = self._cursor, self._scan
        text, start = cursor.text, cursor.at
        end = len(text)
        if start == end:
            return False
        if (self._is_first or scan.owns_whitespace) and text[-1].isspace():
            end = max(start, len(text.rstrip()), end - MAX_WHITESPACE)
            if cursor.ended and (end > start or not self._is_first or not self._after_marker):
                end = len(text)
        if end > start:
            self._is_first = False
            self._say(text[start:end] if start or end < len(text) else text, scan.kind)
        cursor.at = len(text) if cursor.ended else end
        return False

    def _leave(self, leads_to: _Exit, raw_from: int, at: int) -> bool:
        match leads_to:
            case _Exit.REASONING:
                self._begin_text(self._rules.reasoning[self._calls is not None], self._rules.before_reasoning)
            case _Exit.CONTENT:
                is_reasoning = self._scan.kind is deltas.Reasoning
                self._begin_text(self._content(), self._rules.after_reasoning if is_reasoning else "")
            case _Exit.ANNOUNCED:
                self._begin_text(self._content())
            case _Exit.SECTION:
                self._begin_raw(raw_from)
                self._begin_section()
            case _Exit.CALL:
                assert self._calls is not None
                self._begin_raw(raw_from)
                if self._calls.is_bare:
                    self._cursor.at = at
                self._in_section = bool(self._calls.section_open)
                self._begin_call()
            case _Exit.MESSAGE_END:
                self._state = self._outside
            case _Exit.HEADER:
                self._cursor.at = at
                self._state = self._outside
            case _Exit.DROP:
                self._is_first = True
        return True

    # Calls.

    def _begin_section(self) -> None:
        self._in_section, self._section_calls, self._noise = True, 0, False
        self._state = self._section

    def _begin_call(self) -> None:
        assert self._calls is not None
        self._noise = False
        self._reader = CallReader(self._calls, self._tools, self, must_be_known=self._calls.is_bare)
        self._state = self._call

    def _call(self) -> bool:
        assert self._reader is not None
        cursor = self._cursor
        try:
            is_complete = self._reader.read(cursor)
        except Malformed:
            return self._give_up()
        if is_complete:
            self._end_call()
            if self._rules.form.channels is not None:
                self._state = self._outside
            elif self._in_section:
                self._begin_raw(cursor.at)
                self._state = self._section
            else:
                self._begin_text(self._content())
            return True
        if not cursor.ended:
            return False
        if cursor.cut_off:
            return self._drop()
        cursor.at = len(cursor.text)
        return self._give_up()

    def _section(self) -> bool:
        """Reads what stands around calls. Text between them is dropped, text in place of them is content."""
        assert self._calls is not None
        cursor, rules = self._cursor, self._calls
        at = skip_whitespace(cursor.text, cursor.at)
        if at == len(cursor.text):
            return self._end_in_section() if cursor.ended else False
        closing = rules.section_close.match(cursor.text, at) if rules.section_close else Match.NO
        if isinstance(closing, int):
            cursor.at = closing
            return self._end_section()
        begin: int | Match = Match.NO
        if rules.separator and self._section_calls and isinstance(next_ := rules.separator.match(cursor.text, at), int):
            at = skip_whitespace(cursor.text, next_)
            if at == len(cursor.text) and not cursor.ended:
                return False
        if rules.call_open:
            begin = rules.call_open.match(cursor.text, at)
        elif at < len(cursor.text) and _may_begin(rules, cursor.text[at]):
            begin = at
        if isinstance(begin, int):
            if self._noise:
                self._begin_raw(at)
            cursor.at = begin
            self._begin_call()
            return True
        if Match.MORE in (closing, begin) and not cursor.ended:
            return False
        return self._skip_noise(at)

    def _skip_noise(self, at: int) -> bool:
        assert self._calls is not None
        cursor, rules = self._cursor, self._calls
        if not rules.call_open:
            return self._give_up()
        self._noise = True
        held = sum(map(len, self._raw or ())) - self._raw_from
        places = [cursor.text.find(one.first, at + 1) for one in (rules.section_close, rules.call_open) if one]
        cursor.at = min([place for place in places if place >= 0] + [len(cursor.text), MAX_HELD - held])
        return self._give_up() if held + cursor.at >= MAX_HELD else True

    def _end_section(self) -> bool:
        if self._noise and not self._section_calls:
            return self._give_up()
        self._raw = None
        self._begin_text(self._content())
        return True

    def _end_in_section(self) -> bool:
        """The answer ends before the section does."""
        self._cursor.at = len(self._cursor.text)
        if self._noise and not self._cursor.cut_off:
            return self._give_up()
        return self._drop()

    # Messages with headers.

    def _outside(self) -> bool:
        """Reads what stands between messages."""
        cursor, rules = self._cursor, self._rules
        at = skip_whitespace(cursor.text, cursor.at)
        if at == len(cursor.text):
            return False
        start, channel = rules.start.match(cursor.text, at), rules.channel.match(cursor.text, at)
        self._begin_raw(at)
        if isinstance(start, int):
            cursor.at = start
            self._state = self._header
            return True
        if isinstance(channel, int):
            self._state = self._header
            return True
        if Match.MORE in (start, channel) and not cursor.ended:
            self._raw = None
            return False
        for one in rules.message_ends:
            if isinstance(end := one.match(cursor.text, at), int):
                cursor.at, self._raw = end, None
                return True
        self._raw = None
        self._begin_text(rules.messages[deltas.Content])
        self._is_first = False
        return True

    def _header(self) -> bool:
        cursor, rules = self._cursor, self._rules
        place = cursor.text.find(rules.body.first, cursor.at, cursor.at + MAX_HELD)
        end = rules.body.match(cursor.text, place) if place >= 0 else Match.MORE
        if isinstance(end, int):
            header = cursor.text[cursor.at : place]
            cursor.at = end
            return self._begin_message(header)
        behind = cursor.at + MAX_HELD
        if behind <= len(cursor.text):
            cursor.at = behind
            return self._give_up()
        if not cursor.ended:
            return False
        if cursor.cut_off:
            return self._drop()
        cursor.at = len(cursor.text)
        return self._give_up()

    def _begin_message(self, header: str) -> bool:
        """Decides by a message's header what it is."""
        channels, rules = self._rules.form.channels, self._rules
        assert channels is not None
        if constrain := rules.alphabet.encode(channels.constrain):
            header = header.replace(constrain, " ")
        role, *named = header.split(rules.channel.pieces[0])
        recipient = _word_behind(channels.recipient, role) or _word_behind(
            channels.recipient, named[-1] if named else ""
        )
        name = _first_word(named[-1]) if named else ""
        if recipient.startswith(channels.function) and self._calls is not None:
            try:
                self._reader = CallReader.of_arguments(
                    self._calls, self._tools, self, recipient[len(channels.function) :]
                )
            except Malformed:
                return self._give_up()
            self._state = self._call
            return True
        if recipient:
            self._begin_text(rules.messages[None])
        elif name in channels.reasoning:
            self._begin_text(rules.messages[deltas.Reasoning])
        elif name in channels.content:
            self._begin_text(rules.messages[deltas.Content])
        else:
            return self._give_up()
        self._raw = None
        self._is_first = False
        return True


def _may_begin(rules: CallRules, character: str) -> bool:
    """Returns whether a call that has no marker of its own may begin with this character."""
    if rules.calls.kind is Kind.JSON:
        return character == "{"
    return character.isalpha() or character == "_"


_WORD = re.compile(r"[^\s\ud800-\udfff]*")


def _first_word(text: str) -> str:
    found = _WORD.match(text.lstrip())
    return found[0] if found else ""


def _word_behind(before: str, text: str) -> str:
    at = text.find(before)
    return "" if at < 0 else _first_word(text[at + len(before) :])
