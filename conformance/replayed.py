"""Tells what a stream says for the first time from what it says again; pure."""

from collections.abc import Sequence
from typing import NamedTuple

from tokenbus.conformance.assertions import Message, expect


class SplitStream(NamedTuple):
    """The messages of one stream, each in one of two lists, in the order in which they came."""

    first: list[Message]
    replayed: list[Message]


def split_replayed(messages: Sequence[Message]) -> SplitStream:
    """A message is said again if its tokens have been heard already, or if it is a second terminal."""
    split = SplitStream([], [])
    heard = 0
    has_ended = False
    for message in messages:
        is_end = message.get("finish_reason") is not None
        is_again = message["offset"] < heard or (has_ended and is_end)
        (split.replayed if is_again else split.first).append(message)
        heard = max(heard, message["offset"] + message["tokens"])
        has_ended = has_ended or is_end
    return split


def check_replayed(split: SplitStream, since: int, until: int, *, ended: bool) -> None:
    """The tokens from `since` on, `until` that one at least, were said again with the same text.

    So was the terminal, where the stream had ended."""
    pieces = [message for message in split.replayed if message["tokens"]]
    expect(bool(pieces), f"nothing was published again from token {since} on")
    offset = since
    for message in pieces:
        expect(message["offset"] == offset, f"token {message['offset']} was published again instead of {offset}")
        offset += message["tokens"]
    expect(offset >= until, f"published again only up to token {offset}, not {until}")
    whole = "".join(message["text"] for message in split.first).encode()
    start = split.replayed[0]["text_offset"]
    expected = _text_offset(split.first, since)
    expect(start == expected, f"text_offset {start} instead of {expected} where it is published again")
    said = "".join(message["text"] for message in split.replayed).encode()
    expect(whole[start : start + len(said)] == said, "other text than the first time")
    if ended:
        _check_terminal_replayed(split, offset, len(whole) - start == len(said))


def _check_terminal_replayed(split: SplitStream, offset: int, is_whole: bool) -> None:
    ends = [message for message in split.replayed if message.get("finish_reason") is not None]
    expect(len(ends) == 1, f"{len(ends)} terminals were published again instead of one")
    expect(ends[0] == split.first[-1], "the terminal is another one than the first time")
    counted = split.first[-1]["offset"] + split.first[-1]["tokens"]
    expect(is_whole and offset == counted, f"{offset} tokens when published again instead of {counted}")


def _text_offset(fresh: Sequence[Message], offset: int) -> int:
    """Where in the text the message begins that begins with that token."""
    for message in fresh:
        if message["offset"] == offset and message["tokens"]:
            found: int = message["text_offset"]
            return found
    raise AssertionError(f"no message begins with token {offset}")
