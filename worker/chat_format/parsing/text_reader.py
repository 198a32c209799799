"""Reads content and reasoning up to the next marker, and collects a parser's output until its caller takes it."""

from __future__ import annotations

import hashlib
import string
from typing import NamedTuple

from tokenbus.worker.chat_format.parsing import deltas
from tokenbus.worker.chat_format.parsing.cursor import Cursor
from tokenbus.worker.chat_format.parsing.markers import MAX_WHITESPACE, Alphabet, Exit, MarkerMatch, Scan, TextKind, To
from tokenbus.worker.contract.chat_format import Calls

_LETTERS = string.ascii_letters + string.digits


class ParsedOutput:
    """Collects deltas and joins consecutive ones."""

    def __init__(self, alphabet: Alphabet, calls: Calls | None, key: str, *, hold_calls: bool) -> None:
        self._alphabet = alphabet
        self._calls = calls
        self._key = key
        self._hold_calls = hold_calls
        self._deltas: list[deltas.Delta] = []
        self._held: list[deltas.Delta] = []
        """Deltas of the call being read, if calls are held."""
        self._kind: TextKind = None
        self._texts: list[str] = []
        self._fragments: list[str] = []
        self.calls = 0
        """The number of calls begun."""
        self.is_open = False
        """Whether the call being read has been passed on."""
        self._was_broken_off = False

    @property
    def has_incomplete_call(self) -> bool:
        return self.is_open or self._was_broken_off

    def take(self) -> list[deltas.Delta]:
        self._join_texts()
        self._join_fragments()
        taken, self._deltas = self._deltas, []
        return taken

    def forget(self) -> None:
        """Drops everything read so far, since it came from the prompt, not the model."""
        self.take()
        self.drop_call()
        self.calls, self._was_broken_off = 0, False

    def say(self, text: str, kind: TextKind) -> None:
        """Adds text."""
        if not text or kind is None:
            return
        if kind is not self._kind:
            self._join_texts()
            self._kind = kind
        self._texts.append(self._alphabet.decode(text))

    def begin_call(self, name: str, given: str | None, number: int | None) -> None:
        """Adds a call; `given` is its id and `number` its number, if the model wrote them."""
        assert self._calls is not None
        assert not self.is_open
        made = given or call_id(self._calls, self._key, self.calls, name, number)
        self._add(deltas.CallBegin(self.calls, made, name))
        self.calls += 1
        self.is_open = not self._hold_calls

    def add_arguments(self, fragment: str) -> None:
        """Adds a fragment of the last call's arguments."""
        self._fragments.append(fragment)

    def end_call(self) -> None:
        """Marks the last call as complete."""
        self._join_fragments()
        self._add(deltas.CallEnd(self.calls - 1))
        self.is_open = False
        self._join_texts()
        self._deltas += self._held
        self._held = []

    def drop_call(self) -> bool:
        """Ends a call that remains incomplete, if there is one. Returns whether it had been passed on."""
        if self._hold_calls:
            self.calls -= 1 if self._held else 0
            self._held, self._fragments = [], []
        self._join_fragments()
        has_gone_out, self.is_open = self.is_open, False
        self._was_broken_off |= has_gone_out
        return has_gone_out

    def _add(self, delta: deltas.Delta) -> None:
        if self._hold_calls:
            self._held.append(delta)
        else:
            self._join_texts()
            self._deltas.append(delta)

    def _join_texts(self) -> None:
        if self._texts:
            assert self._kind is not None
            self._deltas.append(self._kind("".join(self._texts)))
            self._texts = []

    def _join_fragments(self) -> None:
        if self._fragments:
            self._add(deltas.CallArguments(self.calls - 1, "".join(self._fragments)))
            self._fragments = []


def call_id(calls: Calls, key: str, index: int, name: str, number: int | None) -> str:
    """Derives the id of an answer's `index`th call deterministically, so every reader of the same answer gets the same
    id. `number` is the call's number in the conversation, if the model has written one."""
    if calls.id_form:
        return calls.id_form.replace("{name}", name).replace("{index}", str(index if number is None else number))
    digest = hashlib.blake2b(f"{key}:{index}".encode(), digest_size=32).digest()
    letters = "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest)
    return letters[: calls.id_length] if calls.id_length else f"call_{letters[:24]}"


class Found(NamedTuple):
    """A marker after a text."""

    to: To
    at: int
    text_end: int
    """Where the text before it ends, excluding whitespace that belongs to the marker."""
    skip: str
    """Whitespace after the marker that belongs to it."""


class TextReader:
    """Passes on text as it arrives. Holds back potential markers, and whitespace that belongs to a marker if one
    follows; whitespace alone does not count as text."""

    def __init__(self, cursor: Cursor, output: ParsedOutput) -> None:
        self._cursor = cursor
        self._output = output
        self.scan = Scan(None, [])
        self._skip = ""
        """Whitespace that belongs to the marker before the text."""
        self.is_first = True
        """Only whitespace has been read of this text."""
        self.after_marker = False
        """A marker has been read, so whitespace alone does not count as an answer."""
        self.in_prompt = False

    def begin(self, scan: Scan, *, skip: str = "", is_first: bool = True) -> None:
        self.scan, self._skip, self.is_first = scan, skip, is_first

    def read(self) -> Found | None:
        """Continues reading; returns the marker that ends the text, once found."""
        cursor, scan = self._cursor, self.scan
        text = cursor.text
        if self._skip and not self._skip_edge():
            return None
        at = cursor.at
        while found := scan.search(text, at):
            at = found.start()
            is_first = self.is_first and at - cursor.at <= MAX_WHITESPACE and not text[cursor.at : at].strip()
            for one in scan.exits[text[at]]:
                if one.only_first and not is_first and not (self.in_prompt and one.to is To.REASONING):
                    continue
                end = one.marker.match(text, at)
                if isinstance(end, int):
                    self._say_until(at, is_first=is_first, owns_whitespace=bool(one.marker.before))
                    return self._exit(one, at, end)
                if end is MarkerMatch.MORE and not cursor.ended:
                    self._say_until(at, is_first=is_first, owns_whitespace=scan.owns_whitespace)
                    return None
            at += 1
        self._say_rest()
        return None

    def _exit(self, one: Exit, at: int, end: int) -> Found:
        text_end, self._cursor.at = self._cursor.at, end
        self.after_marker = True
        return Found(one.to, at, text_end, one.marker.after)

    def _skip_edge(self) -> bool:
        """Skips whitespace after a marker. Returns false if there may be more."""
        text, at = self._cursor.text, self._cursor.at
        while at < len(text) and text[at] in self._skip:
            at += 1
        self._cursor.at = at
        if at == len(text):
            return False
        self._skip = ""
        return True

    def _say_until(self, at: int, *, is_first: bool, owns_whitespace: bool) -> None:
        """Passes on the text before a potential marker, excluding whitespace that may belong to it."""
        text, start = self._cursor.text, self._cursor.at
        end = start if is_first else at
        if owns_whitespace and not is_first:
            edge = max(start, at - MAX_WHITESPACE)
            end = edge + len(text[edge:at].rstrip())
        self.is_first = is_first
        self._cursor.at = end
        self._output.say(text[start:end], self.scan.kind)

    def _say_rest(self) -> None:
        """Passes on text in which no marker begins."""
        cursor, scan = self._cursor, self.scan
        text, start = cursor.text, cursor.at
        end = len(text)
        if start == end:
            return
        if (self.is_first or scan.owns_whitespace) and text[-1].isspace():
            end = max(start, len(text.rstrip()), end - MAX_WHITESPACE)
            if cursor.ended and (end > start or not self.is_first or not self.after_marker):
                end = len(text)
        if end > start:
            self.is_first = False
            self._output.say(text[start:end] if start or end < len(text) else text, scan.kind)
        cursor.at = len(text) if cursor.ended else end
