"""Hints about sessions go to every worker of the model that knows them, and their replies tell nothing."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import pytest

from tests.router.builders import card, fleet_of
from tests.support.refusals import refusal_of
from tokenbus.protocol.wire import codec, errors, internal, messages
from tokenbus.protocol.wire.subjects import ModelAddress
from tokenbus.router.requests.calls.cache_hints import CacheHints
from tokenbus.router.requests.calls.client_calls import Call
from tokenbus.router.telemetry.metrics import RouterMetrics


class Told(NamedTuple):
    worker_id: str
    service: str
    hint: internal.Control


class Testbed:
    __test__ = False

    def __init__(self) -> None:
        self.told: list[Told] = []
        able = codec.replace(card("new"), features=[*card("new").features, "cache_control"])
        fleet = fleet_of(able, card("old"))
        self.hints = CacheHints(fleet, self, RouterMetrics())  # type: ignore[arg-type]

    def publish(self, card: messages.Card, service: str, message: msgspec.Struct) -> None:
        assert isinstance(message, internal.Control)
        self.told.append(Told(card.worker_id, service, message))

    def take(self, ttl_ms: float, model: str = "demo", tenant: str = "acme") -> messages.CacheReply:
        control = messages.CacheControl(ttl_ms=ttl_ms)
        body = messages.CacheRequest(id="r", session_id="s", cache_control=control)
        address, work = ModelAddress(model, tenant), self.hints.check(body)
        call = Call("r", address, body, work, "_INBOX.a", codec.Encoding.JSON, 0.0, 0)
        return asyncio.run(self.hints.answer(call))


@pytest.mark.parametrize("ttl_ms", [0.0, 60_000.0])
def test_workers_with_the_feature_are_told_for_the_tenant_that_asks(ttl_ms: float) -> None:
    bed = Testbed()
    assert bed.take(ttl_ms) == messages.CacheReply(id="r", model="demo")
    hint = internal.Control(op="retain", tenant="acme", session_id="s", ttl_ms=ttl_ms)
    assert bed.told == [Told("new", "control", hint)]


def test_a_worker_that_can_not_be_told_is_left_out() -> None:
    bed = Testbed()
    raising: Callable[..., None] = lambda *_: (_ for _ in ()).throw(ConnectionError())  # noqa: E731
    bed.publish = raising  # type: ignore[method-assign]
    assert bed.take(0.0).error is msgspec.UNSET


def test_a_model_that_nobody_serves_is_an_error() -> None:
    assert refusal_of(lambda: Testbed().take(0.0, model="other")).code in (
        errors.Code.NO_WORKER,
        errors.Code.MODEL_NOT_FOUND,
    )
