"""Collects a parser's output until its caller takes it."""

from __future__ import annotations

import hashlib
import string

from tokenbus.worker.chat_format.parsing import deltas
from tokenbus.worker.chat_format.parsing.markers import Alphabet
from tokenbus.worker.chat_format.parsing.scans import TextKind
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
