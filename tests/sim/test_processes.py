"""The workers of one process share its connections and its fence, and leave one by one."""

from collections.abc import Iterator

import pytest

from tests.sim.clients import ClientProcess
from tests.sim.network import Broker
from tests.sim.system import MODEL, FrontendProcess, RouterProcess, SimReplica
from tests.sim.world import World, world
from tokenbus.protocol.bus.bus import NoRespondersError, Outgoing
from tokenbus.protocol.wire import subjects

NAMES = subjects.Subjects()


class Pair:
    """A process of two workers, and another process of one."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.broker = Broker(world)
        self.process = FrontendProcess(world, self.broker, "w1", beside=["w2"])
        self.router = RouterProcess(world, self.broker, "r0")
        self.client = ClientProcess(world, self.broker, "c0")
        world.run(1.0)

    @property
    def epochs(self) -> list[str]:
        return [replica.frontend.announcer.epoch for replica in self.process.replicas]

    def ask_each(self, max_tokens: int) -> None:
        """Starts a stream at each of the two workers."""
        for _ in self.process.replicas:
            self.client.ask(max_tokens)
        self.world.run(0.5)
        assert [replica.engine.load().running for replica in self.process.replicas if replica.engine] == [1, 1]

    def leave(self, replica: SimReplica) -> None:
        async def life() -> None:
            await replica.leave(None)
            await replica.frontend.close()

        self.process.process.do(life())
        self.process.replicas.remove(replica)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with world(seed=5) as made:
        yield Pair(made)


def test_a_process_that_was_frozen_cuts_off_all_its_workers_at_once(pair: Pair) -> None:
    before = pair.epochs
    pair.ask_each(40)
    FrontendProcess(pair.world, pair.broker, "other", max_num_seqs=8)
    pair.world.run(0.5)
    pair.process.process.is_paused = True
    pair.world.run(1.6)
    pair.process.process.is_paused = False
    pair.world.run(0.05)
    assert not [one for one in pair.process.replicas if one.frontend.num_streams]
    pair.world.run(20.0)
    for asked in pair.client.asked:
        asked.check()
        assert asked.is_whole, asked
    assert len(set(pair.epochs)) == 1
    assert not set(pair.epochs) & set(before)
    assert pair.process.bus.num_reconnects == 1


def test_a_worker_that_leaves_takes_its_subjects_along_and_none_of_its_neighbours_streams(pair: Pair) -> None:
    pair.ask_each(40)
    pair.leave(pair.process.replicas[0])
    for service in ("run", "control", "snapshot", "take"):
        request = Outgoing(NAMES.worker(MODEL, "w1", service), b"")
        with pytest.raises(NoRespondersError):
            pair.router.process.do(pair.router.router._workers.request(request, 1.0))
    pair.world.run(15.0)
    for asked in pair.client.asked:
        asked.check()
        assert asked.is_whole, asked
    assert pair.process.bus.num_reconnects == 0


def test_a_worker_that_joins_a_process_between_two_epochs_announces_itself_in_the_next(pair: Pair) -> None:
    pair.process.bus.link.hears = False  # type: ignore[union-attr]
    pair.broker.is_up = False  # no reconnect for now
    pair.world.run(1.7)
    added = pair.process.add("w3")
    pair.world.run(0.5)
    pair.broker.restart()
    pair.world.run(3.0)
    assert {one.card.worker_id for one in pair.router.router.fleet.workers_of(MODEL)} == {"w1", "w2", "w3"}
    assert added.frontend.announcer.epoch == pair.epochs[0]
