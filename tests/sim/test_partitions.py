"""Random histories of two sites, whose link is cut, loses packets, stands still and is long: each has a broker, a
router and a worker.

A client of the library reads one text, and one terminal, in every history. Unless the link stood still, and delivered
late what it held, no client is given two different tokens for one place, or new tokens of an attempt that another has
replaced, and a simple client misses at most what was on its way when the link was cut, and reads nothing twice. None of
this depends on the sites that workers say they run at."""

import functools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.sim.clients import ClientProcess, SimpleClient
from tests.sim.network import Bridge, Broker, Link
from tests.sim.system import MODEL, FrontendProcess, RouterProcess
from tests.sim.test_histories import HISTORIES
from tests.sim.world import world

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(5, 60)),
        st.tuples(st.just("ask simply"), st.integers(5, 60)),
        st.tuples(st.just("ask for one message"), st.integers(5, 40)),
        st.tuples(st.just("cut"), st.sampled_from([0.3, 1.4, 1.8, 2.2, 5.0, 20.0])),
        st.tuples(st.just("packets vanish"), st.sampled_from([0.3, 1.4, 2.6])),
        st.tuples(st.just("stand still"), st.sampled_from([0.3, 1.0, 1.4, 2.4, 6.0])),
        st.tuples(st.just("wait"), st.sampled_from([0.05, 0.3, 1.0, 2.5, 8.0])),
        st.tuples(st.just("cancel"), st.integers(0, 5)),
        st.tuples(st.just("engine dies"), st.integers(0, 1)),
        st.tuples(st.just("client's connection breaks"), st.integers(0, 3)),
    ),
    min_size=3,
    max_size=14,
)


class Sites:
    """Two sites with a link. Clients and routers are at each, so a client and its guardian are on the same side of a
    cut."""

    def __init__(self, seed: int, latency_s: float, workers_here: int, labels: tuple[str, str] = ("", "")) -> None:
        """`labels` are the sites of the workers, as they say."""
        self._closing = world(seed)
        self.world = self._closing.__enter__()
        self.brokers = [Broker(self.world), Broker(self.world)]
        self.brokers[1].name = "there"
        self.bridge = Bridge(self.world, *self.brokers)
        self.bridge.latency_s = latency_s
        places = [self.brokers[0]] * workers_here + [self.brokers[1]]
        self.frontends = [
            FrontendProcess(self.world, at, f"w{number}", site=labels[number]) for number, at in enumerate(places)
        ]
        self.routers = [
            RouterProcess(self.world, at, f"r{number}", site=site)
            for number, (at, site) in enumerate(zip(self.brokers, ("here", "there"), strict=True))
        ]
        self.clients = [ClientProcess(self.world, at, f"c{number}") for number, at in enumerate(self.brokers)]
        self.simple = [SimpleClient(self.world, at, f"s{number}") for number, at in enumerate(self.brokers)]
        self.may_repeat = False
        self.num_asked = 0
        self.world.run(0.8 + 4 * latency_s)

    def happen(self, event: str, value: float) -> None:
        self.num_asked += 1
        which = self.num_asked % 2
        match event:
            case "ask":
                for client in self.clients:
                    client.ask(round(value), seed=self.num_asked)
            case "ask simply":
                for simple in self.simple:
                    simple.ask(round(value), seed=self.num_asked)
            case "ask for one message":
                self.simple[which].ask(round(value), stream=False, seed=self.num_asked)
            case "cut":
                self.bridge.cut(value)
            case "packets vanish":
                self.bridge.vanish(value, 3.0)
            case "stand still":
                self.may_repeat = True
                self.bridge.stand_still(value)
            case "wait":
                self.world.run(value)
            case "cancel":
                self.clients[which].cancel(round(value))
            case "engine dies":
                self.frontends[round(value) % len(self.frontends)].engine_dies()
            case _:
                ends = [*self.clients, *self.simple]
                ends[round(value)].bus.cut(lingers=True)
        self.world.run(0.05)

    def check(self) -> None:
        for process in self.world.processes:
            assert process.faults == [], process
        for client in self.clients:
            for asked in client.asked:
                asked.check()
        if self.may_repeat:
            return
        for listener in (*self.clients, *self.simple):
            for heard in listener.heard.values():
                heard.check(ends_are_known=False)
        for simple in self.simple:
            for one in simple.asked:
                places = [token.place for token in one.tokens]
                assert places == sorted(set(places)), one

    def end(self) -> None:
        self.bridge.heal()
        everybody = [*self.clients, *self.simple]
        self.world.run_until(lambda: not any(client.open() for client in everybody), timeout_s=180.0)
        self.world.run(70.0)  # in which streams that nobody reads are given up
        self.check()
        for client in self.clients:
            assert all(asked.terminal is not None for asked in client.asked)
        for frontend in self.frontends:
            assert frontend.engine is not None
            assert frontend.engine.load().running == 0, frontend.frontend
        for router in self.routers:
            assert len(router.router.flights) == 0, router.router

    def close(self) -> None:
        self._closing.__exit__(None, None, None)


@given(
    seed=st.integers(0, 2**32),
    latency_s=st.sampled_from([0.0, 0.02, 0.075]),
    workers_here=st.integers(0, 1),
    labels=st.tuples(*[st.sampled_from(["", "here", "there"])] * 2),
    events=EVENTS,
)
@settings(
    max_examples=max(5, HISTORIES // 3),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_two_sites_whose_link_fails_give_every_client_one_text(
    seed: int, latency_s: float, workers_here: int, labels: tuple[str, str], events: list[tuple[str, float]]
) -> None:
    sites = Sites(seed, latency_s, workers_here, labels)
    try:
        for event, value in events:
            sites.happen(event, value)
            sites.check()
        sites.end()
    finally:
        sites.close()


@pytest.mark.parametrize("down_s", [1.5, 2.2, 5.0, 30.0])
@pytest.mark.parametrize("workers_here", [0, 1])
def test_a_link_that_is_down_cancels_no_stream_and_a_simple_client_misses_nothing(
    down_s: float, workers_here: int
) -> None:
    sites = Sites(1, 0.02, workers_here)
    try:
        for _ in range(2):
            for client in (sites.clients[0], sites.simple[0]):
                client.ask(50)
        sites.world.run(1.5)
        sites.bridge.cut(down_s)
        sites.end()
        for simple in sites.simple[0].asked:
            assert simple.is_whole
            assert len(simple.tokens) >= 50 - 2, "no more than what was on its way"
        assert all(asked.is_whole for asked in sites.clients[0].asked)
    finally:
        sites.close()


@pytest.mark.parametrize("stands_s", [0.3, 0.9, 1.3])
@pytest.mark.parametrize("stream", [True, False])
def test_a_simple_client_gets_an_end_that_was_lost_on_a_link_without_a_notice(stands_s: float, stream: bool) -> None:
    """The link stands still, as where packets vanish, and what it holds then is lost with its connection."""
    sites = Sites(1, 0.02, 0)
    try:
        sites.simple[0].ask(10, stream=stream, seed=7)
        sites.world.run(1.3 - stands_s)
        sites.bridge.stand_still(stands_s + 0.3)
        sites.world.run(stands_s)
        (asked,) = sites.simple[0].asked
        assert asked.terminal is None
        assert sites.frontends[0].engine is not None
        sites.bridge.cut(0.5)
        sites.bridge.heal()
        sites.world.run(9.0)
        assert asked.terminal is not None
        assert asked.terminal.finish_reason == "length"
        sites.end()
    finally:
        sites.close()


@pytest.mark.parametrize("is_asked", [False, True], ids=["the router's message is lost", "the end is lost again"])
def test_an_end_that_a_link_has_lost_is_published_until_it_has_crossed(is_asked: bool) -> None:
    """The link fails again, too shortly for anybody to notice, just when the end is to be repeated."""
    sites = Sites(1, 0.02, 0)
    try:
        sites.simple[0].ask(10, seed=7)
        sites.world.run(0.4)
        sites.bridge.vanish(1.2, 0.5)
        sites.world.run(1.2)
        (asked,) = sites.simple[0].asked
        assert asked.terminal is None
        at = sites.brokers[is_asked]

        def fail(sender: Link, subject: str, payload: bytes) -> None:
            if b'"finish_reason":"length"' in payload if is_asked else b"resync" in payload:
                at.before_routing = lambda *_: None
                sites.bridge.vanish(0.3, 0.2)

        at.before_routing = fail
        sites.world.run_until(lambda: sites.bridge.swallows, timeout_s=9.0)
        sites.world.run(0.5)
        assert asked.terminal is None
        sites.world.run(4.0)
        assert asked.terminal is not None
        assert asked.terminal.finish_reason == "length"
        sites.end()
    finally:
        sites.close()


@pytest.mark.parametrize("vanish_s", [1.2, 2.6])
def test_a_stream_whose_last_step_was_on_the_link_when_that_failed_outlives_it(vanish_s: float) -> None:
    """The router has the entry with the step's tokens, and not the seal behind its chunks."""
    sites = Sites(1, 0.02, 0, labels=("there", "there"))
    try:
        for client in (sites.clients[0], sites.simple[0]):
            client.ask(60)
        sites.world.run(1.5)
        there = sites.brokers[1]

        def fail(sender: Link, subject: str, payload: bytes) -> None:
            if subject.endswith(".seal"):
                there.before_routing = lambda *_: None
                sites.bridge.vanish(vanish_s, 4.0)

        there.before_routing = fail
        sites.world.run(0.3)
        assert sites.bridge.swallows
        sites.world.run(vanish_s + 4.0 - 0.3)
        (simple,), (exact,) = sites.simple[0].asked, sites.clients[0].asked
        assert not simple.ended
        assert exact.terminal is None
        assert len(sites.routers[1].router.flights) == 0, "its guardian is out of reach, and not gone"
        sites.world.run(4.0)
        assert simple.is_whole
        assert exact.is_whole
        assert exact.stream.request_id == exact.chunks[0].id, "nobody had to ask again"
        sites.end()
    finally:
        sites.close()


def is_known(sites: Sites) -> bool:
    """Whether the router here knows the worker there, and does not count it as lost."""
    (worker,) = sites.routers[0].router.fleet.workers_of(MODEL) or (None,)
    return worker is not None and not worker.lease_expired


@pytest.mark.parametrize("num_cuts", [1, 5])
def test_a_link_that_fails_again_before_a_worker_has_said_what_it_runs_costs_no_stream(num_cuts: int) -> None:
    """The streams have been placed again by then, at the same worker, of whose log the router knows nothing yet. It is
    no more than out of reach: not one that its requests kill."""
    sites = Sites(1, 0.02, 0, labels=("there", "there"))
    try:
        for client in (sites.clients[0], sites.simple[0]):
            client.ask(60)
        sites.world.run(1.5)
        sites.bridge.cut(3.0)
        sites.world.run(2.9)
        assert not is_known(sites)
        for _ in range(num_cuts):
            sites.brokers[1].before_routing = functools.partial(_lose_snapshot, sites)
            sites.world.run_until(lambda: is_known(sites), timeout_s=5.0)
            sites.world.run_until(lambda: not is_known(sites), timeout_s=4.0)
        sites.world.run(20.0)
        (simple,), (exact,) = sites.simple[0].asked, sites.clients[0].asked
        assert simple.is_whole
        assert exact.is_whole
        assert exact.stream.request_id == exact.chunks[0].id, "nobody had to ask again"
        (heard,) = sites.simple[0].heard.values()
        assert max(heard.workers) > 1, "it has been placed again"
        sites.end()
    finally:
        sites.close()


def _lose_snapshot(sites: Sites, sender: Link, subject: str, payload: bytes) -> None:
    """Lets the link fail when a snapshot is to cross it."""
    if b"running" in payload and b"parts" in payload:
        sites.brokers[1].before_routing = lambda *_: None
        sites.bridge.vanish(2.6, 3.0)


def test_a_stream_in_doubt_does_not_flow_because_of_a_probe_that_was_lost_before() -> None:
    """The router doubts that the worker still has the stream, whose end it has missed; and the link has swallowed the
    last probe without a notice, as if that had reached the client."""
    sites = Sites(1, 0.0, 0, labels=("there", "there"))
    try:
        sites.clients[0].ask(20, seed=7)
        sites.simple[0].ask(20, seed=8)
        sites.world.run(1.9)
        sites.bridge.cut(4.4)
        sites.world.run_until(lambda: sites.bridge.is_up, timeout_s=6.0)
        sites.world.run_until(lambda: is_known(sites), timeout_s=2.0)
        sites.bridge.vanish(1.2, 0.1)
        sites.world.run(8.0)
        for listener in (sites.clients[0], sites.simple[0]):
            (heard,) = listener.heard.values()
            heard.check()
        sites.end()
    finally:
        sites.close()
