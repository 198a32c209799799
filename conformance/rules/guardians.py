"""Rules about guardians, the routers that continue streams whose worker is lost or leaves."""

import asyncio
import time

import msgspec

from tokenbus.conformance.probing import acting_router, field_types, internal_schemas, stream_checks
from tokenbus.conformance.probing.acting_router import PROMPT_IDS
from tokenbus.conformance.probing.assertions import Message, expect
from tokenbus.conformance.probing.exchange import Exchange
from tokenbus.conformance.probing.link import Received
from tokenbus.conformance.probing.probe import Probe
from tokenbus.protocol.wire import subjects

_MIN_CHECK_S, _MAX_CHECK_S = 0.4, 2.5
"""A worker asks once a second, slightly sooner or later on a busy machine."""


async def checked(probe: Probe) -> None:
    """About once a second a worker asks the router that placed a stream whether it guards it, and offers it to no other
    while that router listens."""
    router_id, key = _own_router(probe)
    checks = await probe.listen(probe.names.router(router_id), msgpack=True)
    offers = await probe.listen(_offers_of_worker(probe), msgpack=True)
    stream = await _place(probe, key, router_id)
    await checks.until(lambda: len(checks.received) >= 2, "a second check", 2 * _MAX_CHECK_S)
    await _cancel(probe, key, stream)
    reply = probe.names.unguarded(probe.target.model, probe.require_workers()[0], router_id)
    for received, check in checks.pairs:
        check_guardian_check(received, check, key, reply)
    interval_s = checks.received[1].at - checks.received[0].at
    expect(interval_s > _MIN_CHECK_S, f"it was asked again after {interval_s:.2f} s")
    expect(not _about(key, offers), "a stream whose router listens was offered to others")


async def silent(probe: Probe) -> None:
    """A stream whose router has answered a check and then stops answering, though it listens, is offered to the
    others."""
    router_id, key = _own_router(probe)
    model, worker_id = probe.target.model, probe.require_workers()[0]
    checks = await probe.listen(probe.names.router(router_id), msgpack=True)
    offers = await probe.listen(_offers_of_worker(probe), msgpack=True)
    stream = await _place(probe, key, router_id)
    await checks.first("a check")
    answer = msgspec.msgpack.encode({"router_id": router_id, "request_ids": []})
    await probe.publish(probe.names.unguarded(model, worker_id, router_id), answer)
    deadline = time.monotonic() + 6 * _MAX_CHECK_S
    while not _about(key, offers):
        expect(time.monotonic() < deadline, f"the stream was not offered within {6 * _MAX_CHECK_S:g} s")
        if stream.messages[-1].get("finish_reason") is not None:  # a fast engine is done with one within two seconds
            key = subjects.request_key(probe.tenant, probe.new_id())
            stream = await _place(probe, key, router_id)
        await asyncio.sleep(0.02)
    await _cancel(probe, key, stream)
    stream_checks.check_order(stream.messages)


async def offered(probe: Probe) -> None:
    """A stream whose router does not listen is offered to the other routers, with its prompt and its tokens; the log
    names the one that accepts, and the stream continues."""
    router_id, key = _own_router(probe)
    model, worker_id = probe.target.model, probe.require_workers()[0]
    events = await probe.listen(probe.names.events(model, worker_id), msgpack=True)
    offers = await probe.listen(_offers_of_worker(probe), msgpack=True)
    stream = await _place(probe, key, router_id)
    await events.until(lambda: bool(_started(key, events)), f"started {key}")
    started = _started(key, events)[0]
    expect(started.get("router_id") == router_id, f"{router_id} has placed it, and started names {started}")
    await offers.until(lambda: bool(_about(key, offers)), "an offer", 2 * _MAX_CHECK_S)
    check_offer(_about(key, offers)[0], router_id, started["stream_no"])
    stream_no = started["stream_no"]
    await events.until(lambda: bool(_guardians(stream_no, events)), "the new guardian in the log", 2 * _MAX_CHECK_S)
    guardian = _guardians(stream_no, events)[-1]
    expect(guardian not in ("", router_id), f"the new guardian is {guardian!r}")
    seen = stream.num_tokens
    await stream.tokens(seen + 4)
    await _cancel(probe, key, stream)
    stream_checks.check_order(stream.messages)
    expect({message["attempt"] for message in stream.messages} == {1}, "the stream has left its worker")


async def unguarded(probe: Probe) -> None:
    """A router answers each check with those keys that it does not guard, or none if it guards all of them."""
    live, router_id = await _live(probe)
    key = subjects.request_key(probe.tenant, str(live.request_id))
    reply = probe.names.unguarded(probe.target.model, worker_id=probe.new_id(), router_id=router_id)
    answers = await probe.listen(reply, msgpack=True)
    unknown = f"{key}-unknown"
    for keys in ([key, unknown], [key]):
        await probe.publish(probe.names.router(router_id), msgspec.msgpack.encode({"request_ids": keys}), reply)
    await answers.until(lambda: len(answers.received) == 2, "an answer to each of two checks")
    for answer, expected in zip(answers.messages, ([unknown], []), strict=True):
        field_types.check(answer, internal_schemas.UNGUARDED, "the answer to a check")
        expect(answer["router_id"] == router_id, f"{router_id} was asked, and {answer['router_id']} answers")
        expect(answer["request_ids"] == expected, f"of {key} and {unknown} it does not guard {answer['request_ids']}")


async def handed_on(probe: Probe) -> None:
    """A request handed over by another router is accepted by one, placed under a higher attempt, and answered."""
    router_id, key = _own_router(probe)
    client = await probe.listen(probe.link.new_inbox(), msgpack=False)
    run = {
        "request_id": key,
        "attempt": 2,
        "epoch": "",
        "router_id": router_id,
        "reply": client.inbox,
        "encoding": "json",
        "token_ids": PROMPT_IDS,
        "params": {"max_tokens": 4, "ignore_eos": True, "seed": 1},
        "remaining_ms": 20_000.0,
    }
    reply = await probe.call_internal(probe.names.guard(probe.target.model), {"run": run})
    field_types.check(reply, internal_schemas.GUARD_REPLY, "the reply")
    expect(reply["accepted"] and reply["router_id"] != router_id, f"the offer got {reply}")
    expect((reply["request_id"], reply["attempt"]) == (key, 2), f"the offer of attempt 2 of {key} got {reply}")
    await client.terminal()
    stream_checks.check_order(client.messages)
    seen = {message["attempt"] for message in client.messages if message.get("worker_id") is not None}
    expect(min(seen) > 2, f"attempts {seen} of a request handed over with attempt 2")


async def take(probe: Probe) -> None:
    """take of a stream from a worker that is not leaving is refused, and the stream continues."""
    live, router_id = await _live(probe)
    key = subjects.request_key(probe.tenant, str(live.request_id))
    body = {"request_id": key, "attempt": live.messages[-1]["attempt"], "known_tokens": 0, "router_id": router_id}
    reply = await probe.call_internal(acting_router.service(probe, "take"), body)
    field_types.check(reply, internal_schemas.TAKE_REPLY, "the reply")
    expect(reply["ok"] is False, f"the take got {reply}")
    await live.tokens(live.num_tokens + 4)
    await probe.cancel(live)
    stream_checks.check_order(live.messages)


def check_guardian_check(received: Received, check: Message, key: str, reply: str) -> None:
    """Checks what a worker asks the guardian of its only stream with that key."""
    field_types.check(check, internal_schemas.GUARD_CHECK, "a check")
    expect(check["request_ids"] == [key], f"a check of {check['request_ids']}, and the router has placed {key} there")
    expect(received.reply == reply, f"a check with reply subject {received.reply!r} instead of {reply}")


def check_offer(guard: Message, router_id: str, stream_no: int) -> None:
    """Checks a worker's offer of a stream that this router has placed there."""
    field_types.check(guard, internal_schemas.GUARD, "an offer")
    run = guard["run"]
    expect(guard.get("stream_no") == stream_no, f"stream {stream_no} was offered as {guard.get('stream_no')}")
    expect(run["router_id"] == router_id, f"its guardian was {router_id}, and the offer names {run['router_id']}")
    expect(run["token_ids"] == PROMPT_IDS, "the offer has another prompt than the run")
    expect(bool(run["epoch"]) and guard.get("hash_scheme") is not None, "it names no epoch or no hash scheme")
    if (resume_from := run.get("resume_from")) is not None:
        field_types.check(resume_from, internal_schemas.RUN_RESUME, "resume_from of an offer")
        expect(len(resume_from["token_ids"]) % 4 == 0, "token_ids of an offer are not of four bytes each")


def _own_router(probe: Probe) -> tuple[str, str]:
    """Returns a name under which to place a stream, and the stream's key."""
    request_id = probe.new_id()
    return f"router-of-{request_id}", subjects.request_key(probe.tenant, request_id)


async def _place(probe: Probe, key: str, router_id: str) -> Exchange:
    """Starts a long stream as a router of that name, and waits for its first tokens."""
    reply, stream = await acting_router.run(
        probe, attempt=1, key=key, router_id=router_id, max_tokens=probe.long_tokens
    )
    expect(reply.get("accepted") is True, f"the run got {reply}")
    await stream.tokens(1)
    return stream


async def _live(probe: Probe) -> tuple[Exchange, str]:
    """Starts a long stream as a client; returns it, and the router that placed it."""
    worker_id = probe.require_workers()[0]
    events = await probe.listen(probe.names.events(probe.target.model, worker_id), msgpack=True)
    await probe.link.flush()
    live = await probe.live(routing={"worker_id": worker_id})
    key = subjects.request_key(probe.tenant, str(live.request_id))
    await events.until(lambda: bool(_started(key, events)), f"started {key}")
    return live, str(_started(key, events)[0].get("router_id"))


async def _cancel(probe: Probe, key: str, stream: Exchange) -> None:
    await probe.publish(probe.cancel_subject(subjects.key_to_request_id(key)), b"")
    await stream.terminal()


def _offers_of_worker(probe: Probe) -> str:
    return probe.names.guard(probe.target.model, probe.require_workers()[0])


def _about(key: str, offers: Exchange) -> list[Message]:
    """Returns the offers of one stream."""
    return [guard for guard in offers.messages if (guard.get("run") or {}).get("request_id") == key]


def _started(key: str, events: Exchange) -> list[Message]:
    return [one for entry in events.messages for one in entry.get("started") or [] if one["id"] == key]


def _guardians(stream_no: int, events: Exchange) -> list[str]:
    """Returns the guardians of a stream that the log names."""
    named = [entry.get("guardians") or {} for entry in events.messages]
    return [guardians[stream_no] for guardians in named if stream_no in guardians]
