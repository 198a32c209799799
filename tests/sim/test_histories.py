"""Random histories of clients, routers and frontends over a network that loses and delays messages, pauses and breaks.

At no time is a client given two different tokens for one place, tokens of an attempt that another has replaced, or text
with a hole; only a simple client, which asks for nothing again, may see a hole, where a connection broke and was made
again. After each history, when everything works again, every request has had exactly one terminal, and nothing is left
in any table. TOKENBUS_HISTORIES sets how many are played."""

import itertools
import os
from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.sim.clients import ClientProcess, SimpleClient
from tests.sim.network import Broker, Link
from tests.sim.sim_bus import SimBus
from tests.sim.system import LIMITS, MODEL, FrontendProcess, RouterProcess, SimReplica, kill
from tests.sim.world import Process, world
from tokenbus.protocol.bus.bus import Outgoing
from tokenbus.protocol.wire import codec, internal, limits, subjects

HISTORIES = int(os.environ.get("TOKENBUS_HISTORIES", "30"))
NUMBERS = st.integers(0, 5)
LENGTHS = st.lists(st.none() | st.integers(1, 60), min_size=1, max_size=3)
"""The `max_tokens` of several requests."""
LOADS_S = (0.0, 10.0, 60.0)
"""What the model of a worker that is started again takes to load."""
THEN_S = st.sampled_from([0.0, 0.05, 0.4, 1.5])
"""The time that passes after each fault."""


class History(RuleBasedStateMachine):
    """A few processes, and everything that can happen to them."""

    @initialize(
        seed=st.integers(0, 2**32), routers=st.integers(1, 2), frontends=st.integers(1, 3), most_named=st.integers(0, 2)
    )
    def begin(self, seed: int, routers: int, frontends: int, most_named: int) -> None:
        """At 0, `most_named` doesn't limit the requests that a router can name at a time."""
        self._closing = world(seed)
        self.world = self._closing.__enter__()
        self.broker = Broker(self.world)
        self.num_frontends = 0
        self.frontends = [self.new_frontend(f"w{number}") for number in range(frontends)]
        self.most_named = most_named
        self.routers = [self.new_router(f"r{number}") for number in range(routers)]
        self.clients = [ClientProcess(self.world, self.broker, f"c{number}") for number in range(2)]
        self.simple_client = SimpleClient(self.world, self.broker, "s0")
        self.leaving: list[FrontendProcess | RouterProcess] = []
        """Processes that were told to stop."""
        self.doomed: list[FrontendProcess] = []
        """Frontends that are about to die in the middle of a write."""
        self.born = 10
        self.num_asked = 0
        self.world.run(0.8)

    # what clients do

    @rule(
        who=NUMBERS,
        lengths=LENGTHS,
        stream=st.integers(0, 3),
        deadline=st.integers(0, 5),
        then_s=THEN_S,
    )
    def ask(self, who: int, lengths: list[int | None], stream: int, deadline: int, then_s: float) -> None:
        for max_tokens in lengths:
            timeout_ms = 900.0 if deadline == 0 else None
            client = self.of(self.clients, who)
            client.ask(max_tokens, stream=stream > 0, timeout_ms=timeout_ms, seed=self.next_seed())
        self.world.run(then_s)

    @rule(lengths=LENGTHS, stream=st.integers(0, 3), then_s=THEN_S)
    def ask_simply(self, lengths: list[int | None], stream: int, then_s: float) -> None:
        for max_tokens in lengths:
            self.simple_client.ask(max_tokens, stream=stream > 0, seed=self.next_seed())
        self.world.run(then_s)

    @rule(who=NUMBERS)
    def load(self, who: int) -> None:
        """Starts several long streams."""
        for _ in range(2):
            self.of(self.clients, who).ask(80, seed=self.next_seed())
        self.simple_client.ask(80, seed=self.next_seed())
        self.world.run(0.5)

    @rule(who=NUMBERS, which=st.integers(0, 20))
    def cancel(self, who: int, which: int) -> None:
        self.of(self.clients, who).cancel(which)

    @rule(who=NUMBERS, which=st.integers(0, 20), then_s=THEN_S)
    def operator_stops(self, who: int, which: int, then_s: float) -> None:
        """Has all workers told to stop a request that one of them runs."""
        engine = self.of(self.replicas, who).engine
        if engine is None or not engine.running:
            return
        control = codec.encode(internal.Control(op="stop", request_id=self.of(engine.running, which)))
        for replica in self.replicas:
            subject = subjects.Subjects().worker(MODEL, replica.name, "control")
            self.simple_client.process.call(self.simple_client.bus.publish, subject, control)
        self.world.run(then_s)

    @rule(who=NUMBERS, then_s=THEN_S)
    def client_dies(self, who: int, then_s: float) -> None:
        if len(self.clients) > 1:
            dead = self.of(self.clients, who)
            self.clients.remove(dead)
            kill(dead.process, dead.bus)
            self.world.run(then_s)

    # time

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.2, 0.5, 1.0, 2.0]))
    def wait(self, seconds: float) -> None:
        self.world.run(seconds)

    @rule(seconds=st.sampled_from([4.0, 12.0]))
    def wait_long(self, seconds: float) -> None:
        self.world.run(seconds)

    # the network

    @rule(who=NUMBERS, lingers=st.booleans(), then_s=THEN_S)
    def cut(self, who: int, lingers: bool, then_s: float) -> None:
        bus = self.of(self.buses(), who)
        bus.cut(lingers=lingers)
        if bus in [self.simple_client.bus, *(frontend.bus for frontend in self.frontends)]:
            self.simple_requests_may_have_holes()
        self.world.run(then_s)

    @rule(who=NUMBERS, seconds=st.sampled_from([0.3, 1.4, 4.0]), then_s=THEN_S)
    def way_out_blocked(self, who: int, seconds: float, then_s: float) -> None:
        """Blocks for a while what a process sends, but not what it receives."""
        bus = self.of(self.buses(), who)
        if bus.link is not None:
            bus.link.stall(seconds)
        self.world.run(then_s)

    @rule(who=NUMBERS, lag_s=st.sampled_from([0.0, 0.3, 1.4, 3.0]), then_s=THEN_S)
    def reads_late(self, who: int, lag_s: float, then_s: float) -> None:
        """Makes a router read its messages this late, until its next connection."""
        bus = self.of(self.routers, who).bus
        if bus.link is not None:
            bus.link.lag_s = lag_s
        self.world.run(then_s)

    @rule(slowest_s=st.sampled_from([0.002, 0.05, 0.4]))
    def slow(self, slowest_s: float) -> None:
        self.broker.slowest_s = slowest_s

    @precondition(lambda self: self.broker.is_up)
    @rule(seconds=st.sampled_from([0.1, 0.7, 3.0]), then_s=THEN_S)
    def broker_pauses(self, seconds: float, then_s: float) -> None:
        self.broker.pause()
        self.world.at(self.world.now + seconds, self.broker.resume)
        self.world.run(then_s)

    @precondition(lambda self: self.broker.is_up)
    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0]), then_s=THEN_S)
    def broker_restarts(self, seconds: float, then_s: float) -> None:
        self.broker.die()
        self.simple_requests_may_have_holes()
        self.world.at(self.world.now + seconds, self.broker.restart)
        self.world.run(then_s)

    # processes

    @rule(who=NUMBERS, seconds=st.sampled_from([0.3, 1.7, 3.0, 5.0]), then_s=THEN_S)
    def frontend_pauses(self, who: int, seconds: float, then_s: float) -> None:
        self.pause(self.of(self.frontends, who).process, seconds)
        self.world.run(then_s)

    @rule(who=NUMBERS, then_s=THEN_S)
    def frontend_fences_twice(self, who: int, then_s: float) -> None:
        self.of(self.frontends, who).fence_twice()
        self.world.run(then_s)

    @rule(who=NUMBERS, seconds=st.sampled_from([0.3, 1.0, 2.4, 6.0]), then_s=THEN_S)
    def router_pauses(self, who: int, seconds: float, then_s: float) -> None:
        self.pause(self.of(self.routers, who).process, seconds)
        self.world.run(then_s)

    @rule(who=NUMBERS, seconds=st.sampled_from([0.3, 2.4, 15.0]), then_s=THEN_S)
    def client_pauses(self, who: int, seconds: float, then_s: float) -> None:
        self.pause(self.of([*self.clients, self.simple_client], who).process, seconds)
        self.world.run(then_s)

    @rule(who=NUMBERS, then_s=THEN_S)
    def stutters(self, who: int, then_s: float) -> None:
        """Pauses a router or a frontend again and again, each time a little too briefly to end anything."""
        process = self.of([*self.frontends, *self.routers], who).process
        for number in range(4):
            self.world.at(self.world.now + number * 1.6, lambda: self.pause(process, 1.4))
        self.world.run(then_s)

    @rule(who=NUMBERS, then_s=THEN_S)
    def engine_dies(self, who: int, then_s: float) -> None:
        self.of(self.replicas, who).engine_dies()
        self.world.run(then_s)

    @rule(who=NUMBERS, then_s=THEN_S)
    def router_is_replaced(self, who: int, then_s: float) -> None:
        dead = self.of(self.routers, who)
        self.routers.remove(dead)
        kill(dead.process, dead.bus)
        self.born += 1
        self.routers.append(self.new_router(f"r{self.born}"))
        self.world.run(then_s)

    @rule(who=NUMBERS, then_s=THEN_S)
    def router_stops(self, who: int, then_s: float) -> None:
        """Starts another router, then stops one."""
        self.born += 1
        self.routers.append(self.new_router(f"r{self.born}"))
        self.world.run(0.7)
        leaving = self.of(self.routers[:-1], who)
        self.routers.remove(leaving)
        leaving.leave()
        self.leaving.append(leaving)
        self.world.run(then_s)

    @rule(who=NUMBERS, starts_first=st.booleans(), then_s=THEN_S)
    def frontend_drains(self, who: int, starts_first: bool, then_s: float) -> None:
        """Stops a frontend, and starts another one before or afterwards."""
        number = who % len(self.frontends)
        leaving = self.frontends[number]
        self.born += 1
        if not starts_first:
            leaving.drain()
            self.world.run(0.5)
        self.frontends[number] = self.new_frontend(f"w{self.born}")
        if starts_first:
            self.world.run(0.5)
            leaving.drain()
        self.leaving.append(leaving)
        self.world.run(then_s)

    @precondition(lambda self: self.broker.is_up and not self.broker.is_paused)
    @rule(who=NUMBERS, then_s=THEN_S)
    def frontend_is_replaced(self, who: int, then_s: float) -> None:
        dead = self.of(self.frontends, who)
        self.frontends.remove(dead)
        kill(dead.process, dead.bus, dead.incoming)
        self.born += 1
        self.frontends.append(self.new_frontend(f"w{self.born}"))
        self.world.run(then_s)

    @precondition(lambda self: self.broker.is_up and not self.broker.is_paused)
    @rule(
        who=NUMBERS,
        away_s=st.sampled_from([0.0, 0.3, 1.2, 2.6]),
        load_s=st.sampled_from(LOADS_S),
        lingers=st.booleans(),
        then_s=THEN_S,
    )
    def frontend_returns(self, who: int, away_s: float, load_s: float, lingers: bool, then_s: float) -> None:
        """Kills a frontend, and starts another one under its name."""
        number = who % len(self.frontends)
        dead = self.frontends[number]
        kill(dead.process, dead.bus, dead.incoming, lingers=lingers)
        self.world.run(away_s)
        self.frontends[number] = self.new_frontend(dead.name, load_s)
        self.world.run(then_s)

    @precondition(lambda self: len(self.frontends) > 1)
    @rule(who=NUMBERS, lingers=st.booleans(), then_s=THEN_S)
    def frontend_dies(self, who: int, lingers: bool, then_s: float) -> None:
        """Kills a frontend for good, while there is another one."""
        dead = self.of(self.frontends, who)
        self.frontends.remove(dead)
        kill(dead.process, dead.bus, dead.incoming, lingers=lingers)
        self.world.run(then_s)

    @precondition(lambda self: len(self.frontends) > 1 and not self.doomed)
    @rule(who=NUMBERS, messages=st.integers(1, 20), then_s=THEN_S)
    def frontend_dies_in_a_write(self, who: int, messages: int, then_s: float) -> None:
        """Kills a frontend and its machine once the broker has received this many more of its messages."""
        dead = self.of(self.frontends, who)
        self.frontends.remove(dead)
        self.doomed.append(dead)
        left = itertools.count(messages, -1)

        def count(sender: Link, subject: str, payload: bytes) -> None:
            if sender is dead.bus.link and next(left) == 0:
                self.doom()

        self.broker.before_routing = count
        self.world.run(then_s)

    # what must hold

    @invariant()
    def no_process_has_failed(self) -> None:
        for process in self.world.processes if hasattr(self, "world") else []:
            assert process.faults == [], process

    @invariant()
    def every_text_is_one(self) -> None:
        for client in [*self.clients, self.simple_client] if hasattr(self, "world") else []:
            for asked in client.asked:
                asked.check()
            for heard in client.heard.values():
                heard.check(ends_are_known=not self.broker.has_lost_messages)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.heal()
            self.check_end()
        finally:
            self._closing.__exit__(None, None, None)

    def heal(self) -> None:
        self.doom()
        self.broker.slowest_s = 0.002
        for link in self.broker.links:
            link.lag_s = 0.0
        self.broker.restart()
        if self.broker.is_paused:
            self.broker.resume()
        for process in self.world.processes:
            process.is_paused = False
        self.world.run(0.1)  # in which clients that were paused send the requests that they were told to send
        everybody = [*self.clients, self.simple_client]
        self.world.run_until(lambda: not any(client.open() for client in everybody), timeout_s=120.0)
        self.world.run(max(16.0, *LOADS_S))

    def check_end(self) -> None:
        self.no_process_has_failed()
        self.every_text_is_one()
        for client in self.clients:
            assert all(asked.terminal is not None for asked in client.asked)
            assert client.client.num_streams == 0
        for replica in self.replicas:
            assert replica.engine is not None
            assert replica.engine.load().running == 0, replica.frontend
            assert self.snapshot(replica).running == []
        assert not [one for one in self.leaving if one.process.is_alive]
        for router in self.routers:
            assert len(router.router.flights) == 0, router.router
            router.router.flights.check_integrity()
        self.clients[0].ask(3)
        self.world.run(5.0)
        terminal = self.clients[0].asked[-1].terminal
        assert terminal is not None
        assert terminal.finish_reason == "length", terminal

    @property
    def replicas(self) -> list[SimReplica]:
        return [replica for frontend in self.frontends for replica in frontend.replicas]

    def snapshot(self, replica: SimReplica) -> internal.SnapshotPart:
        """The first part of a worker's snapshot, as a router gets it."""
        subject = subjects.Subjects().worker(MODEL, replica.name, "snapshot")
        workers = self.routers[0].router._workers
        answer = self.routers[0].process.do(workers.request(Outgoing(subject, b""), 1.0))
        return codec.Decoder(internal.SnapshotPart).decode(answer.data)

    def new_frontend(self, name: str, load_s: float = 0.0) -> FrontendProcess:
        self.num_frontends += 1
        limit = LIMITS[self.num_frontends % len(LIMITS)]
        beside = [f"{name}-2"] if self.num_frontends % 2 else []
        return FrontendProcess(self.world, self.broker, name, max_new_tokens=limit, beside=beside, load_s=load_s)

    def new_router(self, name: str) -> RouterProcess:
        router = RouterProcess(self.world, self.broker, name)
        if self.most_named:
            router.bus.max_payload = limits.MESSAGE_RESERVE_BYTES + 50 * self.most_named
        return router

    def next_seed(self) -> int | None:
        """Returns a seed for two of three requests, and None for the third."""
        self.num_asked += 1
        return self.num_asked if self.num_asked % 3 else None

    def simple_requests_may_have_holes(self) -> None:
        for asked in self.simple_client.open():
            asked.may_have_hole = True

    def doom(self) -> None:
        """Kills the frontend that is about to die in a write, if there is one."""
        for dead in self.doomed:
            kill(dead.process, dead.bus, dead.incoming, lingers=False)
        self.doomed.clear()

    def buses(self) -> list[SimBus]:
        ends = [one.bus for one in (*self.clients, self.simple_client, *self.routers, *self.frontends)]
        return ends + [frontend.incoming for frontend in self.frontends]

    def pause(self, process: Process, seconds: float) -> None:
        process.is_paused = True
        self.world.at(self.world.now + seconds, lambda: self.resume(process))

    def resume(self, process: Process) -> None:
        process.is_paused = False

    def of(self, several: list, number: int):  # type: ignore[no-untyped-def, type-arg]
        return several[number % len(several)]


TestHistories: Callable[[], None] = History.TestCase
TestHistories.settings = settings(  # type: ignore[attr-defined]
    max_examples=HISTORIES,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    print_blob=True,
)
