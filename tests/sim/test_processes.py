"""The workers of one process share its connections, its fence and its beats, and leave one by one."""

from collections import Counter
from collections.abc import Iterator

import pytest
import structlog

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


def test_a_worker_that_can_not_end_its_epoch_ends_its_process_and_the_fence_falls_for_the_others(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise LookupError("gone")

    pair.ask_each(40)
    FrontendProcess(pair.world, pair.broker, "other", max_num_seqs=8)
    pair.world.run(0.5)
    first, second = pair.process.replicas
    monkeypatch.setattr(first.frontend.streams, "abandon_all", fail)
    pair.process.process.is_paused = True
    pair.world.run(1.6)
    pair.process.process.is_paused = False
    num_writes = pair.process.bus.num_writes
    pair.world.run(20.0)
    assert (second.frontend.num_streams, pair.process.bus.num_writes) == (0, num_writes)
    assert isinstance(pair.process.life.exception(), LookupError)
    for asked in pair.client.asked:
        asked.check()
        assert asked.is_whole, asked


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
    """Two processes of two workers each, a router, and what goes over the bus."""

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

    def check_none_lost(self) -> None:
        """No router has missed a worker or an entry."""
        for router in self.routers:
            workers = router.router.fleet.workers_of(MODEL)
            assert len(router.router.fleet.model(MODEL).eligible(self.world.now)) == 4, router.name
            assert not [worker for worker in workers if worker.log.num_lost or worker.log.is_behind]
            assert router.router.metrics.lost_workers.labels(MODEL, "silent")._value.get() == 0


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


def test_a_process_begins_to_beat_as_soon_as_it_is_connected(fleet: Fleet) -> None:
    fleet.world.run(1.0)
    assert fleet.count(2.0)["beat"] >= 2
    fleet.routers.append(RouterProcess(fleet.world, fleet.broker, "r1"))
    fleet.world.run(2.0)
    fleet.check_none_lost()


def test_workers_of_a_process_whose_broker_forbids_beats_speak_for_themselves(fleet: Fleet) -> None:
    fleet.world.run(5.0)
    words = 'nats: permissions violation for publish to "tokenbus.v1.beat.sim.a1"'
    process = fleet.processes[0]
    with structlog.testing.capture_logs() as logs:
        process.process.call(process.bus.on_permissions_violation, words)
        fleet.world.run(1.0)
    assert [(line["event"], line["log_level"]) for line in logs] == [("beats_not_permitted", "error")]
    assert 9 <= fleet.count(10.0)["events"] <= 11  # of its two workers


def test_a_router_says_that_its_broker_forbids_beats(fleet: Fleet) -> None:
    fleet.world.run(1.0)
    router = fleet.routers[0]
    with structlog.testing.capture_logs() as logs:
        for subject in ("tokenbus.v1.beat.*.*", "tokenbus.v1.card.*.*"):
            words = f'nats: permissions violation for subscription to "{subject}"'
            router.process.call(router.bus.on_permissions_violation, words)
        fleet.world.run(0.1)
    assert [(line["event"], line["log_level"]) for line in logs] == [("beats_not_permitted", "error")]


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
    fleet.routers[0].router.metrics.lost_workers.labels(MODEL, "silent").reset()
