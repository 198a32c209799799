"""The workers of one process share its connections, its fence and its beats, and leave one by one."""

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.sim.clients import ClientProcess
from tests.sim.network import Broker, Link
from tests.sim.system import MODEL, FrontendProcess, RouterProcess, SimReplica, kill
from tests.sim.world import World, world
from tokenbus.protocol.bus.bus import NoRespondersError, Outgoing
from tokenbus.protocol.wire import codec, internal, subjects

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


class Fleet:
    """Two processes of two workers each, a router of this version, and what goes over the bus."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.broker = Broker(world)
        self.broker.before_routing = self._count
        self.num_messages: Counter[str] = Counter()
        self.processes = [FrontendProcess(world, self.broker, f"{name}1", beside=[f"{name}2"]) for name in "ab"]
        self.routers = [RouterProcess(world, self.broker, "r0")]
        self.client = ClientProcess(world, self.broker, "c0")

    def _count(self, sender: Link, subject: str, payload: bytes) -> None:
        self.num_messages[subject.split(".")[2]] += 1

    def count(self, seconds: float) -> Counter[str]:
        """Lets time pass, and returns how many messages of each kind there were, for each second."""
        self.num_messages.clear()
        self.world.run(seconds)
        return Counter({kind: round(number / seconds) for kind, number in self.num_messages.items()})

    def start(self, name: str, *, knows_beats: bool) -> RouterProcess:
        self.routers.append(RouterProcess(self.world, self.broker, name, knows_beats=knows_beats))
        return self.routers[-1]

    def check_none_lost(self) -> None:
        """No router has missed a worker or an entry."""
        for router in self.routers:
            workers = router.router.fleet.workers_of(MODEL)
            assert len(router.router.fleet.model(MODEL).eligible(self.world.now)) == 4, router.name
            assert not [worker for worker in workers if worker.log.num_lost or worker.log.is_behind]
            assert router.router.metrics.lost_workers.labels(MODEL)._value.get() == 0


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with world(seed=6) as made:
        fleet = Fleet(made)
        yield fleet
        fleet.check_none_lost()


def test_idle_workers_are_spoken_for_by_their_process_once_a_second(fleet: Fleet) -> None:
    fleet.world.run(4.0)
    counted = fleet.count(20.0)
    assert 2 <= counted["beat"] <= 3
    assert counted["events"] == 0  # without the health of real workers


def test_a_worker_with_a_stream_publishes_entries_and_its_neighbour_is_spoken_for(fleet: Fleet) -> None:
    fleet.world.run(4.0)
    fleet.client.ask(60)
    counted = fleet.count(5.0)
    assert counted["events"] >= 10  # one for each token, at least
    assert 2 <= counted["beat"] <= 3
    fleet.client.cancel(0)
    fleet.world.run(1.0)
    assert fleet.count(10.0)["events"] == 0


def test_a_stream_whose_engine_is_slow_keeps_its_worker_heard_of_each_quarter_of_a_second(fleet: Fleet) -> None:
    fleet.world.run(4.0)
    for process in fleet.processes:
        for replica in process.replicas:
            assert replica.engine is not None
            replica.engine._token_s = 5.0
    fleet.client.ask(3)
    fleet.world.run(0.5)
    assert 4 <= fleet.count(10.0)["events"] <= 6


@pytest.mark.parametrize("starts_first", [True, False])
def test_a_router_of_an_earlier_version_loses_no_worker_that_is_idle(fleet: Fleet, starts_first: bool) -> None:
    """Whether it is there before the workers or comes later, it gets an entry of each every quarter of a second."""
    if starts_first:
        earlier = fleet.start("old", knows_beats=False)
        fleet.world.run(1.0)
        fleet.processes.append(FrontendProcess(fleet.world, fleet.broker, "c1"))
        fleet.world.run(30.0)
        assert len(earlier.router.fleet.model(MODEL).eligible(fleet.world.now)) == 5
        fleet.processes.pop().drain()
        fleet.world.run(1.0)
    else:
        fleet.world.run(5.0)
        assert fleet.count(10.0)["events"] == 0
        fleet.start("old", knows_beats=False)
        fleet.world.run(1.0)
    assert fleet.count(30.0)["events"] >= 16
    fleet.check_none_lost()


def test_workers_fall_silent_again_once_no_router_of_an_earlier_version_is_left(fleet: Fleet) -> None:
    earlier = fleet.start("old", knows_beats=False)
    fleet.world.run(10.0)
    assert fleet.count(5.0)["events"] >= 16
    fleet.routers.remove(earlier)
    kill(earlier.process, earlier.bus)
    fleet.world.run(25.0)  # each worker was asked on a subject of its own
    assert fleet.count(10.0)["events"] == 0


def test_a_router_of_an_earlier_version_that_was_cut_off_finds_every_worker_again(fleet: Fleet) -> None:
    earlier = fleet.start("old", knows_beats=False)
    fleet.world.run(10.0)
    earlier.bus.cut(lingers=False)
    fleet.world.run(30.0)


def test_a_broker_that_forbids_beats_makes_workers_and_routers_do_without(fleet: Fleet) -> None:
    fleet.world.run(5.0)
    words = 'nats: permissions violation for publish to "tokenbus.v1.beat.sim.a1"'
    process = fleet.processes[0]
    process.process.call(process.bus.on_permissions_violation, words)
    fleet.world.run(1.0)
    assert 9 <= fleet.count(10.0)["events"] <= 11  # of its two workers
    router = fleet.routers[0]
    words = 'nats: permissions violation for subscription to "tokenbus.v1.beat.*.*"'
    router.process.call(router.bus.on_permissions_violation, words)
    fleet.world.run(1.0)
    assert fleet.count(10.0)["events"] >= 16


def test_routers_of_both_versions_continue_the_streams_of_a_process_that_dies() -> None:
    with world(seed=8) as made:
        fleet = Fleet(made)
        fleet.start("old", knows_beats=False)
        made.run(5.0)
        for _ in range(8):
            fleet.client.ask(40)
        made.run(1.0)
        dead = fleet.processes[0]
        assert any(replica.frontend.num_streams for replica in dead.replicas)
        kill(dead.process, dead.bus, dead.incoming)
        made.run(30.0)
        for asked in fleet.client.asked:
            asked.check()
            assert asked.is_whole, asked


def test_a_forged_beat_keeps_no_dead_worker_alive(fleet: Fleet) -> None:
    fleet.world.run(5.0)
    dead = fleet.processes.pop()
    kill(dead.process, dead.bus, dead.incoming)
    forger = fleet.processes[0]
    seqs = {replica.name: 1_000 for replica in dead.replicas}
    beat = codec.encode(internal.Beat(epoch=dead.frontend.announcer.epoch, next_ms=1_000.0, seqs=seqs))
    for _ in range(50):
        forger.process.call(forger.bus.publish, NAMES.beat(MODEL, "a1"), beat)
        fleet.world.run(0.1)
    assert len(fleet.routers[0].router.fleet.model(MODEL).eligible(fleet.world.now)) == 2
    fleet.processes.append(FrontendProcess(fleet.world, fleet.broker, "b1", beside=["b2"]))
    fleet.world.run(3.0)
    fleet.routers[0].router.metrics.lost_workers.labels(MODEL).reset()


def test_workers_hear_clients_themselves_while_a_router_of_an_earlier_version_is_there(fleet: Fleet) -> None:
    """It passes nothing on, and may place a stream that is cancelled at once."""
    frontends = [replica.frontend for process in fleet.processes for replica in process.replicas]
    fleet.world.run(5.0)
    assert not any(frontend._endpoints.clients.is_listening for frontend in frontends)
    fleet.start("old", knows_beats=False)
    fleet.world.run(1.0)
    assert all(frontend._endpoints.clients.is_listening for frontend in frontends)
