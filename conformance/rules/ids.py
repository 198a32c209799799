"""Rules of request ids and reply subjects."""

import asyncio

from tokenbus.conformance.probing import schemas, stream_checks
from tokenbus.conformance.probing.assertions import expect, shorten
from tokenbus.conformance.probing.probe import Probe, short_request

_LONGEST_ID = 128
_SILENCE_S = 0.6


async def id_echoed(probe: Probe) -> None:
    """Every message has the id of its request."""
    longest = probe.new_id().ljust(_LONGEST_ID, "x")
    stream_checks.check_ids((await probe.short(id=longest)).messages, longest)


async def id_in_refusal(probe: Probe) -> None:
    """A refusal has the request's id even if other fields are wrong."""
    request_id = probe.new_id()
    for wrong in ({"temperature": -1}, {"max_tokens": "many"}, {"prompt": 5}):
        answer = await probe.ask({"id": request_id, "prompt": "x", **wrong})
        stream_checks.check_refusal(answer.messages, "invalid_request")
        stream_checks.check_ids(answer.messages, request_id)


async def id_unreadable(probe: Probe) -> None:
    """A refusal has an empty id if the request's id could not be read."""
    stream_checks.check_ids((await probe.ask(b"not a message")).messages, "")


async def id_generated(probe: Probe) -> None:
    """A request without an id gets a valid and unique one."""
    made = [(await probe.short(1)).messages for _ in range(2)]
    for messages in made:
        request_id = messages[0].get("id")
        expect(schemas.REQUEST_ID.holds(request_id), f"the generated id is {shorten(request_id)}")
        stream_checks.check_ids(messages, str(request_id))
    expect(made[0][0]["id"] != made[1][0]["id"], f"two requests got the id {made[0][0]['id']}")


async def id_reused(probe: Probe) -> None:
    """An id may be used again once its stream has ended."""
    request_id = probe.new_id()
    for _ in range(3):
        answer = await probe.short(4, id=request_id)
        error = answer.messages[-1].get("error")
        expect(error is None, f"an id whose stream has ended is refused: {error}")


async def duplicate_other_inbox(probe: Probe) -> None:
    """A request with the id of a running one, but another reply subject, is refused as duplicate_request."""
    live = await probe.live()
    twin = await probe.ask(short_request(4, id=live.request_id))
    stream_checks.check_refusal(twin.messages, "duplicate_request")
    await probe.cancel(live)
    stream_checks.check_order(live.messages)
    stream_checks.check_numbers(live.messages)


async def duplicate_same_inbox(probe: Probe) -> None:
    """A request with both the id and the reply subject of a running one is ignored."""
    live = await probe.live()
    await probe.publish(probe.subject, b'{"prompt": "x", "id": "%s"}' % str(live.request_id).encode(), live.inbox)
    await asyncio.sleep(0.3)  # time for a router to answer the duplicate
    await probe.cancel(live)
    await asyncio.sleep(_SILENCE_S)  # nothing may follow the terminal
    stream_checks.check_order(live.messages)
    stream_checks.check_numbers(live.messages)


async def reply_not_inbox(probe: Probe) -> None:
    """Nothing is ever published to a reply subject that is not an inbox."""
    nonce = probe.new_id()
    # Subjects to listen on, and the reply subjects that would publish there: another subject, one that merely begins
    # like an inbox, and an inbox with a wildcard.
    strange = {
        f"{nonce}.victim": f"{nonce}.victim",
        f"{probe.inbox_prefix}ES.{nonce}": f"{probe.inbox_prefix}ES.{nonce}",
        f"{probe.inbox_prefix}.{nonce}.>": f"{probe.inbox_prefix}.{nonce}.*",
    }
    live = await probe.live()
    victims = [await probe.listen(subject, msgpack=False) for subject in strange]
    for reply in strange.values():
        for subject, payload in _messages(probe, str(live.request_id)):
            await probe.publish(subject, payload, reply)
    await asyncio.sleep(_SILENCE_S)
    for victim, reply in zip(victims, strange.values(), strict=True):
        expect(
            not victim.received, f"{len(victim.received)} messages arrived at {reply}: {shorten(victim.received[:1])}"
        )
    expect(not live.is_ended, "a cancel with such a reply subject was carried out")


async def no_reply_subject(probe: Probe) -> None:
    """A generate request without a reply subject does not run."""
    request_id = probe.new_id()
    body = b'{"id": "%s", "prompt": "x", "max_tokens": 500, "ignore_eos": true}' % request_id.encode()
    await probe.publish(probe.subject, body)
    await asyncio.sleep(0.1)  # time to reach a worker, if it does
    expect(not await probe.is_answered(probe.cancel_subject(request_id)), "it runs: its cancel is answered")


def _messages(probe: Probe, request_id: str) -> list[tuple[str, bytes]]:
    return [
        (probe.subject, b'{"prompt": "x", "max_tokens": 1}'),
        (probe.subject, b"not a message"),
        (probe.names.embed(probe.target.model, probe.tenant), b'{"input": "x"}'),
        (probe.names.tokenize(probe.target.model, probe.tenant), b'{"prompt": "x"}'),
        (probe.names.detokenize(probe.target.model, probe.tenant), b'{"token_ids": [1]}'),
        (probe.names.cache(probe.target.model, probe.tenant), b'{"session_id": "x", "cache_control": {}}'),
        (probe.names.rerank(probe.target.model, probe.tenant), b'{"query": "x", "documents": ["y"]}'),
        (probe.names.models_for(probe.tenant), b""),
        (probe.resync_subject(request_id), b'{"offset": 0}'),
        (probe.cancel_subject(request_id), b""),
    ]
