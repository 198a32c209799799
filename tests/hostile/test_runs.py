"""A worker trusts no message: whatever arrives on its subjects, it answers and keeps serving."""

import asyncio
import math
import random
import secrets
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.hostile.raw_router import RawRouter, check_idle
from tests.hostile.scale import times
from tests.support.raw_client import PREFIX
from tests.support.system import System
from tokenbus import demo

WORKER = "w-1"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder: Path = tmp_path_factory.mktemp("hostile")
    system = asyncio.run(System.start(folder))
    system.worker(WORKER, model=demo.ONNX_PATH)
    yield system
    asyncio.run(system.stop())


@pytest.fixture
async def peer(system: System) -> AsyncIterator[RawRouter]:
    peer = await RawRouter.connect(system.url, "demo", WORKER)
    await peer.find()
    yield peer
    await peer.close()


HOSTILE_PARAMS: dict[str, Any] = {
    "max_tokens": -5,
    "min_tokens": -1,
    "temperature": -1.0,
    "top_p": 7.5,
    "top_k": -3,
    "min_p": -0.5,
    "seed": -1,
    "repetition_penalty": 0.0,
    "repetition_last_n": -4,
    "presence_penalty": 1e9,
    "frequency_penalty": -1e9,
    "logit_bias": {-1: 1.0},
    "logprobs": -5,
    "stop": [""],
    "stop_token_ids": [-7],
    "cache_salt": "x" * 10_000,
    "session_id": "x" * 10_000,
    "priority": 1 << 40,
}


@pytest.mark.parametrize("name", HOSTILE_PARAMS)
async def test_a_run_outside_of_what_a_client_may_ask_is_refused_by_its_field(peer: RawRouter, name: str) -> None:
    answer = await peer.call("run", peer.run(params={"max_tokens": 2, name: HOSTILE_PARAMS[name]}))
    assert answer["accepted"] is False
    assert answer["error"]["code"] == "invalid_request"
    assert answer["error"]["param"].split("[")[0] in (name, f"params.{name}")


HOSTILE_FIELDS: dict[str, tuple[str, Any]] = {
    "an id that fills a subject": ("request_id", "default:" + "x" * 5_000),
    "an empty id": ("request_id", ""),
    "an id without a tenant": ("request_id", "lonely"),
    "an id of no text": ("request_id", "=FF:x"),
    "an id with a line of its own": ("request_id", "default:x\r\nPUB _INBOX.a 0\r\n\r\n"),
    "an id of many tokens": ("request_id", "default:a.b"),
    "a tenant that is too long": ("request_id", "t" * 4_000 + ":x"),
    "an inbox that fills a control line": ("reply", "_INBOX." + "x" * 3_900),
    "an inbox with a space": ("reply", "_INBOX.a b"),
    "no inbox": ("reply", "tokenbus.v1.discover"),
    "half a token": ("token_ids", b"\1\0"),
    "no tokens": ("token_ids", b""),
    "tokens beyond the vocabulary": ("token_ids", b"\xff" * 8),
    "a negative attempt": ("attempt", -1),
    "an attempt beyond all": ("attempt", (1 << 64) - 1),
    "endless time": ("remaining_ms", 1e300),
    "an earlier stream of no tokens": ("resume_from", {"token_ids": b""}),
    "an earlier stream of half a token": ("resume_from", {"token_ids": b"\1\0"}),
    "an earlier stream of tokens beyond the vocabulary": ("resume_from", {"token_ids": b"\xff" * 8}),
    "an earlier stream that is longer than the answer": ("resume_from", {"token_ids": b"\7\0\0\0" * 10_000}),
    "an earlier stream that took endless time": ("resume_from", {"token_ids": b"\7\0\0\0", "elapsed_ms": 1e300}),
    "an earlier stream that took negative time": ("resume_from", {"token_ids": b"\7\0\0\0", "queue_ms": -1.0}),
}


@pytest.mark.parametrize("what", HOSTILE_FIELDS)
async def test_a_run_that_no_router_makes_is_refused_with_an_answer(system: System, peer: RawRouter, what: str) -> None:
    name, value = HOSTILE_FIELDS[what]
    answer = await peer.call("run", peer.run(**{name: value}))
    assert answer["accepted"] is False
    assert answer["error"]["code"] in ("invalid_request", "unsupported")
    check_idle(system, WORKER)


HOSTILE_ASKS: dict[str, tuple[str, Any]] = {
    "no inputs": ("embed", {"inputs": [], "remaining_ms": 500.0}),
    "an empty input": ("embed", {"inputs": [[]], "remaining_ms": 500.0}),
    "a negative token": ("embed", {"inputs": [[-3]], "remaining_ms": 500.0}),
    "negative dimensions": ("embed", {"inputs": [[5]], "dimensions": -3, "remaining_ms": 500.0}),
    "no dimensions": ("embed", {"inputs": [[5]], "dimensions": 0, "remaining_ms": 500.0}),
    "too many inputs": ("embed", {"inputs": [[5]] * 3_000, "remaining_ms": 500.0}),
    "endless time": ("embed", {"inputs": [[5]], "remaining_ms": 1e300}),
    "no query": ("rerank", {"query": "", "documents": ["a"], "remaining_ms": 500.0}),
    "no documents": ("rerank", {"query": "q", "documents": [], "remaining_ms": 500.0}),
    "too many documents": ("rerank", {"query": "q", "documents": ["a"] * 1_001, "remaining_ms": 500.0}),
    "a document that is none": ("rerank", {"query": "q", "documents": [[5]], "remaining_ms": 500.0}),
    "nothing to tokenize": ("tokenize", {}),
    "two texts": ("tokenize", {"text": "x", "messages": [{"role": "user", "content": "x"}]}),
    "a message without words": ("tokenize", {"messages": [{"role": "user"}]}),
    "half a token": ("detokenize", {"token_ids": b"123"}),
    "a token beyond the vocabulary": ("detokenize", {"token_ids": b"\xff" * 8}),
    "tokens in no form": ("detokenize", {"token_ids": [1, 2]}),
    "a drop of nothing": ("control", {"op": "drop"}),
    "a drop of no id": ("control", {"op": "drop", "request_id": "x" * 100_000, "attempt": 1}),
    "a drop beyond all": ("control", {"op": "drop", "request_id": "default:x", "attempt": -(1 << 63)}),
    "a model of no name": ("control", {"op": "load", "model": "nowhere", "served_name": ""}),
    "a model of too long a name": ("control", {"op": "load", "model": "nowhere", "served_name": "x" * 5_000}),
    "a model at no place": ("control", {"op": "load", "model": "a\0b"}),
}


@pytest.mark.parametrize("what", HOSTILE_ASKS)
async def test_whatever_else_is_asked_wrongly_is_refused_with_an_answer(
    system: System, peer: RawRouter, what: str
) -> None:
    service, body = HOSTILE_ASKS[what]
    answer = await peer.call(service, body)
    assert answer["error"]["code"] in ("invalid_request", "unsupported"), answer
    check_idle(system, WORKER)


async def test_arguments_of_a_template_that_nest_too_deeply_are_refused(system: System, peer: RawRouter) -> None:
    deep = msgspec.msgpack.encode({"text": "x"})[:-3] + b""
    deep = b"\x82\xa4text\xa1x\xb4chat_template_kwargs" + b"\x81\xa1a" * 400 + b"\xc0"
    answer = await peer.call("tokenize", deep)
    assert answer["error"]["code"] == "invalid_request"
    check_idle(system, WORKER)


async def test_forged_cards_and_runs_do_not_end_a_worker(system: System, peer: RawRouter) -> None:
    """The cards have its name with another model and a later epoch, or are on its own subject with other names."""
    count = times(10, 50)
    later = f"{int(peer.card['epoch'].partition('-')[0]) + 10**9}-ffffffff"
    for number in range(count):
        forged = peer.card | {"epoch": later, "model": f"other-{number}"}
        await peer.nats.publish(f"{PREFIX}.card.other-{number}.{WORKER}", msgspec.msgpack.encode(forged))
        await peer.nats.publish(peer.card_subject, msgspec.msgpack.encode(forged))
        stranger = peer.card | {"worker_id": "x", "epoch": later}
        await peer.nats.publish(peer.card_subject, msgspec.msgpack.encode(stranger))
        await peer.nats.publish(peer.card_subject, secrets.token_bytes(number))
        answer = await peer.call("run", peer.run(epoch=later))
        assert answer["accepted"] is False
    await peer.must_serve()
    check_idle(system, WORKER)


VALUES: tuple[Any, ...] = (
    None, True, -5, 0, 1, 7, 1 << 31, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1, 0.0, -0.5, 1e308, math.nan, math.inf,
    "", "x", "x" * 5_000, "a.b", "a b", "default:", ":", "=FF:x", "default:x\r\nPUB a 0\r\n", "_INBOX.*", "\0",
    "é" * 300, b"", b"\0" * 7, b"\xff" * 64, [], [[]], [-1], [1 << 40], [""], ["x" * 2_000], {}, {"a": {"b": [1]}},
    {-1: 2.0},
)  # fmt: skip
"""Values that replace a field's own."""


def mutated(rng: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the message with some fields changed, removed or added."""
    changed = dict(body)
    for _ in range(rng.randint(1, 2)):
        name = rng.choice([*changed, "unknown"]) if changed else "unknown"
        if rng.random() < 0.1:
            changed.pop(name, None)
        elif isinstance(changed.get(name), dict) and changed[name] and rng.random() < 0.8:
            changed[name] = mutated(rng, changed[name])
        else:
            changed[name] = rng.choice(VALUES)
    return changed


def hostile_message(rng: random.Random, peer: RawRouter) -> tuple[str, bytes]:
    """Returns a worker's service and a message for it that is almost valid."""
    params = dict(rng.sample(sorted(HOSTILE_PARAMS.items()), rng.randint(0, 2)))
    right: dict[str, dict[str, Any]] = {
        "run": peer.run(params={"max_tokens": 2, "temperature": 0.5, "stop": ["q"]} | params),
        "control": {"op": rng.choice(("drop", "clear_cache", "load")), "request_id": "default:x", "attempt": 1},
        "tokenize": {"text": "some words", "chat_template_kwargs": {"a": 1}},
        "detokenize": {"token_ids": struct.pack("<2I", 5, 6)},
        "embed": {"inputs": [[5, 6], "a text"], "dimensions": 8, "normalize": True, "remaining_ms": 400.0},
        "rerank": {"query": "q", "documents": ["a", "b"], "remaining_ms": 400.0},
        "snapshot": {},
        "tokenizer": {},
        "gone.default:x": {},
    }
    service = rng.choice(list(right))
    if rng.random() < 0.1:
        return service, rng.randbytes(rng.randint(0, 300))
    payload = msgspec.msgpack.encode(mutated(rng, right[service]))
    if rng.random() < 0.1:
        payload = payload[: rng.randrange(len(payload) + 1)]
    return service, payload


def is_order(payload: bytes) -> bool:
    """Returns whether a message is an operator's command that a worker must carry out."""
    return any(order in payload for order in (b"drain", b"unload"))


@pytest.mark.parametrize("seed", range(times(1, 10)))
async def test_hostile_messages_to_every_subject_of_a_worker_are_answered_and_disturb_nobody(
    system: System, peer: RawRouter, seed: int
) -> None:
    rng = random.Random(seed)
    expected = 0
    for number in range(times(300, 2_000)):
        service, payload = hostile_message(rng, peer)
        if is_order(payload):
            continue
        reply = f"{peer.inbox}.{service.partition('.')[0]}.{number}"
        await peer.nats.publish(f"{peer.subject}.{service}", payload, reply=reply)
        expected += service not in ("gone.default:x", "snapshot", "tokenizer")
        if number % 50 == 49:
            await peer.must_serve()
    answered = {"run", "control", "tokenize", "detokenize", "embed", "rerank"}
    async with asyncio.timeout(20):
        while sum(subject.split(".")[2] in answered for subject in peer.replies) < expected:
            await asyncio.sleep(0.02)
    await peer.must_serve()
    check_idle(system, WORKER)


async def test_an_id_that_is_used_again_while_it_is_refused_is_free(peer: RawRouter) -> None:
    """A refused run must leave nothing behind."""
    again = f"default:{secrets.token_hex(8)}"
    refused = await peer.call("run", peer.run(request_id=again, params={"max_tokens": -5}))
    assert refused["accepted"] is False
    accepted = await peer.call("run", peer.run(request_id=again, token_ids=struct.pack("<2I", 5, 6)))
    assert accepted["accepted"] is True
