"""Rolling everything, the only worker and the only router included, cuts no stream, however fast it is done.

Workers are drained without grace and replaced, and routers are stopped and replaced, while others are paused for a
moment or lose their connections. No process dies before it has stopped in order, so every stream that has begun reaches
its end. TOKENBUS_ROLLS sets how many histories are played."""

import os
import random
from collections import Counter

import pytest

from tests.sim.clients import SimpleClient, SimplyAsked
from tests.sim.network import Broker
from tests.sim.system import FrontendProcess, RouterProcess
from tests.sim.world import Process, World, world
from tokenbus.protocol.wire import errors

NUM_ROLLS = int(os.environ.get("TOKENBUS_ROLLS", "30"))
NUM_QUICK = 3
"""`make test` plays this many of each kind, and `make test-long` the others."""
SEEDS = [pytest.param(seed, marks=[pytest.mark.long] if seed >= NUM_QUICK else []) for seed in range(NUM_ROLLS)]
REFUSALS = (errors.Code.NO_WORKER, errors.Code.OVERLOADED, errors.Code.SHUTTING_DOWN)
"""The ways in which requests end that no worker has accepted."""


class Roll:
    """A few workers and routers, all of which are replaced again and again, and a simple client."""

    def __init__(self, world: World, rng: random.Random, slowest_s: float, *, loses_connections: bool) -> None:
        self.world = world
        self.rng = rng
        self.broker = Broker(world)
        self.broker.slowest_s = slowest_s
        self.loses_connections = loses_connections
        self.born = 0
        self.max_num_seqs = rng.choice([1, 2, 4])
        self.workers = [self.new_worker() for _ in range(rng.randint(1, 3))]
        self.routers = [self.new_router() for _ in range(rng.randint(1, 2))]
        self.client = SimpleClient(world, self.broker, "s0")
        self.left: list[FrontendProcess | RouterProcess] = []
        self.done: list[str] = []
        self.twice: set[str] = set()
        """The requests that two engines were computing at the same time."""
        self.broker.before_routing = lambda sender, subject, payload: self.look()
        world.run(1.5)

    def __repr__(self) -> str:
        return f"<Roll {self.done}>"

    def new_worker(self) -> FrontendProcess:
        self.born += 1
        return FrontendProcess(self.world, self.broker, f"w{self.born}", self.max_num_seqs)

    def new_router(self) -> RouterProcess:
        self.born += 1
        return RouterProcess(self.world, self.broker, f"r{self.born}")

    def play(self) -> None:
        acts = [self.ask] * 5 + [self.replace_worker] * 2 + [self.replace_router, self.pause_router, self.pause_worker]
        if self.loses_connections:
            acts += [self.cut_router, self.cut_worker, self.take_router_away]
        for _ in range(self.rng.randint(6, 18)):
            act = self.rng.choice(acts)
            self.done.append(f"{self.world.now:.3f} {act.__name__}")
            act()
            self.world.run(self.rng.choice([0.0, 0.01, 0.05, 0.3, 1.0, 2.0]))
        self.world.run_until(lambda: not self.client.open())
        self.world.run(17.0)

    def look(self) -> None:
        """Notes requests that run in two engines."""
        several = {*self.workers, *(one for one in self.left if isinstance(one, FrontendProcess))}
        engines = [one.engine for one in several if one.engine is not None]
        running = Counter(key for engine in engines for key in engine.running)
        self.twice |= {key for key, count in running.items() if count > 1}

    def ask(self) -> None:
        if len(self.client.open()) < 8:
            seed, is_streamed = self.rng.randrange(1_000), self.rng.random() < 0.8
            self.client.ask(self.rng.choice([1, 10, 30, 60, 150]), stream=is_streamed, seed=seed)

    def replace_worker(self) -> None:
        """Drains a worker, and starts its successor before or after that."""
        number = self.rng.randrange(len(self.workers))
        leaving = self.workers[number]
        self.left.append(leaving)
        if self.rng.random() < 0.5:
            self.workers[number] = self.new_worker()
            self.world.run(self.rng.choice([0.3, 1.0]))
            leaving.drain()
        else:
            leaving.drain()
            self.world.run(self.rng.choice([0.0, 0.5, 3.0]))
            self.workers[number] = self.new_worker()

    def replace_router(self) -> None:
        number = self.rng.randrange(len(self.routers))
        leaving, self.routers[number] = self.routers[number], self.new_router()
        self.world.run(1.0 + 4 * self.broker.slowest_s)
        leaving.leave()
        self.left.append(leaving)

    def pause_router(self) -> None:
        self.pause(self.rng.choice(self.routers).process, self.rng.choice([0.3, 0.9, 1.4]))

    def pause_worker(self) -> None:
        self.pause(self.rng.choice(self.workers).process, self.rng.choice([0.1, 0.3, 0.6]))

    def pause(self, process: Process, seconds: float) -> None:
        process.is_paused = True
        self.world.at(self.world.now + seconds, lambda: self.resume(process))

    def resume(self, process: Process) -> None:
        process.is_paused = False

    def cut_router(self) -> None:
        self.rng.choice(self.routers).bus.cut(lingers=self.rng.random() < 0.5)

    def cut_worker(self) -> None:
        """Breaks a worker's connection for incoming messages. What clients get leaves over the other connection."""
        self.rng.choice(self.workers).incoming.cut(lingers=self.rng.random() < 0.5)

    def take_router_away(self) -> None:
        router = self.rng.choice(self.routers)
        router.bus.cut(lingers=True)
        self.pause(router.process, self.rng.choice([0.5, 1.2, 2.5, 6.0]))

    def check(self) -> None:
        for process in self.world.processes:
            assert process.faults == [], process
        for heard in self.client.heard.values():
            heard.check(ends_are_known=not self.broker.has_lost_messages)
        for asked in self.client.asked:
            asked.check()
            assert asked.is_whole or self.was_refused(asked), asked
        for router in self.routers:
            assert len(router.router.flights) == 0, router.router
            router.router.flights.check_integrity()
        for worker in self.workers:
            assert worker.engine is not None
            assert worker.engine.load().running == 0, worker.name
        assert not [one.name for one in self.left if one.process.is_alive]
        assert not self.twice

    def was_refused(self, asked: SimplyAsked) -> bool:
        """Whether a request has not begun. If connections break, it may have been lost, or its end."""
        if asked.text:
            return False
        error = asked.terminal and asked.terminal.error
        return self.loses_connections or (isinstance(error, errors.Error) and error.code in REFUSALS)


def play(seed: int, slowest_s: float, *, loses_connections: bool = False) -> None:
    with world(seed) as made:
        roll = Roll(made, random.Random(seed), slowest_s, loses_connections=loses_connections)
        try:
            roll.play()
            roll.check()
        except AssertionError as error:
            error.add_note(repr(roll))
            raise


@pytest.mark.parametrize("seed", SEEDS)
def test_rolling_everything_cuts_no_stream(seed: int) -> None:
    play(seed, 0.002)


@pytest.mark.parametrize("seed", SEEDS)
def test_rolling_everything_over_a_slow_network_cuts_no_stream(seed: int) -> None:
    play(seed, 0.05)


@pytest.mark.parametrize("seed", SEEDS)
def test_rolling_everything_while_connections_break_cuts_no_stream(seed: int) -> None:
    play(seed, 0.002, loses_connections=True)
