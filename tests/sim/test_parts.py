"""Routers that serve a part of the models: requests, cancels and guardianship stay with the routers of their part, and
a listing by any of them has all models."""

from collections.abc import Iterator

import pytest

from tests.sim.clients import SimpleClient
from tests.sim.network import Broker
from tests.sim.stage import NAMES, Peer
from tests.sim.system import MODEL, FrontendProcess, RouterProcess, kill
from tests.sim.world import World, world
from tokenbus.protocol.wire import codec, messages, subjects

_replies = codec.Decoder(messages.ModelsReply)


class Parts:
    """Two routers for the model of a worker, and one for other models, which is the first of any queue group."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.broker = Broker(world)
        self.other = RouterProcess(world, self.broker, "other", ("o*",))
        self.own = [RouterProcess(world, self.broker, f"own{number}", ("s*",)) for number in range(2)]
        self.broker.pick = lambda members: members[0]
        self.worker = FrontendProcess(world, self.broker, "w0")
        self.client = SimpleClient(world, self.broker, "s0")
        self.peer = Peer(world, self.broker)
        world.run(1.0)

    def ask(self, tokens: int) -> None:
        self.client.ask(tokens, seed=1)
        self.world.run(0.5)

    def listed(self, **fields: object) -> messages.ModelsReply:
        asked = messages.ModelsRequest(**fields)  # type: ignore[arg-type]
        answer = self.peer.ask(NAMES.models_for(), codec.encode(asked, codec.Encoding.JSON))
        assert answer is not None
        return _replies.decode(answer, codec.Encoding.JSON)


@pytest.fixture
def parts() -> Iterator[Parts]:
    with world(seed=5) as made:
        yield Parts(made)


def test_a_request_is_placed_by_a_router_of_its_part(parts: Parts) -> None:
    parts.ask(5)
    parts.world.run(2.0)
    assert parts.client.asked[0].is_whole
    assert list(parts.other.router.fleet.models()) == []


def test_a_stream_gets_a_guardian_of_its_part_and_outlives_its_worker(parts: Parts) -> None:
    parts.ask(60)
    kill(parts.own[0].process, parts.own[0].bus)
    parts.world.run(2.0)
    (stream,) = parts.worker.frontend.streams
    assert stream.guardian == "own1"
    FrontendProcess(parts.world, parts.broker, "w1")
    kill(parts.worker.process, parts.worker.bus, parts.worker.incoming)
    parts.world.run(12.0)
    assert parts.client.asked[0].is_whole


@pytest.mark.parametrize("model", [None, MODEL])
def test_a_cancel_reaches_the_worker_through_the_routers_of_its_part(parts: Parts, model: str | None) -> None:
    parts.ask(200)
    (stream,) = parts.worker.frontend.streams
    request_id = subjects.key_to_request_id(stream.key)
    assert parts.peer.ask(NAMES.cancel(request_id, model=model), b"") == b'{"cancelled":true}'


@pytest.mark.parametrize("fields", [{}, {"limit": 0}, {"limit": 7}, {"model": MODEL}])
def test_a_router_of_another_part_lists_the_model_too(parts: Parts, fields: dict[str, object]) -> None:
    reply = parts.listed(**fields)
    assert [one.model for one in reply.models] == [MODEL]
    assert reply.summary
    assert (reply.summary.models, reply.summary.states) == (1, {"ready": 1})
    assert [card.worker_id for card in reply.cards] == ([] if fields.get("limit") == 0 else ["w0"])


def test_a_model_that_two_parts_have_is_counted_once_and_one_without_workers_not_at_all(parts: Parts) -> None:
    RouterProcess(parts.world, parts.broker, "both", ("o*", "s*"))
    parts.world.run(1.0)
    for name in ("s-gone", MODEL):
        parts.other.router._part.others[name] = None
    for _ in range(2):
        reply = parts.listed()
        assert [one.model for one in reply.models] == [MODEL]
        assert reply.summary
        assert (reply.summary.models, reply.summary.workers) == (1, 1)


def test_models_whose_routers_are_gone_are_left_out(parts: Parts) -> None:
    for router in parts.own:
        kill(router.process, router.bus)
    parts.world.run(0.1)
    assert parts.listed().models == parts.listed(limit=3).models == []
