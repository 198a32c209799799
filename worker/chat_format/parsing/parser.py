"""Reads a model's output while it is generated: reasoning, content and tool calls.

The parser is a state machine with five states that all read from one cursor: text (content, reasoning, or a message not
for the client), the section around calls, a call, a message header, and the space between messages. A state reads as
much as it can and holds back only what may turn out to be the beginning of a marker. Everything is a function of the
tokens: how they are split into pieces makes no difference, so a parser can be rebuilt by feeding it the tokens again.

A call is passed on as it is generated. If it is cut off, the client has seen a call that never ends (no `CallEnd`), and
the finish reason says so; its arguments are then not valid JSON, and nothing completes them. With `hold_calls` a call
is passed on only when complete; one that is cut off is dropped, and a malformed one becomes content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from tokenbus.worker.chat_format.parsing import deltas
from tokenbus.worker.chat_format.parsing.call_reader import CallReader, JsonCall, NamedCall
from tokenbus.worker.chat_format.parsing.cursor import Cursor, Malformed, ReadBack
from tokenbus.worker.chat_format.parsing.markers import (
    MarkerMatch,
    Rules,
    Scan,
    TextKind,
    To,
    first_of,
    skip_whitespace,
    without_surrogates,
)
from tokenbus.worker.chat_format.parsing.schemas import Schema, SchemaReader
from tokenbus.worker.chat_format.parsing.tagged_call import TaggedCall
from tokenbus.worker.chat_format.parsing.text_reader import Found, ParsedOutput, TextReader
from tokenbus.worker.contract.chat_format import Kind

_WORD = re.compile(r"[^\s\ud800-\udfff]*")


class HeaderedMessage(NamedTuple):
    """The contents of a header."""

    kind: TextKind = None
    """Content, reasoning, or neither (not for the client)."""
    function: str = ""
    """The function that it calls."""


def read_header(header: str, rules: Rules) -> HeaderedMessage | None:
    """Returns the kind of message that this header announces, or None if the format does not define it."""
    channels = rules.form.channels
    assert channels is not None
    if constrain := rules.alphabet.encode(channels.constrain):
        header = header.replace(constrain, " ")
    role, *named = header.split(rules.channel.pieces[0])
    channel = named[-1] if named else ""
    recipient = _word_behind(channels.recipient, role) or _word_behind(channels.recipient, channel)
    if recipient:
        is_call = recipient.startswith(channels.function)
        return HeaderedMessage(function=recipient[len(channels.function) :] if is_call else "")
    name = _first_word(channel)
    if name in channels.reasoning:
        return HeaderedMessage(deltas.ReasoningDelta)
    return HeaderedMessage(deltas.Content) if name in channels.content else None


def _first_word(text: str) -> str:
    found = _WORD.match(text.lstrip())
    return found[0] if found else ""


def _word_behind(before: str, text: str) -> str:
    at = text.find(before)
    return "" if at < 0 else _first_word(text[at + len(before) :])


MAX_HELD = 1024
"""The most characters of a message header, or of the text around calls."""
_READERS: dict[Kind, type[CallReader]] = {Kind.JSON: JsonCall, Kind.NAMED: NamedCall, Kind.TAGGED: TaggedCall}


class AnswerParser:
    """Reads one answer."""

    def __init__(
        self,
        rules: Rules,
        *,
        tools: Mapping[str, Schema] | None,
        key: str,
        generation_prompt: str | None = None,
        continues: bool = False,
        hold_calls: bool = False,
    ) -> None:
        """`tools` has the parameters of each tool by name; None: calls are not looked for. `key` determines the ids of
        calls written without one, so that the same answer always gets the same ids. `generation_prompt` is the part of
        this answer that the prompt already contains, such as `<think>\\n`; None: the default. `continues`: so is
        the beginning of its text, and what counts only at the beginning is text."""
        self._rules = rules
        self._continues = continues
        self._tools = {name: SchemaReader(schema) for name, schema in (tools or {}).items()}
        self._calls = rules.calls if tools is not None else None
        form = rules.form
        self._output = ParsedOutput(rules.alphabet, form.calls, key, hold_calls=hold_calls)
        self._cursor = Cursor()
        self._back = ReadBack(self._cursor)
        self._text = TextReader(self._cursor, self._output)
        self._text.begin(self._content())
        self._reader: CallReader | None = None
        self._in_section = False
        self._section_calls = 0
        self._noise = False
        """Whether the section has text where calls should be."""
        self._state: Callable[[], bool] = self._read_text if form.channels is None else self._outside
        """Reads on; returns false if it needs more text."""
        self._read_prompt(form.generation_prompt if generation_prompt is None else generation_prompt)

    @property
    def calls(self) -> int:
        """The number of calls that have begun."""
        return self._output.calls

    @property
    def has_incomplete_call(self) -> bool:
        """Whether an incomplete call has been passed on."""
        return self._output.has_incomplete_call

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning, unless it closes it."""
        return self._text.scan.kind is deltas.ReasoningDelta and self._state == self._read_text

    @property
    def held(self) -> str:
        """The text held back because it may be the beginning of a marker or belong to one."""
        return self._cursor.text[self._cursor.at :]

    def feed(self, token: int, text: str) -> list[deltas.Delta]:
        """Reads a token and its text, and returns the deltas that are now certain."""
        special = self._rules.alphabet.by_token.get(token)
        self._cursor.append(without_surrogates(text) if special is None else special)
        return self._read()

    def feed_tokens(self, tokens: Iterable[tuple[int, str]]) -> list[deltas.Delta]:
        """Reads many tokens at once."""
        by_token = self._rules.alphabet.by_token
        self._cursor.append("".join(by_token.get(token) or without_surrogates(text) for token, text in tokens))
        return self._read()

    def feed_text(self, text: str) -> list[deltas.Delta]:
        """Reads text whose tokens are unknown: no special token is found in it."""
        self._cursor.append(without_surrogates(text))
        return self._read()

    def finish(self, *, cut_off: bool) -> list[deltas.Delta]:
        """Releases what was held back. `cut_off`: the answer reached a limit before the model was done."""
        self._cursor.append("")
        self._cursor.ended, self._cursor.cut_off = True, cut_off
        return self._read()

    def _read_prompt(self, generation_prompt: str) -> None:
        """Reads the beginning of the answer from the prompt, as if the model had written it."""
        cursor = self._cursor
        cursor.append(self._rules.alphabet.encode(generation_prompt))
        self._text.in_prompt = True
        self._read()
        self._text.in_prompt = False
        if not cursor.text[cursor.at :].strip():
            cursor.at = len(cursor.text)
        cursor.append("")
        self._output.forget()
        self._back.restart()
        self._text.is_first, self._text.after_marker = not self._continues, False

    def _read(self) -> list[deltas.Delta]:
        while self._state():
            pass
        if self._output.is_open:
            self._back.forget()
        self._back.keep()
        self._cursor.append("")
        return self._output.take()

    def _give_up(self) -> bool:
        """Turns what was read as a call into content, unless it has been passed on as a call."""
        has_gone_out = self._output.drop_call()
        if not has_gone_out:
            self._output.say(self._back.text(), deltas.Content)
        self._back.forget()
        self._reader = None
        self._begin_text(self._content(), is_first=False)
        return True

    def _drop(self) -> bool:
        """Drops what was read of a truncated call."""
        self._output.drop_call()
        self._back.forget()
        self._cursor.at = len(self._cursor.text)
        return False

    # Text.

    def _content(self) -> Scan:
        if self._rules.form.channels is not None:
            return self._rules.messages[deltas.Content]
        return self._rules.content[self._calls is not None]

    def _begin_text(self, scan: Scan, *, skip: str = "", is_first: bool = True) -> None:
        self._text.begin(scan, skip=skip, is_first=is_first)
        self._state = self._read_text

    def _read_text(self) -> bool:
        found = self._text.read()
        return found is not None and self._leave(found)

    def _leave(self, found: Found) -> bool:
        match found.to:
            case To.REASONING:
                self._begin_text(self._rules.reasoning[self._calls is not None], skip=found.skip)
            case To.CONTENT:
                self._begin_text(self._content(), skip=found.skip)
            case To.ANNOUNCED:
                self._begin_text(self._content())
            case To.SECTION:
                self._back.begin(found.text_end)
                self._begin_section()
            case To.CALL:
                assert self._calls is not None
                self._back.begin(found.text_end)
                if self._calls.is_bare:
                    self._cursor.at = found.at
                self._in_section = bool(self._calls.section_open)
                self._begin_call()
            case To.MESSAGE_END:
                self._state = self._outside
            case To.HEADER:
                self._cursor.at = found.at
                self._state = self._outside
            case To.SAME:
                self._text.is_first = True
        return True

    # Calls.

    def _begin_section(self) -> None:
        self._in_section, self._section_calls, self._noise = True, 0, False
        self._state = self._section

    def _begin_call(self) -> None:
        assert self._calls is not None
        self._noise = False
        make = _READERS[self._calls.calls.kind]
        self._reader = make(self._calls, self._tools, self._output, must_be_known=self._calls.is_bare)
        self._state = self._call

    def _call(self) -> bool:
        assert self._reader is not None
        cursor = self._cursor
        try:
            is_complete = self._reader.read(cursor)
        except Malformed:
            return self._give_up()
        if is_complete:
            self._output.end_call()
            self._back.forget()
            self._reader = None
            self._section_calls += 1
            self._text.after_marker = True
            if self._rules.form.channels is not None:
                self._state = self._outside
            elif self._in_section:
                self._back.begin(cursor.at)
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
        """Reads the text around calls. Text between them is dropped, text in place of them is content."""
        assert self._calls is not None
        cursor, rules = self._cursor, self._calls
        at = skip_whitespace(cursor.text, cursor.at)
        if at == len(cursor.text):
            return self._end_in_section() if cursor.ended else False
        closing = rules.section_close.match(cursor.text, at) if rules.section_close else MarkerMatch.NO
        if isinstance(closing, int):
            cursor.at = closing
            return self._end_section()
        begin: int | MarkerMatch = MarkerMatch.NO
        if rules.separator and self._section_calls and isinstance(next_ := rules.separator.match(cursor.text, at), int):
            at = skip_whitespace(cursor.text, next_)
            if at == len(cursor.text) and not cursor.ended:
                return False
        if rules.call_open:
            begin = rules.call_open.match(cursor.text, at)
        elif at < len(cursor.text) and rules.may_begin(cursor.text[at]):
            begin = at
        if isinstance(begin, int):
            cursor.at = begin
            self._begin_call()
            return True
        if MarkerMatch.MORE in (closing, begin) and not cursor.ended:
            return False
        return self._skip_noise(at)

    def _skip_noise(self, at: int) -> bool:
        assert self._calls is not None
        cursor, rules = self._cursor, self._calls
        if not rules.call_open:
            return self._give_up()
        self._noise = True
        held = self._back.length_before(0)
        limit = min(len(cursor.text), MAX_HELD - held)
        places = [cursor.text.find(one.first, at + 1, limit) for one in (rules.section_close, rules.call_open) if one]
        cursor.at = min((place for place in places if place >= 0), default=limit)
        return self._give_up() if held + cursor.at >= MAX_HELD else True

    def _end_section(self) -> bool:
        if self._noise and not self._section_calls:
            return self._give_up()
        self._back.forget()
        self._begin_text(self._content())
        return True

    def _end_in_section(self) -> bool:
        """Handles an answer that ends before the section does."""
        self._cursor.at = len(self._cursor.text)
        if self._noise and not self._cursor.cut_off:
            return self._give_up()
        return self._drop()

    # Messages with headers.

    def _outside(self) -> bool:
        """Reads the text between messages."""
        cursor, rules = self._cursor, self._rules
        at = skip_whitespace(cursor.text, cursor.at)
        if at == len(cursor.text):
            return False
        start, channel = rules.start.match(cursor.text, at), rules.channel.match(cursor.text, at)
        end = first_of(rules.message_ends, cursor.text, at)
        if isinstance(start, int) or isinstance(channel, int):
            self._back.begin(at)
            cursor.at = start if isinstance(start, int) else at
            self._state = self._header
            return True
        if isinstance(end, int):
            cursor.at = end
            return True
        if MarkerMatch.MORE in (start, channel, end) and not cursor.ended:
            return False
        self._begin_text(rules.messages[deltas.Content], is_first=False)
        return True

    def _header(self) -> bool:
        cursor, rules = self._cursor, self._rules
        place = cursor.text.find(rules.body.pieces[0], cursor.at, cursor.at + MAX_HELD)
        end = rules.body.match(cursor.text, place) if place >= 0 else MarkerMatch.MORE
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
        message = read_header(header, self._rules)
        if message is None:
            return self._give_up()
        if message.function and self._calls is not None:
            reader = NamedCall(self._calls, self._tools, self._output, must_be_known=False)
            try:
                reader.begin(message.function)
            except Malformed:
                return self._give_up()
            self._reader, self._state = reader, self._call
            return True
        self._back.forget()
        self._begin_text(self._rules.messages[message.kind], is_first=False)
        return True
