"""A worker that loses its connection either goes on where it was, or was given up: never both, whoever is faster.

The connection is down for about as long as routers need to learn of it from the broker. TOKENBUS_DISCONNECTS sets how
many histories are played."""

import os
import random

import pytest

from tests.sim.clients import SimpleClient
from tests.sim.network import Broker
from tests.sim.system import FrontendProcess, RouterProcess
from tests.sim.world import World, world
from tokenbus.protocol.wire import errors

NUM_HISTORIES = int(os.environ.get("TOKENBUS_DISCONNECTS", "60"))
NUM_QUICK = 5
"""`make test` plays this many, and `make test-long` the others."""
SEEDS = [pytest.param(seed, marks=[pytest.mark.long] if seed >= NUM_QUICK else []) for seed in range(NUM_HISTORIES)]
_TOKEN_S = 0.05


class Fleet:
    """Two workers, routers, and a simple client."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world = world
        self.rng = rng
        self.broker = Broker(world)
        self.broker.slowest_s = rng.choice([0.002, 0.02])
        self.workers = [FrontendProcess(world, self.broker, f"w{number}", 32, _TOKEN_S) for number in range(2)]
        self.routers = [RouterProcess(world, self.broker, f"r{number}") for number in range(rng.randint(1, 2))]
        self.client = SimpleClient(world, self.broker, "s0")
        self.num_resumed = self.num_given_up = 0
        world.run(1.5)

    def play(self) -> None:
        for down_s in (0.02, 0.8, *(self.rng.uniform(0.1, 0.5) for _ in range(10))):
            for _ in range(3):
                self.client.ask(self.rng.choice([60, 150]), seed=self.rng.randrange(1_000))
            self.world.run(self.rng.uniform(1.0, 2.0))
            self.disconnect(self.rng.choice(self.workers), down_s)
            self.world.run(3.0)
        self.world.run_until(lambda: not self.client.open())
        self.world.run(5.0)

    def disconnect(self, worker: FrontendProcess, down_s: float) -> None:
        epoch = worker.frontend.announcer.epoch
        worker.bus.reconnect_s = down_s
        worker.bus.cut(lingers=True)  # what it had written still arrives
        self.world.run(1.5)
        if worker.frontend.announcer.epoch == epoch:
            self.num_resumed += 1
        else:
            self.num_given_up += 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_worker_goes_on_or_was_given_up_and_no_text_comes_twice(seed: int) -> None:
    with world(seed) as made:
        fleet = Fleet(made, random.Random(seed))
        fleet.play()
        for heard in fleet.client.heard.values():
            heard.check()
        for asked in fleet.client.asked:
            asked.check()
            error = asked.terminal and asked.terminal.error
            assert asked.is_whole or (isinstance(error, errors.Error) and error.code is errors.Code.WORKER_LOST), asked
        assert fleet.num_resumed
        assert fleet.num_given_up
        for router in fleet.routers:
            assert len(router.router.flights) == 0, router.router
