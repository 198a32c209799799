"""Rules of resync: what a client that has lost messages is given again."""

import asyncio

from tokenbus.conformance import replayed, stream_checks
from tokenbus.conformance.assertions import Message, expect
from tokenbus.conformance.exchange import Exchange
from tokenbus.conformance.probe import Probe

_SETTLE_S = 0.5


async def live_stream(probe: Probe) -> None:
    """Resync of a live stream publishes exactly its chunks from that token on, and the stream goes on."""
    live = await probe.live()
    await live.tokens(12)
    since, until = _some_offset(live.messages), live.num_tokens
    await _resync(probe, live, since)
    await live.until(lambda: bool(replayed.split_replayed(live.messages[-400:]).replayed), "anything again", 5.0)
    await probe.cancel(live)
    await asyncio.sleep(_SETTLE_S)
    split = replayed.split_replayed(live.messages)
    replayed.check_replayed(split, since, until, ended=False)
    stream_checks.check_order(split.first)
    stream_checks.check_numbers(split.first)


async def ended_stream(probe: Probe) -> None:
    """Resync of an ended stream publishes its chunks from that token on and the same terminal again."""
    ended = await probe.short(16, id=probe.new_id())
    since = _some_offset(ended.messages)
    until = ended.num_tokens
    await _resync(probe, ended, since)
    await asyncio.sleep(_SETTLE_S)
    replayed.check_replayed(replayed.split_replayed(ended.messages), since, until, ended=True)


async def not_streamed(probe: Probe) -> None:
    """With stream: false only the terminal is repeated."""
    ended = await probe.short(8, id=probe.new_id(), stream=False)
    await _resync(probe, ended, 0)
    await asyncio.sleep(_SETTLE_S)
    expect(len(ended.messages) == 2, f"{len(ended.messages) - 1} messages were repeated instead of one")
    expect(ended.messages[0] == ended.messages[1], "the terminal is another one than the first time")


async def unknown(probe: Probe) -> None:
    """Nobody answers the resync of an unknown id."""
    subject = probe.resync_subject(probe.new_id())
    expect(not await probe.is_answered(subject, {"offset": 0}), "it is answered")


async def without_reply(probe: Probe) -> None:
    """A resync without a reply subject is dropped."""
    ended = await probe.short(4, id=probe.new_id())
    before = len(ended.received)
    await probe.publish(probe.resync_subject(str(ended.request_id)), b'{"offset": 0}')
    await asyncio.sleep(_SETTLE_S)
    expect(len(ended.received) == before, f"{len(ended.received) - before} messages were published again")


async def rate_limited(probe: Probe) -> None:
    """A stream is published again at most once in 200 ms, and again after that."""
    ended = await probe.short(4, id=probe.new_id())
    for _ in range(3):
        await probe.send({"offset": 0}, subject=probe.resync_subject(str(ended.request_id)))
    await asyncio.sleep(_SETTLE_S)
    _expect_terminals(ended, 2)
    await _resync(probe, ended, 0)
    await asyncio.sleep(_SETTLE_S)
    _expect_terminals(ended, 3)


async def _resync(probe: Probe, exchange: Exchange, offset: int) -> None:
    assert exchange.request_id is not None
    reply = await probe.call(probe.resync_subject(exchange.request_id), {"offset": offset})
    expect(reply.get("found") is True, f"the resync is answered {reply}")


def _some_offset(messages: list[Message]) -> int:
    """The first token of the third message that has any, or of the last such."""
    offsets = [message["offset"] for message in messages if message["tokens"]]
    found: int = offsets[min(2, len(offsets) - 1)]
    return found


def _expect_terminals(exchange: Exchange, count: int) -> None:
    seen = sum(message.get("finish_reason") is not None for message in exchange.messages)
    expect(seen == count, f"{seen} terminals in all instead of {count}")


RULES = (live_stream, ended_stream, not_streamed, unknown, without_reply, rate_limited)
