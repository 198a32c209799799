"""Clients' cancels and resyncs reach the worker that has the stream: through any router, or directly when none is sure
to pass them on. Otherwise no worker hears those of other workers' streams."""

import pytest
from nats.aio.msg import Msg

from tests.sim.stage import NAMES
from tests.sim.system import MODEL, RouterProcess, kill
from tests.sim.test_handover import Strike, System, system
from tokenbus.protocol.wire import subjects

__all__ = ["system"]


class Raw:
    """A client that sends bare cancels and resyncs of the only open stream, and keeps the answers."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._bus = system.client.bus
        self.answers: list[bytes] = []
        self._inbox = self._bus.new_inbox()
        system.client.process.do(self._bus.subscribe(f"{self._inbox}.*", self._take))
        self._number = 0
        (stream,) = system.worker.frontend.streams
        self._request_id = subjects.key_to_request_id(stream.key)

    def _take(self, message: Msg) -> None:
        self.answers.append(message.data)

    def send(self, subject: str, payload: bytes = b"") -> None:
        self._number += 1
        self._system.client.process.call(self._bus.publish, subject, payload, f"{self._inbox}.{self._number}")

    def cancel(self, model: str | None = MODEL) -> None:
        self.send(NAMES.cancel(self._request_id, model=model))

    def resync(self, model: str | None = MODEL) -> None:
        self.send(NAMES.resync(self._request_id, model=model), b'{"offset": 0}')


def hears_all(system: System) -> bool:
    """Whether the worker hears every client of its model."""
    system.world.run(0.01)
    return system.worker.frontend._endpoints.clients.is_listening


def kill_first(system: System) -> None:
    system.kill_router()


def freeze_first(system: System) -> None:
    system.router.process.is_paused = True


def do_nothing(system: System) -> None:
    """Leaves both routers alone."""


@pytest.mark.parametrize("strike", [do_nothing, kill_first, freeze_first])
@pytest.mark.parametrize("model", [None, MODEL])
def test_a_cancel_ends_a_stream_at_once_even_if_its_guardian_is_gone_or_frozen(
    system: System, strike: Strike, model: str | None
) -> None:
    system.ask(200)
    raw = Raw(system)
    strike(system)
    if strike is freeze_first:
        system.broker.pick = lambda members: members[-1]
    raw.cancel(model)
    system.world.run(0.15)
    assert raw.answers == [b'{"cancelled":true}']
    assert not system.client.open()


@pytest.mark.parametrize("stands_still_s", [0.5, 1.2, 1.4])
def test_a_cancel_ends_the_stream_of_a_worker_that_stands_still_though_its_only_router_has_answered(
    system: System, stands_still_s: float
) -> None:
    other = system.routers.pop()
    kill(other.process, other.bus)
    system.ask(200)
    raw = Raw(system)
    system.world.run(2.5)  # before, a router takes no silence for one
    system.worker.process.is_paused = True
    system.world.run(stands_still_s)
    raw.cancel()
    system.world.run(0.01)
    system.worker.process.is_paused = False
    system.world.run(0.25)
    assert raw.answers == [b'{"cancelled":true}']
    assert not system.client.open()


@pytest.mark.parametrize("strike", [do_nothing, kill_first, freeze_first])
def test_a_resync_is_answered_once_and_at_once_even_if_the_guardian_is_gone_or_frozen(
    system: System, strike: Strike
) -> None:
    system.ask(20)
    raw = Raw(system)
    strike(system)
    raw.resync()
    system.world.run(0.05)
    assert raw.answers == [b'{"found":true}']
    assert not hears_all(system)


@pytest.mark.parametrize("strike", [do_nothing, kill_first, freeze_first])
def test_a_stream_that_has_ended_is_found_for_a_minute(system: System, strike: Strike) -> None:
    system.ask(4)
    raw = Raw(system)
    system.world.run(1.0)
    strike(system)
    system.world.run(30.0)
    raw.resync()
    system.world.run(0.05)
    assert raw.answers == [b'{"found":true}']


def test_a_worker_hears_no_clients_while_its_streams_are_guarded(system: System) -> None:
    assert not hears_all(system)
    system.ask(40)
    for _ in range(10):
        system.world.run(0.5)
        assert not hears_all(system)
    system.finish()


@pytest.mark.parametrize("ended", [False, True])
def test_without_any_router_a_worker_hears_clients_itself_until_a_router_is_back(system: System, ended: bool) -> None:
    system.ask(4 if ended else 300)
    raw = Raw(system)
    system.world.run(1.0)
    for router in system.routers:
        kill(router.process, router.bus)
    system.routers.clear()
    system.world.run(1.3)
    assert hears_all(system)
    raw.resync()
    system.world.run(0.05)
    assert raw.answers == [b'{"found":true}']
    if not ended:
        raw.cancel()
        system.world.run(0.2)
        assert raw.answers[1:] == [b'{"cancelled":true}']
    system.routers.append(RouterProcess(system.world, system.broker, "r9"))
    system.world.run(61.0 + 6.0)
    assert not hears_all(system)


def test_a_worker_notices_with_its_next_event_that_no_router_is_left(system: System) -> None:
    system.ask(200)
    raw = Raw(system)
    for router in system.routers:
        kill(router.process, router.bus)
    system.routers.clear()
    system.world.run(0.25)
    raw.cancel()
    system.world.run(0.15)
    assert raw.answers == [b'{"cancelled":true}']


def test_a_new_guardian_ends_the_hearing(system: System) -> None:
    system.ask(200)
    system.kill_router()
    system.world.run(1.3)
    assert hears_all(system)
    system.world.run(7.0)
    assert system.named == ["r1"]
    assert not hears_all(system)


def test_only_routers_that_freeze_are_noticed_within_two_checks(system: System) -> None:
    system.ask(200)
    system.world.run(2.0)
    for router in system.routers:
        router.process.is_paused = True
    raw = Raw(system)
    system.world.run(2.3)
    assert hears_all(system)
    raw.cancel()
    system.world.run(0.2)
    assert raw.answers == [b'{"cancelled":true}']
