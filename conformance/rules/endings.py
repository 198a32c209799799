"""Rules of how a stream ends before its time: cancel, deadline, and a client that has gone."""

import asyncio
import time
from collections.abc import Sequence

from tokenbus.conformance import stream_checks
from tokenbus.conformance.assertions import SkippedError, expect
from tokenbus.conformance.exchange import Exchange, any_tokens
from tokenbus.conformance.probe import Probe

_TIMEOUT_MS = 250
_LATE_MS = 10_000
"""A stream without a deadline would take longer; a busy machine may need some of it."""
_GONE_S = (4.5, 9.0)
"""Seconds before the first look, and before a second one at streams that still run. A worker needs two up to the chunk
that makes sure, then its notice; the rest is time for a busy machine."""
_NUM_GONE = 12
"""Enough that none of them is answered in full before it is missed."""
_BY_THEN = 16
"""Tokens of whichever speaks first, when all speak that the worker has room for. The others would have to wait for
these: which ones that are is decided by the routers that had them, and not by the order in which they were sent."""


async def cancelled(probe: Probe) -> None:
    """A cancel is answered {"cancelled": true} and ends the stream with cancelled."""
    live = await probe.live()
    assert live.request_id is not None
    reply = await probe.call(probe.cancel_subject(live.request_id))
    expect(reply.get("cancelled") is True, f"the answer is {reply}")
    terminal = await live.terminal()
    expect(terminal["finish_reason"] == "cancelled", f"the stream ends with {terminal['finish_reason']}")
    stream_checks.check_order(live.messages)
    stream_checks.check_numbers(live.messages)
    stream_checks.check_usage(live.messages)


async def cancelled_without_reply(probe: Probe) -> None:
    """A cancel needs no reply subject."""
    live = await probe.live(stream=False)
    await asyncio.sleep(0.2)
    await probe.cancel(live)
    reason = live.messages[-1]["finish_reason"]
    expect(reason == "cancelled", f"the stream ends with {reason}")
    stream_checks.check_alone(live.messages)


async def cancel_unknown(probe: Probe) -> None:
    """Nobody answers the cancel of an unknown id, nor of one that has ended."""
    ended = probe.new_id()
    await probe.short(2, id=ended)
    for request_id in (probe.new_id(), ended):
        expect(not await probe.is_answered(probe.cancel_subject(request_id)), f"the cancel of {request_id} is answered")


async def cancel_immediately(probe: Probe) -> None:
    """A cancel right behind its request ends it, wherever it is by then."""
    for _ in range(4):
        answer = await probe.send(probe.long_request())
        await probe.publish(probe.cancel_subject(str(answer.request_id)), b"")
        reason = (await answer.terminal())["finish_reason"]
        expect(reason == "cancelled", f"the stream ends with {reason}")


async def deadline(probe: Probe) -> None:
    """timeout_ms ends a stream with deadline_exceeded, in time."""
    began = time.monotonic()
    live = await probe.live(timeout_ms=_TIMEOUT_MS)
    terminal = await live.terminal()
    took_ms = (time.monotonic() - began) * 1e3
    code = (terminal.get("error") or {}).get("code")
    expect(code == "deadline_exceeded", f"the stream ends with {terminal['finish_reason']} {code}")
    stream_checks.check_error(terminal["error"])
    expect(_TIMEOUT_MS - 50 < took_ms < _TIMEOUT_MS + _LATE_MS, f"after {took_ms:.0f} ms with timeout_ms {_TIMEOUT_MS}")
    stream_checks.check_order(live.messages)
    stream_checks.check_numbers(live.messages)


async def client_gone(probe: Probe) -> None:
    """A client that has gone has its requests cancelled within a few seconds."""
    routing = {"worker_id": probe.target.worker_ids[0]} if probe.target.worker_ids else {}
    asked = [await probe.send(probe.long_request(routing=routing)) for _ in range(_NUM_GONE)]
    await any_tokens(asked, _BY_THEN)
    live = [answer for answer in asked if answer.num_tokens]
    expect(bool(live), "none of them has spoken")
    await asyncio.gather(*(probe.stop_listening(answer) for answer in live))
    await asyncio.gather(*(probe.cancel(answer) for answer in asked if answer not in live))
    reasons = await _wait_abandoned_ended(probe, live)
    if set(reasons) == {"length"}:
        raise SkippedError("the model had said everything before a client could be missed")
    expect("cancelled" in reasons and "runs" not in reasons, f"{sum(_GONE_S):g} s later: {', '.join(reasons)}")


async def _wait_abandoned_ended(probe: Probe, live: Sequence[Exchange]) -> list[str]:
    """Waits until streams that nobody listens to have ended, and tells how. Gives up on one that still runs."""
    reasons: list[str] = []
    for wait_s in _GONE_S:
        await asyncio.sleep(wait_s)
        reasons = await asyncio.gather(*(_abandoned_finish_reason(probe, answer) for answer in live))
        if "runs" not in reasons:
            break
    return reasons


async def _abandoned_finish_reason(probe: Probe, answer: Exchange) -> str:
    """The finish reason of a stream that nobody listens to, before and after; `runs` if it has not ended."""
    assert answer.request_id is not None
    again = await probe.listen(answer.inbox, msgpack=False)
    await probe.call(probe.resync_subject(answer.request_id), {"offset": 0})
    await again.first("anything after a resync")
    await asyncio.sleep(0.1)
    await probe.stop_listening(again)
    return str((await again.terminal())["finish_reason"]) if again.is_ended else "runs"


RULES = (cancelled, cancelled_without_reply, cancel_unknown, cancel_immediately, deadline, client_gone)
