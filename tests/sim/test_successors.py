"""Streams of a worker that dies, or stands still for good, never wait for its successor of the same name.

Supervisors start a worker again under its name, and its model may take a minute to load, may hang, or may never load.
Meanwhile the new process hears everything that is sent to the old one. In each history some other worker could continue
all streams. TOKENBUS_SUCCESSORS sets how many histories are played."""

import os
import random
from typing import Any, NamedTuple

import pytest

from tests.sim.clients import SimpleClient, SimplyAsked
from tests.sim.network import Broker
from tests.sim.system import MODEL, FrontendProcess, RouterProcess, kill
from tests.sim.world import World, world
from tokenbus.protocol.wire import errors, limits, messages
from tokenbus.protocol.wire.cards import WorkerRole

NUM_HISTORIES = int(os.environ.get("TOKENBUS_SUCCESSORS", "60"))
NUM_QUICK = 5
"""`make test` plays this many, and `make test-long` the others."""
SEEDS = [pytest.param(seed, marks=[pytest.mark.long] if seed >= NUM_QUICK else []) for seed in range(NUM_HISTORIES)]
LONGEST_PAUSE_S = 1.0
"""What a plain client may have to wait for the next text once a worker was killed."""
LONGEST_FROZEN_PAUSE_S = limits.WORKER_LOST_AFTER_S + 0.5
"""The same for a worker that stands still: its connection stays open, so that only its silence tells."""
_TOKEN_S = 0.1
_BETWEEN_S = 6.0
"""Time between two deaths: more within 32 tokens of a request would be blamed on it."""
_LOADS_S = (0.3, 1.0, 2.5, 10.0, 60.0, None)
"""What a model's load takes; None never ends."""


class Fleet:
    """A worker that always lives, others that die, routers, and a simple client."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world = world
        self.rng = rng
        self.broker = Broker(world)
        self.broker.slowest_s = rng.choice([0.002, 0.02])
        self.mortal = [self.new_worker(f"w{number}", 0.0) for number in range(rng.randint(1, 3))]
        self.immortal = self.new_worker("immortal", 0.0)
        self.routers = [RouterProcess(world, self.broker, f"r{number}") for number in range(rng.randint(1, 2))]
        self.client = SimpleClient(world, self.broker, "s0")
        self.done: list[str] = []
        self.has_frozen = False
        world.run(1.5)

    def __repr__(self) -> str:
        return f"<Fleet {self.done}>"

    def new_worker(self, name: str, load_s: float | None) -> FrontendProcess:
        return FrontendProcess(self.world, self.broker, name, 32, _TOKEN_S, load_s=load_s)

    def play(self) -> None:
        for _ in range(self.rng.randint(2, 5)):
            for _ in range(self.rng.randint(2, 6)):
                self.client.ask(self.rng.choice([20, 60, 150]), seed=self.rng.randrange(1_000))
                self.world.run(self.rng.choice([0.0, 0.05, 0.4]))
            self.world.run(self.rng.uniform(0.0, 2.0))
            self.lose(self.rng.randrange(len(self.mortal)))
            self.world.run(_BETWEEN_S)
        self.world.run_until(lambda: not self.client.open())
        self.world.run(5.0)

    def lose(self, number: int) -> None:
        """Kills a worker, or makes it stand still, and starts its successor of the same name before or after routers
        have given it up."""
        lost, load_s = self.mortal[number], self.rng.choice(_LOADS_S)
        after_s = self.rng.choice([0.0, 0.1, 0.7, 1.9, 3.0])
        is_frozen = self.rng.random() < 0.3
        self.done.append(f"{self.world.now:.3f} {lost.name} is_frozen={is_frozen} {after_s} {load_s}")
        if is_frozen:
            lost.process.is_paused = True
            self.has_frozen = True
            self.world.at(self.world.now + self.rng.choice([2.5, 5.0, 8.0]), lambda: self.wake(lost))
        else:
            kill(lost.process, lost.bus, lost.incoming)
        self.world.run(after_s)
        self.mortal[number] = self.new_worker(lost.name, load_s)

    def wake(self, process: FrontendProcess) -> None:
        process.process.is_paused = False

    def check(self) -> None:
        for heard in self.client.heard.values():
            heard.check()
        # the drop to a frozen worker may go unanswered until it times out
        frozen_s = LONGEST_FROZEN_PAUSE_S + limits.ACCEPT_TIMEOUT_S
        longest_s = frozen_s if self.has_frozen else LONGEST_PAUSE_S
        longest_s += 4 * self.broker.slowest_s + 2 * _TOKEN_S
        for asked in self.client.asked:
            asked.check()
            assert asked.is_whole or (self.has_frozen and _is_worker_lost(asked)), asked
            assert asked.longest_pause_s <= longest_s, (asked.longest_pause_s, asked)
        for router in self.routers:
            assert len(router.router.flights) == 0, router.router


def _is_worker_lost(asked: SimplyAsked) -> bool:
    """Whether a router could not know what a worker had sent that stood still in the middle of a step."""
    error = asked.terminal and asked.terminal.error
    return isinstance(error, errors.Error) and error.code is errors.Code.WORKER_LOST


@pytest.mark.parametrize("seed", SEEDS)
def test_no_stream_waits_for_the_successor_of_its_worker(seed: int) -> None:
    with world(seed) as made:
        fleet = Fleet(made, random.Random(seed))
        try:
            fleet.play()
            fleet.check()
        except AssertionError as error:
            error.add_note(repr(fleet))
            raise


class Change(NamedTuple):
    """How a worker comes back under its name."""

    model: str = MODEL
    role: WorkerRole = WorkerRole.BOTH
    config: dict[str, Any] = {}
    """What its engine says of itself that the others don't."""
    takes_streams: bool = False
    """Whether it can continue the streams of others, and may while these live."""


CHANGES = {
    "nothing": Change(takes_streams=True),
    "another version": Change(config={"engine_version": "2", "versions": {"sim": "2"}}, takes_streams=True),
    "another role that takes answers": Change(role=WorkerRole.DECODE, takes_streams=True),
    "another role that takes none": Change(role=WorkerRole.PREFILL),
    "another model": Change(model="other"),
    "other weights": Change(config={"fingerprint": "1"}),
}


@pytest.mark.parametrize("load_s", [0.0, 0.15, 2.0])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_successor_that_has_changed_delays_no_stream_and_takes_only_those_that_it_can(
    change: Change, load_s: float
) -> None:
    with world(1) as made:
        broker = Broker(made)
        first, second, _third = (FrontendProcess(made, broker, name, 32, _TOKEN_S) for name in ("w0", "w1", "w2"))
        routers = [RouterProcess(made, broker, name) for name in ("r0", "r1")]
        client = SimpleClient(made, broker, "s0")
        made.run(2.0)
        for seed in range(12):
            client.ask(100, seed=seed)
        made.run(1.0)
        assert first.engine
        assert first.engine.running
        kill(first.process, first.bus, first.incoming)
        FrontendProcess(
            made, broker, "w0", 32, _TOKEN_S, load_s=load_s, model=change.model, role=change.role, config=change.config
        )
        made.run(4.0)
        kill(second.process, second.bus, second.incoming)
        made.run_until(lambda: not client.open())
        made.run(2.0)
        finished_by = set()
        for asked in client.asked:
            asked.check()
            assert asked.is_whole, asked
            assert asked.longest_pause_s <= LONGEST_PAUSE_S, (asked.longest_pause_s, asked)
            assert asked.terminal
            finished_by.add(asked.terminal.worker_id)
        assert finished_by == ({"w0", "w2"} if change.takes_streams else {"w2"})
        assert not any(len(router.router.flights) for router in routers)


def test_routers_see_that_the_successor_of_a_lost_worker_loads() -> None:
    with world(0) as made:
        broker = Broker(made)
        first, _other = (FrontendProcess(made, broker, name, 32, _TOKEN_S) for name in ("w0", "w1"))
        router = RouterProcess(made, broker, "r0")
        made.run(2.0)
        kill(first.process, first.bus, first.incoming)
        made.run(6.0)  # an idle worker is lost by its silence

        def lost() -> list[tuple[str, bool]]:
            workers = router.router.fleet.lost.all(made.now)
            return [(worker.card.worker_id, worker.has_successor) for worker in workers]

        assert lost() == [("w0", False)]
        FrontendProcess(made, broker, "w0", 32, _TOKEN_S, load_s=3.0)
        made.run(2.0)
        assert lost() == [("w0", True)]
        made.run(2.0)
        assert lost() == []


def test_a_trace_tells_the_pause_that_the_client_had() -> None:
    with world(3) as made:
        broker = Broker(made)
        workers = [FrontendProcess(made, broker, name, 32, _TOKEN_S) for name in ("w0", "w1")]
        router = RouterProcess(made, broker, "r0")
        client = SimpleClient(made, broker, "s0")
        made.run(2.0)
        client.ask(60, seed=1)
        made.run(2.0)
        (flight,) = router.router.flights.all()
        killed = next(worker for worker in workers if worker.name == flight.worker_id)
        kill(killed.process, killed.bus, killed.incoming)
        made.run_until(lambda: not client.open())
        made.run(2.0)
        asked = messages.TraceRequest()
        (trace,), _ = router.router._traces.find(asked, "default", made.now, made.now)
        first, second = trace.attempts
        assert second.continued_ms is not None
        assert first.heard_ms is not None
        told_s = (second.continued_ms - first.heard_ms) / 1e3
        assert abs(told_s - client.asked[0].longest_pause_s) <= _TOKEN_S, (told_s, client.asked)
