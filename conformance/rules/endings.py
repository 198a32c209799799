"""Rules of streams that end early: by a cancel, a deadline, or the loss of the client."""

import asyncio
import time
from collections.abc import Sequence

from tokenbus.conformance.probing import stream_checks
from tokenbus.conformance.probing.assertions import SkippedError, expect
from tokenbus.conformance.probing.exchange import Exchange, any_tokens
from tokenbus.conformance.probing.probe import Probe

_TIMEOUT_MS = 250
_SLACK_MS = 10_000
"""Slack for busy machines. A stream that ignored its deadline would take longer."""
_CHECK_AFTER_S = (4.5, 9.0)
"""Seconds before the first look, and before a second one if a stream is still running. A worker needs two of them to
probe a client that seems gone; the rest is slack for busy machines."""
_NUM_REQUESTS = 12
"""Requests sent at once: enough that none finishes before its client is missed."""
_STARTED_TOKENS = 16
"""Tokens of the fastest stream: by then all streams that the worker has room for have begun. The others wait, and which
ones those are depends on the routers, not on the order of sending."""


async def cancelled(probe: Probe) -> None:
    """A cancel is answered {"cancelled": true} and ends the stream with finish reason cancelled."""
    live = await probe.live()
    assert live.request_id is not None
    reply = await probe.call(probe.cancel_subject(live.request_id))
    expect(reply.get("cancelled") is True, f"the reply is {reply}")
    terminal = await live.terminal()
    expect(terminal["finish_reason"] == "cancelled", f"the stream ends with {terminal['finish_reason']}")
    stream_checks.check_order(live.messages)
    stream_checks.check_numbers(live.messages)
    stream_checks.check_usage(live.messages)


async def cancelled_without_reply(probe: Probe) -> None:
    """A cancel works without a reply subject."""
    live = await probe.live(stream=False)
    await asyncio.sleep(0.2)  # nothing is sent before its end, so there is no chunk to wait for
    await probe.cancel(live)
    reason = live.messages[-1]["finish_reason"]
    expect(reason == "cancelled", f"the stream ends with {reason}")
    stream_checks.check_alone(live.messages)


async def cancel_unknown(probe: Probe) -> None:
    """The cancel of an unknown or ended request is not answered."""
    ended = probe.new_id()
    await probe.short(2, id=ended)
    for request_id in (probe.new_id(), ended):
        expect(
            not await probe.is_answered(probe.cancel_subject(request_id)),
            f"something answers the cancel of {request_id}",
        )


async def cancel_immediately(probe: Probe) -> None:
    """A cancel sent right after its request ends it, wherever the request is by then."""
    for _ in range(4):
        answer = await probe.send(probe.long_request())
        await probe.publish(probe.cancel_subject(str(answer.request_id)), b"")
        reason = (await answer.terminal())["finish_reason"]
        expect(reason == "cancelled", f"the stream ends with {reason}")


async def deadline(probe: Probe) -> None:
    """timeout_ms ends a stream with deadline_exceeded, on time."""
    began = time.monotonic()
    live = await probe.live(timeout_ms=_TIMEOUT_MS)
    terminal = await live.terminal()
    took_ms = (time.monotonic() - began) * 1e3
    code = (terminal.get("error") or {}).get("code")
    expect(code == "deadline_exceeded", f"the stream ends with {terminal['finish_reason']} {code}")
    stream_checks.check_error(terminal["error"])
    expect(
        _TIMEOUT_MS - 50 < took_ms < _TIMEOUT_MS + _SLACK_MS,
        f"it ended after {took_ms:.0f} ms with timeout_ms {_TIMEOUT_MS}",
    )
    stream_checks.check_order(live.messages)
    stream_checks.check_numbers(live.messages)


async def client_gone(probe: Probe) -> None:
    """Requests of a client that stops listening are cancelled within a few seconds."""
    routing = {"worker_id": probe.target.worker_ids[0]} if probe.target.worker_ids else {}
    asked = [await probe.send(probe.long_request(routing=routing)) for _ in range(_NUM_REQUESTS)]
    await any_tokens(asked, _STARTED_TOKENS)
    live = [answer for answer in asked if answer.num_tokens]
    expect(bool(live), "no stream has begun")
    await asyncio.gather(*(probe.stop_listening(answer) for answer in live))
    # The waiting ones would start only when a lost client's request has ended, and hide how long that took.
    await asyncio.gather(*(probe.cancel(answer) for answer in asked if answer not in live))
    reasons = await _wait_abandoned_ended(probe, live)
    if set(reasons) == {"length"}:
        raise SkippedError("the model finished every answer before a client could be missed")
    expect(
        "cancelled" in reasons and "running" not in reasons,
        f"finish reasons {sum(_CHECK_AFTER_S):g} s later: {', '.join(reasons)}",
    )


async def _wait_abandoned_ended(probe: Probe, live: Sequence[Exchange]) -> list[str]:
    """Waits for streams without a listener to end; returns their finish reasons, or `running` for those that do not
    end."""
    reasons: list[str] = []
    for wait_s in _CHECK_AFTER_S:
        await asyncio.sleep(wait_s)  # looking means listening again, so it must not happen too early
        reasons = await asyncio.gather(*(_abandoned_finish_reason(probe, answer) for answer in live))
        if "running" not in reasons:
            break
    return reasons


async def _abandoned_finish_reason(probe: Probe, answer: Exchange) -> str:
    """Returns the finish reason of a stream by listening for a moment and asking for a resync."""
    assert answer.request_id is not None
    again = await probe.listen(answer.inbox, msgpack=False)
    await probe.call(probe.resync_subject(answer.request_id), {"offset": 0})
    await again.first("a message after the resync")
    await asyncio.sleep(0.1)  # the rest of the replayed messages, and the terminal if there is one
    await probe.stop_listening(again)
    return str((await again.terminal())["finish_reason"]) if again.is_ended else "running"
