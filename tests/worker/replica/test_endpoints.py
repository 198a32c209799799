"""Every message to a worker is answered or logged, and calls are limited, taken back and never left without a reply."""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from tests.sim.engine import TimedEngine
from tests.sim.stage import NAMES, Stage
from tests.sim.system import MODEL
from tests.sim.world import world
from tokenbus.protocol.wire import codec, internal
from tokenbus.protocol.wire.messages import Message

MOST = 256


@pytest.fixture
def stage() -> Iterator[Stage]:
    with world(seed=3) as made:
        yield Stage(made)


def subject(service: str) -> str:
    return NAMES.worker(MODEL, "w0", service)


def ask(stage: Stage, service: str, message: Message | bytes) -> dict[str, Any] | None:
    answer = stage.peer.ask(subject(service), message)
    return None if answer is None else msgspec.msgpack.decode(answer)


@pytest.mark.parametrize("service", ["run", "control", "tokenize", "detokenize", "embed", "rerank"])
@pytest.mark.parametrize("payload", [b"\xc1", b""], ids=["no message", "a message without fields"])
def test_a_message_that_is_not_valid_is_refused_in_the_reply_of_its_service(
    stage: Stage, service: str, payload: bytes
) -> None:
    reply = ask(stage, service, payload)
    assert reply is not None
    assert reply["error"]["code"] == "invalid_request"


@pytest.mark.parametrize("service", ["take", "abort", "snapshot"])
def test_a_message_that_is_not_valid_is_logged_where_there_is_no_reply_for_it(stage: Stage, service: str) -> None:
    with capture_logs() as lines:
        assert ask(stage, service, b"\xc1") is None
    refused = [line for line in lines if line["event"] == "message_refused"]
    assert {line["subject"] for line in refused} == {subject(service)}


def test_a_call_too_many_is_refused_at_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> list[int]:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(TimedEngine, "tokenize", never)
    inbox = stage.peer.bus.new_inbox()
    replies = stage.overhear(inbox, internal.TokenizeResult)
    payload = codec.encode(internal.Tokenize(text="x"))
    for _ in range(MOST + 1):
        stage.peer.publish(subject("tokenize"), payload, inbox)
    stage.world.run(0.5)
    assert [reply.error and reply.error.code for reply in replies] == ["overloaded"]


def test_an_error_that_is_a_bug_is_answered_too(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> list[int]:
        raise KeyError("a bug")

    monkeypatch.setattr(TimedEngine, "tokenize", fail)
    with capture_logs() as lines:
        reply = ask(stage, "tokenize", internal.Tokenize(text="x"))
    assert reply is not None
    assert reply["error"]["code"] == "internal"
    assert "request_failed" in [line["event"] for line in lines]


def test_a_call_that_is_taken_back_has_no_reply(stage: Stage) -> None:
    engine = stage.frontend.engine
    assert engine is not None
    engine.pooling_s = 1.0
    embed = internal.Embed(inputs=["x"], remaining_ms=5_000.0)
    inbox = stage.peer.bus.new_inbox()
    replies = stage.overhear(inbox, internal.EmbedResult)
    for call_id in ("c1", "c2"):
        stage.peer.publish(subject("embed"), codec.encode(codec.replace(embed, call_id=call_id)), inbox)
    stage.peer.publish(subject("abort"), codec.encode(internal.AbortCall(call_id="c1")))
    stage.world.run(0.5)
    assert engine.num_pooling == 1
    stage.world.run(1.0)
    assert [reply.error for reply in replies] == [None]
