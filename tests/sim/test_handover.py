"""Streams outlive routers that are gone and workers that leave, whatever happens to either meanwhile."""

from collections.abc import Callable, Container, Iterable, Iterator

import pytest

from tests.sim.clients import ClientProcess, SimpleClient, SimplyAsked
from tests.sim.network import Broker, Link
from tests.sim.system import FrontendProcess, RouterProcess, kill
from tests.sim.world import World, world
from tests.support.in_part import in_part
from tokenbus.protocol.wire import codec, errors, internal, messages, subjects

NAMES = subjects.Subjects()
_events = codec.Decoder(internal.Events)
_chunks = codec.Decoder(messages.Chunk)
NUM_TOKENS = 60
"""Takes six seconds."""
Strike = Callable[["System"], None]


def tried_in_part(values: Iterable[float], quick: Container[float]) -> list[object]:
    """Returns parameters of a test, of which `make test` tries `quick` and `make test-long` the others."""
    return [pytest.param(one, marks=[] if one in quick else pytest.mark.long) for one in values]


class System:
    """Two routers and a worker. The first router gets every message that is meant for only one of the routers, until it
    is gone."""

    def __init__(self, world: World, *, max_num_seqs: int = 4) -> None:
        self.world = world
        self.broker = Broker(world)
        self.routers = [RouterProcess(world, self.broker, f"r{number}") for number in range(2)]
        self.worker = FrontendProcess(world, self.broker, "w0", max_num_seqs)
        self.workers = [self.worker]
        self._num_workers = 0
        self.broker.pick = lambda members: members[0]
        self.client = SimpleClient(world, self.broker, "s0")
        self.library = ClientProcess(world, self.broker, "c0")
        self.named: list[str] = []
        """The guardians in the workers' logs."""
        self.on_message: Callable[[Link, str, bytes], None] = lambda sender, subject, payload: None
        self.broker.before_routing = self._read
        world.run(0.8)

    def _read(self, sender: Link, subject: str, payload: bytes) -> None:
        if ".events." in subject and not subject.endswith(".seal"):
            self.named += _events.decode(payload).guardians.values()
        self.on_message(sender, subject, payload)

    @property
    def router(self) -> RouterProcess:
        return self.routers[0]

    def add_worker(self) -> FrontendProcess:
        """Starts another worker."""
        self._num_workers += 1
        one = FrontendProcess(self.world, self.broker, f"w{self._num_workers}")
        self.workers.append(one)
        self.world.run(0.5)
        return one

    def kill_router(self) -> None:
        kill(self.router.process, self.router.bus)
        self.routers.pop(0)

    def stop_router(self) -> None:
        self.router.leave()
        self.routers.pop(0)

    def kill_worker(self) -> None:
        kill(self.worker.process, self.worker.bus, self.worker.incoming)
        self.workers.remove(self.worker)

    def drain_worker(self) -> None:
        self.worker.drain()
        self.workers.remove(self.worker)

    def ask(self, max_tokens: int = NUM_TOKENS, seed: int = 1) -> SimplyAsked:
        """Starts a stream of the simplest client, and waits for its first tokens."""
        self.client.ask(max_tokens, seed=seed)
        self.world.run(0.01)
        one = self.client.asked[-1]
        self.world.run_until(lambda: len(one.tokens) > 2)
        return one

    def when(self, is_meant: Callable[[Link, str, bytes], bool], act: Callable[[], None]) -> None:
        """Acts once, before the first message that matches."""
        has_come = False

        def look(sender: Link, subject: str, payload: bytes) -> None:
            nonlocal has_come
            if not has_come and is_meant(sender, subject, payload):
                has_come = True
                act()

        self.on_message = look

    def finish(self) -> None:
        """Waits until every request has ended, and asserts that nothing is left of any and nothing went wrong."""
        self.world.run_until(lambda: not self.client.open() and not self.library.open())
        self.world.run(17.0)
        for process in self.world.processes:
            assert process.faults == [], process
        for heard in (*self.client.heard.values(), *self.library.heard.values()):
            heard.check()
        for asked in (*self.client.asked, *self.library.asked):
            asked.check()
        for router in self.routers:
            assert len(router.router.flights) == 0, router.router
            router.router.flights.check_integrity()
        for worker in self.workers:
            assert worker.engine is not None
            assert worker.engine.load().running == 0


@pytest.fixture
def system() -> Iterator[System]:
    with world(seed=3) as made:
        yield System(made)


def about_take(sender: Link, subject: str, payload: bytes) -> bool:
    return subject.endswith(".take")


def start_second_worker(system: System) -> None:
    system.add_worker()


# Routers that are gone


@pytest.mark.parametrize("lose", [System.kill_router, System.stop_router])
def test_a_stream_outlives_its_router_and_then_its_worker(system: System, lose: Strike) -> None:
    asked = system.ask()
    lose(system)
    system.world.run(3.0)
    assert system.named == ["r1"]
    system.add_worker()
    system.kill_worker()
    system.finish()
    assert asked.is_whole
    assert system.client.heard[asked.inbox].workers == {1: "w0", 2: "w1"}


@pytest.mark.parametrize("twentieth", tried_in_part(range(20), quick=range(0, 20, 4)))
def test_streams_outlive_their_worker_a_second_and_a_half_after_their_router_was_killed_and_started_again(
    system: System, twentieth: int
) -> None:
    """At whatever point of the second between two checks it dies, and whether it is back in time to be asked again, or
    to be offered the streams before it knows their worker."""
    for seed in range(1, 4):
        system.client.ask(90, seed=seed)
    system.add_worker()
    system.world.run(0.5 + twentieth / 20)
    system.kill_router()
    system.world.run(0.1)
    system.routers.append(RouterProcess(system.world, system.broker, "r0"))
    system.broker.pick = lambda members: members[-1]
    system.world.run(1.4)
    system.kill_worker()
    system.finish()
    assert [asked.is_whole for asked in system.client.asked] == [True] * 3
    assert {heard.workers[2] for heard in system.client.heard.values()} == {"w1"}


def test_a_stream_outlives_its_worker_though_its_router_has_only_just_started(system: System) -> None:
    system.add_worker()
    for _ in range(2):
        system.kill_router()
    system.routers.append(RouterProcess(system.world, system.broker, "r9"))
    system.world.run(0.1)
    system.world.run_until(lambda: not system.router.router.unready_reason)
    system.world.run(0.01)
    system.client.ask(20, seed=1)
    system.world.run(0.06)
    [dead] = [one for one in system.workers if one.engine is not None and one.engine.load().running]
    kill(dead.process, dead.bus, dead.incoming)
    system.workers.remove(dead)
    system.finish()
    assert system.client.asked[0].is_whole


def test_a_stream_outlives_one_router_after_another(system: System) -> None:
    system.client.ask(150, seed=1)
    system.world.run(1.0)
    for number in range(2, 5):
        system.routers.append(RouterProcess(system.world, system.broker, f"r{number}"))
        system.world.run(0.8)
        system.kill_router()
        system.world.run(2.5)
    assert system.named == ["r1", "r2", "r3"]
    system.add_worker()
    system.kill_worker()
    system.finish()
    assert system.client.asked[0].is_whole


def test_a_stream_waits_for_the_only_router_to_return_and_then_for_a_worker(system: System) -> None:
    kill(system.routers[1].process, system.routers[1].bus)
    system.routers.pop()
    system.client.ask(150, seed=1)
    system.world.run(1.0)
    system.kill_router()
    system.world.run(4.0)
    assert system.named == []
    system.routers.append(RouterProcess(system.world, system.broker, "r9"))
    system.world.run(2.0)
    assert system.named == ["r9"]
    system.kill_worker()
    system.world.run(2.0)
    system.add_worker()
    system.finish()
    assert system.client.asked[0].is_whole


def test_a_router_that_stops_hands_on_what_waits_in_its_queue() -> None:
    with world(seed=3) as made:
        system = System(made, max_num_seqs=1)
        for seed in range(1, 5):
            system.client.ask(20, seed=seed)
        made.run(0.5)
        assert len(system.router.router._queue) > 0
        system.stop_router()
        system.finish()
        assert [asked.is_whole for asked in system.client.asked] == [True] * 4


def test_what_waits_in_the_queue_of_the_last_router_that_stops_is_refused() -> None:
    with world(seed=3) as made:
        system = System(made, max_num_seqs=1)
        kill(system.routers[1].process, system.routers[1].bus)
        system.routers.pop()
        for seed in range(1, 5):
            system.client.ask(30, seed=seed)
        made.run(0.5)
        system.stop_router()
        system.finish()
        codes = [asked.terminal.error.code for asked in system.client.asked if asked.terminal and asked.terminal.error]
        assert codes == [errors.Code.SHUTTING_DOWN] * 2
        assert sum(asked.is_whole for asked in system.client.asked) == 2


def test_a_stream_that_was_taken_and_waits_for_a_worker_is_handed_on_too(system: System) -> None:
    asked = system.ask()
    system.drain_worker()
    system.world.run(1.0)
    system.stop_router()
    system.world.run(4.0)
    system.add_worker()
    system.finish()
    assert asked.is_whole


def test_a_worker_and_its_router_stop_together(system: System) -> None:
    asked = system.ask()
    system.add_worker()
    system.stop_router()
    system.drain_worker()
    system.finish()
    assert asked.is_whole


# Workers that leave


def test_the_only_worker_drains_and_the_next_one_comes_later(system: System) -> None:
    asked, other = system.ask(seed=1), system.ask(seed=2)
    system.client.ask(40, seed=3, stream=False)
    system.world.run(0.5)
    system.drain_worker()
    system.world.run(5.0)
    assert not system.worker.process.is_alive
    system.add_worker()
    system.finish()
    assert asked.is_whole
    assert other.is_whole
    assert system.client.asked[2].is_whole


@pytest.mark.parametrize(("away_s", "keepalives"), [(0.5, []), (1.5, [0])], ids=["short", "long"])
def test_a_router_says_that_it_holds_a_stream_after_a_second_and_knows_no_text_offset(
    system: System, away_s: float, keepalives: list[int]
) -> None:
    asked = system.ask()
    system.world.run(1.0)
    heard: list[messages.Chunk] = []

    def listen(sender: Link, subject: str, payload: bytes) -> None:
        if b'"worker_id":null' in payload:
            heard.append(_chunks.decode(payload, codec.Encoding.JSON))

    system.on_message = listen
    system.drain_worker()
    system.world.run(away_s)
    num_tokens = len(asked.tokens)
    system.add_worker()
    system.finish()
    assert asked.is_whole
    assert [one.text_offset for one in heard] == keepalives
    assert {one.offset for one in heard} <= {num_tokens}


def test_a_worker_leaves_while_its_router_is_replaced(system: System) -> None:
    kill(system.routers[1].process, system.routers[1].bus)
    system.routers.pop()
    asked = system.ask()
    system.add_worker()
    system.kill_router()
    system.drain_worker()
    system.world.run(1.0)
    system.routers.append(RouterProcess(system.world, system.broker, "r9"))
    system.finish()
    assert asked.is_whole
    assert system.named == ["r9"]


def test_streams_that_nobody_takes_end_with_their_worker(system: System) -> None:
    system.client.ask(200, seed=1)
    system.world.run(1.0)
    for router in system.routers:
        kill(router.process, router.bus)
    system.routers.clear()
    system.drain_worker()
    system.finish()
    terminal = system.client.asked[0].terminal
    assert terminal
    assert (terminal.finish_reason, terminal.stopped_by) == ("length", "shutdown")
    assert not system.worker.process.is_alive


def test_the_last_worker_leaves_an_end_for_what_nobody_continues_in_time(system: System) -> None:
    """Whether the client wants chunks or a whole answer: its text is all that the worker has generated."""
    asked = system.ask(200)
    system.client.ask(200, seed=2, stream=False)
    system.world.run(1.0)
    system.client.asked[1].patience_s = 90.0
    system.drain_worker()
    system.world.run(50.0)
    assert system.client.open() == [asked, system.client.asked[1]]
    system.finish()
    for one in system.client.asked:
        assert one.terminal
        assert (one.terminal.finish_reason, one.terminal.stopped_by) == ("length", "shutdown")
        assert one.terminal.usage
        assert one.terminal.usage.completion_tokens == len(one.tokens) > 3


def test_the_end_that_a_worker_has_left_is_handed_on_with_the_stream(system: System) -> None:
    asked = system.ask(200)
    system.drain_worker()
    system.world.run(1.0)
    system.stop_router()
    system.finish()
    assert asked.terminal
    assert (asked.terminal.finish_reason, asked.terminal.stopped_by) == ("length", "shutdown")


def test_the_end_that_a_worker_has_left_is_out_of_date_once_another_one_has_the_stream(system: System) -> None:
    asked = system.ask(200)
    system.drain_worker()
    system.world.run(1.0)
    second = system.add_worker()
    system.world.run(2.0)
    kill(second.process, second.bus, second.incoming, lingers=False)
    system.workers.remove(second)
    system.finish()
    assert asked.terminal
    assert asked.terminal.error
    assert asked.terminal.error.code is errors.Code.WORKER_LOST


def test_a_worker_that_may_hand_nothing_over_stops_its_streams(system: System) -> None:
    asked, waiting = system.ask(200), system.library
    waiting.ask(200)
    system.world.run(1.0)
    other = system.add_worker()
    system.worker.drain(handover_s=0.0)
    system.workers.remove(system.worker)
    system.world.run(1.0)
    assert not system.worker.process.is_alive
    system.finish()
    for one in (asked, waiting.asked[0]):
        assert one.terminal
        assert (one.terminal.finish_reason, one.terminal.stopped_by) == ("length", "shutdown")
    assert other.engine is not None


def stop(system: System, worker: FrontendProcess, key: str) -> None:
    """Sends a worker an operator's stop."""
    control = codec.encode(internal.Control(op="stop", request_id=key))
    bus = system.routers[-1].bus
    system.routers[-1].process.call(bus.publish, NAMES.worker("sim", worker.name, "control"), control)


def about(word: bytes) -> Callable[[Link, str, bytes], bool]:
    return lambda sender, subject, payload: word in payload or subject.endswith(word.decode())


@pytest.mark.parametrize("moment", [b".run", b"accepted", b"started", b".take", b"num_tokens", b"taken", b".seal"])
@pytest.mark.parametrize("lose", in_part([System.drain_worker, System.kill_worker, System.kill_router], 3))
def test_a_stream_that_is_stopped_while_it_moves_has_one_end(system: System, moment: bytes, lose: Strike) -> None:
    """Whether the stop comes in time or not."""
    asked = system.ask(40)
    second = system.add_worker()
    assert system.worker.engine is not None
    [key] = system.worker.engine.running

    def stop_everywhere() -> None:
        for worker in (system.worker, second):
            stop(system, worker, key)

    system.when(about(moment), stop_everywhere)
    lose(system)
    system.finish()
    assert asked.terminal
    assert asked.terminal.finish_reason == "length"
    assert asked.is_whole or asked.terminal.stopped_by in ("operator", "shutdown")


@pytest.mark.parametrize("lingers", [False, True])
def test_a_worker_that_dies_before_it_answers_a_take_is_lost_like_any_other(system: System, lingers: bool) -> None:
    asked = system.ask()
    system.add_worker()

    def die() -> None:
        kill(system.worker.process, system.worker.bus, system.worker.incoming, lingers=lingers)

    system.when(about_take, die)
    system.drain_worker()
    system.finish()
    assert asked.is_whole


@pytest.mark.parametrize("num_streams", [1, 2])
def test_a_take_whose_answer_is_lost_is_asked_again(system: System, num_streams: int) -> None:
    several = [system.ask(seed=seed) for seed in range(1, 1 + num_streams)]
    system.add_worker()
    system.when(
        lambda sender, subject, payload: sender is system.worker.bus.link and b"num_tokens" in payload,
        lambda: system.router.bus.cut(lingers=False),
    )
    system.drain_worker()
    system.world.run_until(lambda: not system.client.open())
    system.finish()
    assert all(asked.is_whole for asked in several)


# Guardians in doubt


def is_acceptance(sender: Link, subject: str, payload: bytes) -> bool:
    return subject.endswith(".guarded")


def test_an_offer_whose_answer_is_lost_is_made_again_and_only_the_router_that_is_named_acts(system: System) -> None:
    third = RouterProcess(system.world, system.broker, "r2")
    system.routers.append(third)
    system.world.run(0.8)
    asked = system.ask()
    has_come = False

    def lose() -> None:
        nonlocal has_come
        has_come = True
        system.worker.incoming.cut(lingers=False)

    system.when(is_acceptance, lose)
    system.kill_router()
    system.world.run_until(lambda: has_come)
    first, second = system.routers
    assert len(first.router.flights) == 1
    system.broker.pick = lambda members: members[-1]
    system.world.run(1.5)
    assert system.named == ["r2"]
    assert (len(first.router.flights), len(second.router.flights)) == (0, 1)
    system.add_worker()
    system.kill_worker()
    system.finish()
    assert asked.is_whole


def test_a_router_that_is_not_named_yet_does_not_act(system: System) -> None:
    """Nobody can tell which router the worker was going to name."""
    asked = system.ask()
    system.add_worker()
    system.when(is_acceptance, system.kill_worker)
    system.kill_router()
    system.finish()
    assert not asked.is_whole
    assert asked.terminal is None


def cut_off(system: System, router: RouterProcess, seconds: float) -> None:
    """Pauses a router; its connection ends meanwhile."""
    router.process.is_paused = True
    router.bus.cut(lingers=True)
    system.world.run(seconds)
    router.process.is_paused = False


def test_a_guardian_that_was_away_hears_that_it_is_one_no_more(system: System) -> None:
    asked = system.ask()
    first = system.router
    cut_off(system, first, 2.5)
    assert system.named == ["r1"]
    system.world.run(1.0)
    assert len(first.router.flights) == 0
    system.add_worker()
    system.kill_worker()
    system.finish()
    assert asked.is_whole


@pytest.mark.parametrize("lose", [System.kill_worker, System.drain_worker])
def test_a_guardian_that_was_away_does_not_end_what_another_one_has_continued_meanwhile(
    system: System, lose: Strike
) -> None:
    """The worker that could tell it so is gone when the router returns."""
    system.client.ask(150, seed=1)
    system.world.run(1.0)
    system.add_worker()
    first = system.router
    first.process.is_paused = True
    first.bus.cut(lingers=True)
    system.world.run(2.0)
    assert system.named == ["r1"]
    lose(system)
    system.world.run(4.0)
    first.process.is_paused = False
    system.finish()
    assert system.client.asked[0].is_whole


def test_a_guardian_that_was_away_can_not_take_what_another_one_guards_now(system: System) -> None:
    asked = system.ask()
    system.add_worker()
    first = system.router
    cut_off(system, first, 2.0)
    assert system.named == ["r1"]
    system.drain_worker()
    system.finish()
    assert asked.is_whole
    assert len(system.client.heard[asked.inbox].workers) == 2


def test_a_router_that_was_just_taking_a_stream_does_not_get_it_once_another_one_guards_it(system: System) -> None:
    asked = system.ask()
    system.add_worker()
    first, second = system.routers

    def go_away() -> None:
        first.process.is_paused = True
        first.bus.cut(lingers=False)

    system.when(about_take, go_away)
    system.drain_worker()
    system.world.run_until(lambda: system.named == ["r1"])
    second.process.is_paused, first.process.is_paused = True, False
    system.world.run(1.0)
    assert system.worker.engine is not None
    assert system.worker.engine.load().running == 1
    second.process.is_paused = False
    system.finish()
    assert asked.is_whole


@pytest.mark.parametrize("lose", [System.kill_worker, System.drain_worker])
@pytest.mark.parametrize("away_s", [9.0, 20.0])
def test_a_frozen_guardian_whose_connection_stays_is_replaced_and_doubles_nothing(
    system: System, lose: Strike, away_s: float
) -> None:
    system.client.ask(150, seed=1)
    system.world.run(2.5)
    system.add_worker()
    frozen = system.router
    frozen.process.is_paused = True
    system.broker.pick = lambda members: members[-1]
    system.world.run(6.0)
    assert system.named == ["r1"]
    lose(system)
    system.world.run(away_s - 6.0)
    frozen.process.is_paused = False
    system.finish()
    assert system.client.asked[0].is_whole


def test_offers_that_a_frozen_guardian_finds_when_it_runs_again_change_nothing(system: System) -> None:
    """The broker gives it the offers of its own streams, for as long as it holds its connection."""
    system.client.ask(150, seed=1)
    system.world.run(2.5)
    system.add_worker()
    frozen = system.router
    frozen.process.is_paused = True
    system.world.run(6.0)
    assert system.named == []
    system.broker.pick = lambda members: members[-1]
    system.world.run(1.5)
    assert system.named == ["r1"]
    system.kill_worker()
    system.world.run(3.0)
    frozen.process.is_paused = False
    system.finish()
    assert system.client.asked[0].is_whole


def test_a_guardian_that_is_only_slow_stays_one(system: System) -> None:
    asked = system.ask()
    first = system.router
    first.process.is_paused = True
    system.world.run(3.0)
    first.process.is_paused = False
    assert system.named == []
    system.add_worker()
    system.kill_worker()
    system.finish()
    assert asked.is_whole


def test_a_request_handed_over_twice_in_a_row_is_placed_once(system: System) -> None:
    system.routers.append(RouterProcess(system.world, system.broker, "r2"))
    asked = system.ask()
    system.drain_worker()
    system.world.run(1.0)
    system.stop_router()
    system.world.run(0.5)
    system.stop_router()
    system.world.run(0.5)
    system.add_worker()
    system.finish()
    assert asked.is_whole


# Cancels and deadlines


def kill_router_then_worker(system: System) -> None:
    system.kill_router()
    system.world.run(2.0)
    system.kill_worker()


def drain_then_stop_router(system: System) -> None:
    system.drain_worker()
    system.world.run(0.5)
    system.stop_router()


def drain_during_restart(system: System) -> None:
    kill(system.routers[1].process, system.routers[1].bus)
    system.routers.pop()
    system.kill_router()
    system.drain_worker()
    system.world.run(1.0)
    system.routers.append(RouterProcess(system.world, system.broker, "r9"))


def die_at_take(system: System) -> None:
    system.when(about_take, lambda: kill(system.worker.process, system.worker.bus, system.worker.incoming))
    system.drain_worker()


def lose_an_acceptance(system: System) -> None:
    system.when(is_acceptance, lambda: system.worker.incoming.cut(lingers=True))
    system.kill_router()


FAULTS: list[Strike] = [
    System.drain_worker,
    System.kill_router,
    System.stop_router,
    kill_router_then_worker,
    drain_then_stop_router,
    drain_during_restart,
    die_at_take,
    lose_an_acceptance,
]


@pytest.mark.parametrize("later_s", tried_in_part([0.0, 0.003, 0.1, 1.2, 3.1], quick=[0.003, 1.2]))
@pytest.mark.parametrize("strike", FAULTS)
def test_a_cancel_ends_a_stream_once_whatever_happens_to_its_router_and_its_worker(
    system: System, strike: Strike, later_s: float
) -> None:
    system.library.ask(150, seed=1, resume=False)
    system.world.run(1.0)
    system.world.at(system.world.now + later_s, lambda: system.library.cancel(0))
    strike(system)
    system.world.run(4.0)
    system.add_worker()
    system.finish()
    assert ends_of(system) == ["cancelled"]


@pytest.mark.parametrize("has_successor", [False, True])
@pytest.mark.parametrize("timeout_ms", tried_in_part([1_000.5, 1_003.0, 1_100.0, 2_200.0, 4_000.0], quick=[1_003.0]))
@pytest.mark.parametrize("strike", FAULTS)
def test_a_deadline_ends_a_stream_once_whatever_happens_to_its_router_and_its_worker(
    system: System, strike: Strike, timeout_ms: float, has_successor: bool
) -> None:
    system.library.ask(150, seed=1, resume=False, timeout_ms=timeout_ms)
    asked_at = system.world.now
    system.world.run(1.0)
    strike(system)
    if has_successor:
        system.add_worker()
    system.finish()
    (asked,) = system.library.asked
    assert ends_of(system) == ["error"]
    assert asked.terminal
    assert asked.terminal.error
    assert asked.terminal.error.code is errors.Code.DEADLINE_EXCEEDED
    assert asked.ended_at is not None
    assert asked.ended_at - asked_at < timeout_ms / 1e3 + 3.0  # until the loss of a worker is noticed


def ends_of(system: System) -> list[str]:
    """Returns the finish reasons of all terminals that have come for the library's only request."""
    return [reason for heard in system.library.heard.values() for reason, _, _ in heard.ends]
