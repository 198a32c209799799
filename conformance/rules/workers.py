"""Rules of the messages from workers to routers: cards, events, snapshots."""

import asyncio
import itertools
from collections.abc import Sequence

from tokenbus.conformance.probing import field_types, internal_schemas, schemas
from tokenbus.conformance.probing.assertions import Message, expect
from tokenbus.conformance.probing.exchange import Exchange
from tokenbus.conformance.probing.link import Received
from tokenbus.conformance.probing.probe import Probe, short_request
from tokenbus.protocol.wire import block_hash, subjects

_WATCH_S = 2.0
_HEARTBEAT_S = 0.25
_JITTER = 3
"""Heartbeats that may arrive too late to count on a busy machine."""
_MIN_EVENTS = int(_WATCH_S / _HEARTBEAT_S) - _JITTER
"""The fewest events of a worker in one watch."""
_WATCHES = 3
"""Attempts to see enough events, since other work on the machine may delay them."""


_AS_ROUTER = {"follows_beats": True}
"""Asks for a snapshot like a router that needs no heartbeats of idle workers."""


async def cards(probe: Probe) -> None:
    """Each worker answers discover with its card, on its own subject."""
    workers = probe.require_workers()
    exchange = await probe.listen(probe.names.all_cards, msgpack=True)
    await probe.publish(probe.names.discover, b"")
    model = probe.target.model
    await exchange.until(
        lambda: set(workers) <= {m.get("worker_id") for m in exchange.messages if m.get("model") == model},
        "every worker's card",
    )
    for received, card in exchange.pairs:
        field_types.check(card, schemas.CARD, f"the card on {received.subject}")
        own = probe.names.card(card["model"], card["worker_id"])
        expect(received.subject == own, f"the card of {card['worker_id']} arrived on {received.subject}")


async def loads(probe: Probe) -> None:
    """A worker that serves its model answers a load without a model once, and has nothing to load."""
    control = probe.names.worker(probe.target.model, probe.require_workers()[0], "control")
    exchange = await probe.send_internal(control, {"op": "load"})
    await asyncio.sleep(_HEARTBEAT_S)
    expect([(m.get("ok"), m.get("progress")) for m in exchange.messages] == [(True, 1)], "it has something to load")


async def pulls(probe: Probe) -> None:
    """A worker refuses to pull what is no name on the Hub, naming `model`, or any pull, naming `op`."""
    control = probe.names.worker(probe.target.model, probe.require_workers()[0], "control")
    reply = await probe.call_internal(control, {"op": "pull", "model": "/etc/passwd"})
    expect(reply.get("ok") is False, "it fetches a path of its machine")
    param = (reply.get("error") or {}).get("param")
    expect(param in ("model", "op"), f"it does not say what is wrong, but names {param}")


async def alive(probe: Probe) -> None:
    """A worker whose card names `process_run` hears `alive` of that run, and of no other, and answers nothing there."""
    workers, model = probe.require_workers(), probe.target.model
    shown = await probe.listen(probe.names.all_cards, msgpack=True)
    await probe.publish(probe.names.discover, b"")
    await shown.until(lambda: set(workers) <= {m.get("worker_id") for m in shown.messages}, "every worker's card")
    runs = {m["worker_id"]: m.get("process_run") for m in shown.messages if m.get("model") == model}
    for worker_id, run in runs.items():
        if not run:
            continue
        heard = await probe.send_internal(probe.names.alive(model, worker_id, run))
        unheard = await probe.send_internal(probe.names.alive(model, worker_id, f"{run}x"))
        await asyncio.sleep(_HEARTBEAT_S)
        expect(not heard.received, f"nobody hears that {worker_id} is alive, or somebody answers there")
        expect(any(one.is_no_responders for one in unheard.received), f"{worker_id} hears runs that are not its own")


async def heartbeats(probe: Probe) -> None:
    """Each worker publishes events on its own subject at least every 250 ms, numbered without gaps, or its process
    speaks for it at least once a second and knows its last event."""
    workers = probe.require_workers()
    events = await probe.listen(probe.names.all_events, msgpack=True)
    beats = await probe.listen(probe.names.all_beats, msgpack=True)
    known = (0, 0)
    for _ in range(_WATCHES):
        known = len(events.messages), len(beats.messages)
        await asyncio.sleep(_WATCH_S)
        if all(_is_heard(probe, worker_id, events, beats, known) for worker_id in workers):
            break
    for received, message in events.pairs:
        speaker = probe.names.parse_worker(received.subject).worker_id
        expect(message.get("worker_id") == speaker, f"{received.subject} carries events of {message.get('worker_id')}")
    for worker_id in workers:
        own = _of(probe, worker_id, events, 0)
        check_event_log([message for _, message in own], worker_id)
        check_beats(own, _beats_for(probe, worker_id, beats, 0), worker_id)
        is_heard = _is_heard(probe, worker_id, events, beats, known)
        expect(is_heard, f"{worker_id}: neither {_MIN_EVENTS} events nor a beat in {_WATCH_S:g} s")


def _is_heard(probe: Probe, worker_id: str, events: Exchange, beats: Exchange, known: tuple[int, int]) -> bool:
    """Whether a worker was heard of often enough since so many events and beats were known."""
    num_events = len(_of(probe, worker_id, events, known[0]))
    return num_events >= _MIN_EVENTS or bool(_beats_for(probe, worker_id, beats, known[1]))


def _of(probe: Probe, worker_id: str, exchange: Exchange, since: int) -> list[tuple[Received, Message]]:
    """Returns the events on a worker's own subject, among all events from number `since` on."""
    own = probe.names.events(probe.target.model, worker_id)
    return [pair for pair in exchange.pairs[since:] if pair[0].subject == own]


def _beats_for(probe: Probe, worker_id: str, exchange: Exchange, since: int) -> list[tuple[Received, Message]]:
    """Returns the beats that speak for a worker, among all beats from number `since` on."""
    return [
        (received, beat)
        for received, beat in exchange.pairs[since:]
        if probe.names.parse_beat(received.subject)[0] == probe.target.model and worker_id in (beat.get("seqs") or {})
    ]


async def epochs(probe: Probe) -> None:
    """A worker's card, events, snapshot and entry in the models reply have the same epoch."""
    worker_id = probe.require_workers()[0]
    model = probe.target.model
    exchanges = {
        "card": await probe.listen(probe.names.card(model, worker_id), msgpack=True),
        "events": await probe.listen(probe.names.events(model, worker_id), msgpack=True),
        "snapshot": await probe.send_internal(probe.names.worker(model, worker_id, "snapshot"), _AS_ROUTER),
    }
    await probe.publish(probe.names.discover, b"")
    seen: dict[str, object] = {}
    for name, exchange in exchanges.items():
        seen[name] = (await exchange.first(f"a message of {name}")).get("epoch")
    reply = await probe.call(probe.names.models_for(probe.tenant))
    cards = [card for served in reply["models"] if served["model"] == model for card in served.get("workers") or []]
    seen["models"] = next((card["epoch"] for card in cards if card["worker_id"] == worker_id), None)
    expect(len(set(seen.values())) == 1, f"{worker_id} has epochs {seen}")


async def events_of_a_request(probe: Probe) -> None:
    """A request is reported as started, then each token in an entry before its chunk, which is sealed after the chunk,
    and as finished after its terminal."""
    probe.require_workers()
    events = await probe.listen(probe.names.all_events, msgpack=True)
    seals = await probe.listen(probe.names.all_seals, msgpack=True)
    answer = await probe.ask(short_request(16, id=probe.new_id(), return_token_ids=True))
    key = subjects.request_key(probe.tenant, str(answer.request_id))
    await events.until(lambda: any(key in (m.get("finished") or []) for m in events.messages), f"finished {key}")
    check_request_events(key, events.pairs, seals.pairs, answer)


async def snapshot(probe: Probe) -> None:
    """A snapshot's parts describe one instant, arrive in order with the events, and list the running request."""
    worker_id = probe.require_workers()[0]
    events = await probe.listen(probe.names.events(probe.target.model, worker_id), msgpack=True)
    live = await probe.live(routing={"worker_id": worker_id})
    subject = probe.names.worker(probe.target.model, worker_id, "snapshot")
    exchange = await probe.send_internal(subject, _AS_ROUTER)
    check_snapshot(await exchange.parts("a snapshot"), subjects.request_key(probe.tenant, str(live.request_id)))
    await asyncio.sleep(2 * _HEARTBEAT_S)  # for the first event after the snapshot
    arrived = [(received.order, message["seq"]) for received, message in events.pairs]
    check_snapshot_order(exchange.received[0].order, exchange.messages[0]["seq"], arrived)


def check_event_log(events: Sequence[Message], worker_id: str) -> None:
    """Checks one worker's events."""
    for message in events:
        field_types.check(message, internal_schemas.EVENTS, f"an event of {worker_id}")
    for before, after in itertools.pairwise(events):
        if before["epoch"] == after["epoch"]:
            expect(after["seq"] == before["seq"] + 1, f"{worker_id}: event {after['seq']} follows {before['seq']}")


def check_beats(
    events: Sequence[tuple[Received, Message]], beats: Sequence[tuple[Received, Message]], worker_id: str
) -> None:
    """Checks the beats that speak for one worker: each knows its last event."""
    for received, beat in beats:
        field_types.check(beat, internal_schemas.BEAT, f"a beat for {worker_id}")
        seq = beat["seqs"][worker_id]
        before = [event for other, event in events if other.order < received.order and event["epoch"] == beat["epoch"]]
        last = before[-1]["seq"] if before else seq
        expect(seq == last, f"a beat says {seq} of {worker_id}, whose last event is {last}")


def check_request_events(
    key: str,
    events: Sequence[tuple[Received, Message]],
    seals: Sequence[tuple[Received, Message]],
    answer: Exchange,
) -> None:
    """Checks the events about one request, and their order relative to its chunks on the same connection."""
    places: dict[str, tuple[int, Message]] = {}
    for what in ("started", "finished"):
        reports = [(received.order, message) for received, message in events if key in _named(message, what)]
        expect(len(reports) == 1, f"{what} was reported {len(reports)} times")
        places[what] = reports[0]
    expect(answer.received[-1].order < places["finished"][0], "finished came before the terminal")
    started = places["started"][1]
    own = [pair for pair in events if _life(pair[1]) == _life(started)]
    for _, seal in seals:
        field_types.check(seal, internal_schemas.SEAL, "a seal")
    sealed = [(received.order, seal["seq"]) for received, seal in seals if seal["epoch"] == started["epoch"]]
    # an entry without tokens seals those before it; one with tokens may belong to the same step
    sealed += [(received.order, entry["seq"] - 1) for received, entry in own if not entry.get("token_ids")]
    _check_tokens(_tokens_of(key, started, own), sealed, answer)


def _tokens_of(
    key: str, started: Message, events: Sequence[tuple[Received, Message]]
) -> list[tuple[int, Message, int]]:
    """Returns the tokens of a request, each with its entry and that entry's arrival."""
    number = next(entry["stream_no"] for entry in started["started"] if entry["id"] == key)
    tokens = []
    for received, entry in events:
        stream_nos = block_hash.unpack_token_ids(entry.get("stream_nos") or b"")
        token_ids = block_hash.unpack_token_ids(entry.get("token_ids") or b"")
        expect(len(stream_nos) == len(token_ids), "an entry has not as many stream_nos as token_ids")
        found = [token_id for stream_no, token_id in zip(stream_nos, token_ids, strict=True) if stream_no == number]
        tokens += [(received.order, entry, token_id) for token_id in found]
    return tokens


def _check_tokens(
    tokens: Sequence[tuple[int, Message, int]], sealed: Sequence[tuple[int, int]], answer: Exchange
) -> None:
    """Checks that each chunk's tokens are in entries before it, and that these are sealed after it.

    `sealed` holds pairs of arrival order and the last entry sealed by then."""
    for received, chunk in answer.pairs:
        for at, token_id in enumerate(chunk.get("token_ids") or [], start=chunk["offset"]):
            expect(at < len(tokens), f"token {at} of the answer is in no entry")
            order, entry, known = tokens[at]
            expect(known == token_id, f"token {at} is {token_id}, and {known} in the event log")
            expect(order < received.order, f"token {at} came before the entry that has it")
            is_sealed = any(place > received.order and seq >= entry["seq"] for place, seq in sealed)
            expect(is_sealed, f"entry {entry['seq']} was not sealed after its chunks")
    expect(
        len(tokens) == answer.messages[-1]["usage"]["completion_tokens"], "the event log has other tokens than chunks"
    )


def _life(message: Message) -> tuple[str, str]:
    return message["worker_id"], message["epoch"]


def _named(message: Message, what: str) -> list[str]:
    entries = message.get(what) or []
    return [entry["id"] for entry in entries] if what == "started" else entries


def check_snapshot(parts: Sequence[Message], key: str) -> None:
    """Checks all parts of a snapshot, in any order."""
    for message in parts:
        field_types.check(message, internal_schemas.SNAPSHOT, "a part")
    numbers = sorted(message["part"] for message in parts)
    expect(numbers == list(range(parts[0]["parts"])), f"parts {numbers} of {parts[0]['parts']}")
    instants = {(message["epoch"], message["seq"]) for message in parts}
    expect(len(instants) == 1, f"parts of {len(instants)} instants: {sorted(instants)}")
    running = {entry["id"]: entry for message in parts for entry in message.get("running") or []}
    expect(key in running, f"{key} is not among the {len(running)} running")
    entry = running[key]
    expect(
        entry.get("num_tokens", 0) > 0 and entry["attempt"] >= 1,
        f"a request that has sent tokens is listed as {entry}",
    )
    expect(bool(entry.get("router_id")), f"{key} is listed without its guardian")


def check_snapshot_order(order: int, seq: int, events: Sequence[tuple[int, int]]) -> None:
    """Checks that a snapshot taken after event `seq` arrives between that event and the next.

    `events` holds pairs of arrival order and seq."""
    expect(bool(events), "no events arrived")
    late = [number for place, number in events if place < order and number > seq]
    early = [number for place, number in events if place > order and number <= seq]
    expect(not late, f"a snapshot after event {seq} arrived after event {late[-1:]}")
    expect(not early, f"a snapshot after event {seq} arrived before event {early[:1]}")
