"""Rules of resync: a client that has lost messages gets them again."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from tokenbus.conformance.probing import stream_checks
from tokenbus.conformance.probing.assertions import Message, expect
from tokenbus.conformance.probing.exchange import Exchange
from tokenbus.conformance.probing.probe import Probe

_SETTLE_S = 0.5


async def live_stream(probe: Probe) -> None:
    """Resync of a running stream republishes exactly its chunks from that token on, and the stream continues."""
    live = await probe.live()
    await live.tokens(12)
    since, until = _some_offset(live.messages), live.num_tokens
    await _resync(probe, live, since)
    # Only the last messages are searched: splitting all of them for every new one would be quadratic.
    await live.until(lambda: bool(split_replayed(live.messages[-400:]).replayed), "a replayed message", 5.0)
    await probe.cancel(live)
    await asyncio.sleep(_SETTLE_S)
    split = split_replayed(live.messages)
    check_replayed(split, since, until, ended=False)
    stream_checks.check_order(split.first)
    stream_checks.check_numbers(split.first)


async def ended_stream(probe: Probe) -> None:
    """Resync of an ended stream republishes its chunks from that token on and the same terminal."""
    ended = await probe.short(16, id=probe.new_id())
    since = _some_offset(ended.messages)
    until = ended.num_tokens
    await _resync(probe, ended, since)
    await asyncio.sleep(_SETTLE_S)
    check_replayed(split_replayed(ended.messages), since, until, ended=True)


async def not_streamed(probe: Probe) -> None:
    """Resync of a request with stream: false repeats only the terminal."""
    ended = await probe.short(8, id=probe.new_id(), stream=False)
    await _resync(probe, ended, 0)
    await asyncio.sleep(_SETTLE_S)
    expect(len(ended.messages) == 2, f"{len(ended.messages) - 1} messages were repeated instead of one")
    expect(ended.messages[0] == ended.messages[1], "the terminal differs from the first one")


async def with_model(probe: Probe) -> None:
    """A resync and a cancel that name tenant, id and model are each answered once, by the holder of the request."""
    live = await probe.live()
    assert live.request_id is not None
    for subject_of, answer in ((probe.names.resync, {"found": True}), (probe.names.cancel, {"cancelled": True})):
        subject = subject_of(live.request_id, probe.tenant, probe.target.model)
        replies = await probe.send({"offset": 0}, subject=subject)
        await replies.first(f"a reply on {subject}")
        await asyncio.sleep(_SETTLE_S)
        expect(replies.messages == [answer], f"{subject} is answered {replies.messages}")
    expect((await live.terminal())["finish_reason"] == "cancelled", "the stream was not cancelled")


async def unknown(probe: Probe) -> None:
    """The resync of an unknown request is not answered."""
    subject = probe.resync_subject(probe.new_id())
    expect(not await probe.is_answered(subject, {"offset": 0}), "it is answered")


async def odd_offset(probe: Probe) -> None:
    """A resync with an offset that is not a number of tokens is answered with an error, and nothing is republished."""
    ended = await probe.short(4, id=probe.new_id())
    before = len(ended.received)
    for offset in (-1, "x", None):
        reply = await probe.call(probe.resync_subject(str(ended.request_id)), {"offset": offset})
        error = reply.get("error") or {}
        expect(error.get("code") == "invalid_request", f"an offset of {offset!r} is answered {reply}")
    await asyncio.sleep(_SETTLE_S)
    expect(len(ended.received) == before, f"{len(ended.received) - before} messages were published again")


async def without_reply(probe: Probe) -> None:
    """A resync without a reply subject is ignored."""
    ended = await probe.short(4, id=probe.new_id())
    before = len(ended.received)
    await probe.publish(probe.resync_subject(str(ended.request_id)), b'{"offset": 0}')
    await asyncio.sleep(_SETTLE_S)
    expect(len(ended.received) == before, f"{len(ended.received) - before} messages were published again")


async def rate_limited(probe: Probe) -> None:
    """A stream is republished at most once every 200 ms, and a later resync is served again."""
    ended = await probe.short(4, id=probe.new_id())
    for _ in range(3):
        await probe.send({"offset": 0}, subject=probe.resync_subject(str(ended.request_id)))
    await asyncio.sleep(_SETTLE_S)
    _expect_terminals(ended, 2)  # the first one and one replay for all three
    await _resync(probe, ended, 0)
    await asyncio.sleep(_SETTLE_S)
    _expect_terminals(ended, 3)


async def _resync(probe: Probe, exchange: Exchange, offset: int) -> None:
    assert exchange.request_id is not None
    reply = await probe.call(probe.resync_subject(exchange.request_id), {"offset": offset})
    expect(reply.get("found") is True, f"the resync is answered {reply}")


def _some_offset(messages: list[Message]) -> int:
    """Returns the offset of the third message with tokens, or of the last if there are fewer."""
    offsets = [message["offset"] for message in messages if message["tokens"]]
    found: int = offsets[min(2, len(offsets) - 1)]
    return found


def _expect_terminals(exchange: Exchange, count: int) -> None:
    seen = sum(message.get("finish_reason") is not None for message in exchange.messages)
    expect(seen == count, f"{seen} terminals in all instead of {count}")


class SplitStream(NamedTuple):
    """The messages of one stream in order of arrival, split into original and replayed ones."""

    first: list[Message]
    replayed: list[Message]


def split_replayed(messages: Sequence[Message]) -> SplitStream:
    """Splits a stream. A message is replayed if its tokens came before, or if it is a second terminal."""
    split = SplitStream([], [])
    num_seen = 0
    has_ended = False
    for message in messages:
        is_end = message.get("finish_reason") is not None
        is_replayed = message["offset"] < num_seen or (has_ended and is_end)
        (split.replayed if is_replayed else split.first).append(message)
        num_seen = max(num_seen, message["offset"] + message["tokens"])
        has_ended = has_ended or is_end
    return split


def check_replayed(split: SplitStream, since: int, until: int, *, ended: bool) -> None:
    """Checks that all tokens from `since` up to at least `until` were replayed with the same text.

    A stream that has `ended` must have replayed its terminal too."""
    pieces = [message for message in split.replayed if message["tokens"]]
    expect(bool(pieces), f"nothing was published again from token {since} on")
    offset = since
    for message in pieces:
        expect(message["offset"] == offset, f"token {message['offset']} was published again instead of {offset}")
        offset += message["tokens"]
    expect(offset >= until, f"published again only up to token {offset}, not {until}")
    # Offsets count UTF-8 bytes, and a replayed message may join several chunks, so texts are compared as bytes.
    whole = "".join(message["text"] for message in split.first).encode()
    start = split.replayed[0]["text_offset"]
    expected = _text_offset(split.first, since)
    expect(start == expected, f"text_offset {start} instead of {expected} where it is published again")
    replayed = "".join(message["text"] for message in split.replayed).encode()
    expect(whole[start : start + len(replayed)] == replayed, "the text differs from the first time")
    if ended:
        _check_terminal_replayed(split, offset, len(whole) - start == len(replayed))


def _check_terminal_replayed(split: SplitStream, offset: int, is_whole: bool) -> None:
    ends = [message for message in split.replayed if message.get("finish_reason") is not None]
    expect(len(ends) == 1, f"{len(ends)} terminals were published again instead of one")
    expect(ends[0] == split.first[-1], "the terminal differs from the first one")
    counted = split.first[-1]["offset"] + split.first[-1]["tokens"]
    expect(is_whole and offset == counted, f"{offset} tokens when published again instead of {counted}")


def _text_offset(fresh: Sequence[Message], offset: int) -> int:
    """Returns the text offset of the message that begins with this token."""
    for message in fresh:
        if message["offset"] == offset and message["tokens"]:
            found: int = message["text_offset"]
            return found
    raise AssertionError(f"no message begins with token {offset}")
