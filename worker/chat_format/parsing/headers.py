"""Headers of messages in channels."""

from __future__ import annotations

import re
from typing import NamedTuple

from tokenbus.worker.chat_format.parsing import deltas
from tokenbus.worker.chat_format.parsing.scans import Rules, TextKind

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
