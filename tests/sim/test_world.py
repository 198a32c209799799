"""Single faults in the simulated world, and what a client sees of each, with the time to the second."""

from collections.abc import Iterator

import pytest

from tests.sim.clients import ClientProcess
from tests.sim.network import Broker
from tests.sim.system import FrontendProcess, RouterProcess, kill
from tests.sim.world import World, world
from tokenbus.protocol.wire import errors, messages

LENGTH = messages.FinishReason.LENGTH


class System:
    def __init__(self, world: World, routers: int = 1, frontends: int = 1) -> None:
        self.world = world
        self.broker = Broker(world)
        self.frontends = [FrontendProcess(world, self.broker, f"w{number}") for number in range(frontends)]
        self.routers = [RouterProcess(world, self.broker, f"r{number}") for number in range(routers)]
        self.client = ClientProcess(world, self.broker, "c0")
        world.run(1.0)


@pytest.fixture
def one() -> Iterator[System]:
    with world(seed=1) as made:
        yield System(made)


def test_a_request_is_answered(one: System) -> None:
    one.client.ask(5)
    one.world.run(2.0)
    (asked,) = one.client.asked
    asked.check()
    assert asked.terminal is not None
    assert asked.terminal.finish_reason is LENGTH


def test_a_client_that_is_killed_frees_its_lane_within_three_seconds(one: System) -> None:
    one.client.ask(1_000)
    one.world.run(1.0)
    assert one.frontends[0].engine is not None
    assert one.frontends[0].engine.load().running == 1
    kill(one.client.process, one.client.bus)
    one.world.run(3.0)
    assert one.frontends[0].engine.load().running == 0


def test_a_client_that_reconnects_in_time_keeps_its_whole_stream(one: System) -> None:
    one.client.ask(60)
    one.world.run(1.0)
    assert one.client.bus.link is not None
    one.broker.cut(one.client.bus.link)
    one.world.run(10.0)
    (asked,) = one.client.asked
    asked.check()
    assert asked.terminal is not None
    assert asked.terminal.finish_reason is LENGTH


def test_a_quick_restart_of_the_broker_ends_no_stream(one: System) -> None:
    one.client.ask(60)
    one.world.run(1.0)
    one.broker.die()
    one.world.run(0.3)
    one.broker.restart()
    one.world.run(12.0)
    (asked,) = one.client.asked
    asked.check()
    assert asked.terminal is not None
    assert asked.terminal.finish_reason is LENGTH


def test_a_broker_that_was_away_for_long_ends_no_stream_of_the_library(one: System) -> None:
    one.client.ask(60)
    one.world.run(1.0)
    one.broker.die()
    one.world.run(10.0)
    one.broker.restart()
    one.world.run(40.0)
    (asked,) = one.client.asked
    asked.check()
    assert asked.is_whole, asked


def test_a_broker_that_stays_away_ends_every_stream_in_an_error(one: System) -> None:
    one.client.ask(600)
    one.world.run(1.0)
    one.broker.die()
    one.world.run(40.0)
    (asked,) = one.client.asked
    asked.check()
    assert asked.terminal is not None
    assert asked.terminal.error
    assert asked.terminal.error.code is errors.Code.WORKER_LOST
    one.broker.restart()
    one.world.run(5.0)
    one.client.ask(5)
    one.world.run(5.0)
    assert one.client.asked[1].terminal is not None
    assert one.client.asked[1].terminal.finish_reason is LENGTH


@pytest.mark.parametrize("seconds", [0.5, 3.0, 40.0])
def test_a_paused_frontend_ends_no_stream_and_serves_again(one: System, seconds: float) -> None:
    one.client.ask(60)
    one.world.run(1.0)
    one.frontends[0].process.is_paused = True
    one.world.run(seconds)
    one.frontends[0].process.is_paused = False
    one.world.run(20.0)
    (asked,) = one.client.asked
    asked.check()
    assert asked.is_whole, asked
    one.client.ask(5)
    one.world.run(5.0)
    assert one.client.asked[1].terminal is not None
    assert one.client.asked[1].terminal.finish_reason is LENGTH


def test_a_killed_frontend_that_comes_back_goes_on_with_its_streams(one: System) -> None:
    """If there is no other worker, a router waits for one."""
    one.client.ask(30)
    one.world.run(1.0)
    dead = one.frontends[0]
    kill(dead.process, dead.bus, dead.incoming)
    one.world.run(20.0)
    assert one.client.open()
    FrontendProcess(one.world, one.broker, dead.name)
    one.world.run(5.0)
    (asked,) = one.client.asked
    asked.check()
    assert asked.is_whole, asked


def test_a_stream_that_no_worker_continues_within_a_minute_is_lost(one: System) -> None:
    one.client.ask(30, resume=False)
    one.world.run(1.0)
    dead = one.frontends[0]
    kill(dead.process, dead.bus, dead.incoming)
    one.world.run(59.5)
    assert one.client.open()
    one.world.run(4.5)
    (asked,) = one.client.asked
    asked.check()
    assert asked.terminal is not None
    assert asked.terminal.error
    assert asked.terminal.error.code is errors.Code.WORKER_LOST


@pytest.mark.parametrize("dead_s", [0.5, 1.5, 2.05, 10.0])
def test_a_cancel_that_comes_while_the_worker_is_dead_is_not_lost(dead_s: float) -> None:
    """No process can act on it at once, but the stream does not go on elsewhere."""
    with world(seed=4) as made:
        system = System(made)
        system.client.ask(600)
        made.run(1.0)
        dead = system.frontends[0]
        kill(dead.process, dead.bus, dead.incoming)
        made.run(dead_s)
        system.client.cancel(0)
        FrontendProcess(made, system.broker, "another")
        made.run(15.0)
        (asked,) = system.client.asked
        asked.check()
        assert asked.terminal is not None
        assert asked.terminal.finish_reason is messages.FinishReason.CANCELLED
        assert asked.terminal.offset < 600


def test_a_request_without_tokens_of_a_killed_frontend_moves_to_another() -> None:
    with world(seed=2) as made:
        system = System(made, frontends=2)
        for frontend in system.frontends:
            frontend.engine._token_s = 3.0
        system.client.ask(3)
        made.run(0.5)
        (busy,) = [frontend for frontend in system.frontends if frontend.engine.load().running]
        kill(busy.process, busy.bus)
        made.run(20.0)
        (asked,) = system.client.asked
        asked.check()
        assert asked.terminal is not None
        assert asked.terminal.finish_reason is LENGTH
        assert asked.terminal.attempt == 2


@pytest.mark.parametrize("seconds", [0.5, 3.0, 40.0])
def test_a_paused_router_keeps_no_client_waiting_for_ever(seconds: float) -> None:
    with world(seed=3) as made:
        system = System(made, routers=2)
        for _ in range(6):
            system.client.ask(20)
        made.run(0.01)
        system.routers[0].process.is_paused = True
        for _ in range(6):
            system.client.ask(5)
        made.run(seconds)
        system.routers[0].process.is_paused = False
        made.run(60.0)
        for asked in system.client.asked:
            asked.check()
            assert asked.terminal is not None, asked
