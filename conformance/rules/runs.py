"""Rules of the messages from routers and operators to workers: run, drop, stop, tokenizer, tokenize."""

import asyncio

import xxhash

from tokenbus.conformance.probing import acting_router, field_types, internal_schemas, stream_checks
from tokenbus.conformance.probing.assertions import Message, SkippedError, expect, shorten
from tokenbus.conformance.probing.exchange import Exchange
from tokenbus.conformance.probing.probe import Probe
from tokenbus.protocol.wire import subjects

_SILENCE_S = 0.4


async def run(probe: Probe) -> None:
    """A run is answered {accepted: true} to the router, and its chunks go to the client."""
    reply, client = await acting_router.run(probe, attempt=3)
    expect(reply.get("accepted") is True, f"the run got {reply}")
    await client.terminal()
    stream_checks.check_order(client.messages)
    seen = {message["attempt"] for message in client.messages}
    expect(seen == {3}, f"attempts {seen} of a run with attempt 3")


async def wrong_epoch(probe: Probe) -> None:
    """A run with the wrong epoch is refused in the reply to the router, and its client gets nothing."""
    reply, client = await acting_router.run(probe, attempt=1, epoch="1-foreign")
    await _check_refused(reply, client)


async def dropped(probe: Probe) -> None:
    """drop of an unknown attempt succeeds; runs of it and of lower attempts are then refused, higher ones are not."""
    key = subjects.request_key(probe.tenant, probe.new_id())
    reply = await _drop(probe, key, 2)
    expect(reply.get("ok") is True, f"the drop got {reply}")
    for attempt in (2, 1):
        await _check_refused(*await acting_router.run(probe, attempt=attempt, key=key))
    reply, client = await acting_router.run(probe, attempt=3, key=key)
    expect(reply.get("accepted") is True, f"the next attempt got {reply}")
    await client.terminal()


async def drop_after_first_token(probe: Probe) -> None:
    """drop of an attempt that has sent a token is refused, and its stream continues."""
    live = await probe.live(routing={"worker_id": probe.require_workers()[0]})
    key = subjects.request_key(probe.tenant, str(live.request_id))
    reply = await _drop(probe, key, live.messages[-1]["attempt"])
    expect(reply.get("ok") is False, f"the drop got {reply}")
    count = live.num_tokens
    await live.tokens(count + 4)
    await probe.cancel(live)
    stream_checks.check_order(live.messages)


async def stopped(probe: Probe) -> None:
    """A stop ends a stream with the text generated so far: its terminal has finish_reason length, usage and stopped_by
    operator."""
    live = await probe.live(routing={"worker_id": probe.require_workers()[0]})
    reply = await _stop(probe, subjects.request_key(probe.tenant, str(live.request_id)))
    expect(reply.get("ok") is True, f"the stop got {reply}")
    terminal = await live.terminal()
    seen = terminal["finish_reason"], terminal.get("stopped_by")
    expect(seen == ("length", "operator"), f"the stream ends with {seen}")
    stream_checks.check_order(live.messages)
    stream_checks.check_numbers(live.messages)
    stream_checks.check_usage(live.messages)


async def stop_unknown(probe: Probe) -> None:
    """A stop that names a request the worker does not run, or none, is refused with invalid_request and the field
    request_id."""
    for key in (subjects.request_key(probe.tenant, probe.new_id()), "no key", None):
        reply = await _stop(probe, key)
        error = reply.get("error") or {}
        seen = reply.get("ok"), error.get("code"), error.get("param")
        expect(seen == (False, "invalid_request", "request_id"), f"the stop of {key} got {reply}")


async def tokenizer(probe: Probe) -> None:
    """The parts of a tokenizer fit together and match the digest in the worker's card."""
    card = await acting_router.card(probe)
    if card.get("tokenizer_digest") is None:
        raise SkippedError("the worker has no tokenizer to offer")
    exchange = await probe.send_internal(acting_router.service(probe, "tokenizer"))
    check_parts(await exchange.parts("a tokenizer"), card["tokenizer_digest"])


async def tokenize(probe: Probe) -> None:
    """tokenize returns token ids or an error."""
    reply = await probe.call_internal(acting_router.service(probe, "tokenize"), {"text": "Once upon a time"})
    ids = reply.get("token_ids")
    is_packed = isinstance(ids, bytes) and len(ids) > 0 and len(ids) % 4 == 0
    expect(is_packed or field_types.list_of(field_types.COUNT).holds(ids), f"token_ids is {shorten(ids)}")
    wrong = await probe.call_internal(acting_router.service(probe, "tokenize"), {"text": 5})
    stream_checks.check_error(wrong.get("error"))


def check_parts(parts: list[Message], digest: str) -> None:
    """Checks all parts of a tokenizer, in any order, against the digest in the card."""
    for message in parts:
        field_types.check(message, internal_schemas.TOKENIZER, "a part")
        expect(message["digest"] == digest, f"a part with digest {message['digest']} instead of {digest}")
    parts = sorted(parts, key=lambda message: int(message["part"]))
    numbers = [message["part"] for message in parts]
    expect(numbers == list(range(parts[0]["parts"])), f"parts {numbers} of {parts[0]['parts']}")
    seen = xxhash.xxh3_128_hexdigest(b"".join(message["data"] for message in parts))
    expect(seen == digest, f"all parts together have digest {seen} instead of {digest}")


async def _check_refused(reply: Message, client: Exchange) -> None:
    expect(reply.get("accepted") is False, f"the run got {reply}")
    stream_checks.check_error(reply.get("error"))
    await asyncio.sleep(_SILENCE_S)  # the router answers its client, not the worker
    expect(not client.received, f"its client got {client.received[:1]}")


async def _stop(probe: Probe, key: str | None) -> Message:
    return await probe.call_internal(acting_router.service(probe, "control"), {"op": "stop", "request_id": key})


async def _drop(probe: Probe, key: str, attempt: int) -> Message:
    body = {"op": "drop", "request_id": key, "attempt": attempt}
    return await probe.call_internal(acting_router.service(probe, "control"), body)
