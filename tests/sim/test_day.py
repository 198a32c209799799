"""A day in virtual time: every hour brings the same kinds of requests and faults, and leaves nothing behind."""

import collections
import functools
import gc
import random
import sys
from collections.abc import Iterator

import pytest

from tests.sim.clients import ClientProcess, SimpleClient
from tests.sim.network import Broker
from tests.sim.system import FrontendProcess, RouterProcess, kill
from tests.sim.world import World, world
from tokenbus.router.fleet import stats
from tokenbus.worker.streams import router_reach

HOURS = 24
_WARM_UP_HOURS = 6
_BUSY_S, _QUIET_S = 480.0, 3_000.0
_TURNS = 24
_NOISE_BYTES = 16_384
"""Sizes of tables go up and down by so much. After the first hours there are 1,700 requests, and if each left only a
number behind, that would be 54,000 bytes."""


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """Lets the collector see caches of modules, too."""
    gc.unfreeze()
    yield
    gc.freeze()


class Day:
    """One router and one worker live through the day. Each hour others join them for a while, with new clients."""

    def __init__(self, made: World) -> None:
        self.world = made
        self.broker = Broker(made)
        self.rng = random.Random(1)
        self.router = RouterProcess(made, self.broker, "r")
        self.frontend = FrontendProcess(made, self.broker, "w")
        self.num_asked = 0

    def hour(self, number: int) -> None:
        """Brings a hundred requests of all kinds and each kind of fault, and then quiet."""
        router = RouterProcess(self.world, self.broker, f"r{number}")
        frontend = FrontendProcess(self.world, self.broker, f"w{number}")
        client = ClientProcess(self.world, self.broker, f"c{number}")
        simple = SimpleClient(self.world, self.broker, f"s{number}")
        faults = [
            lambda: self.router.bus.cut(lingers=True),
            lambda: self.frontend.bus.cut(lingers=True),
            lambda: self.frontend.engine_dies(),
            lambda: self.frontend.fence_twice(),
            self._restart_broker,
            lambda: client.bus.cut(lingers=True),
        ]
        self.rng.shuffle(faults)
        # the dead have streams, which the others continue
        faults += [
            lambda: kill(router.process, router.bus),
            lambda: kill(frontend.process, frontend.bus, frontend.incoming),
        ]
        for turn in range(_TURNS):
            self._ask(client, simple)
            if turn % 3 == 2:
                self.world.run(self.rng.random() * 2)
                faults[turn // 3]()
            self.world.run(_BUSY_S / _TURNS)
        self.world.run(60.0)
        assert not client.open(), "every request has its end"
        assert not simple.open(), "every request has its end"
        kill(client.process, client.bus)
        kill(simple.process, simple.bus)
        self.world.run(_QUIET_S)
        for process in self.world.processes:
            assert process.faults == [], process
        self.world.bury_dead()
        self.world.run(1.0)  # until the broker has dropped their connections

    def _ask(self, client: ClientProcess, simple: SimpleClient) -> None:
        """Sends four requests: some are cancelled, some end by a deadline, some wait since all lanes are taken."""
        for _ in range(4):
            self.num_asked += 1
            kind, max_tokens = self.rng.randrange(8), self.rng.choice([1, 5, 20, 60])
            if kind == 0:
                client.ask(max_tokens, timeout_ms=700.0, seed=self.num_asked)
            elif kind == 1:
                client.ask(max_tokens, prompt=f"hello {self.num_asked}", session_id=f"of {self.num_asked}")
            elif kind == 2:
                client.tokenize(f"some {self.num_asked} words")
                client.rerank(request_id=f"rank-{self.num_asked}")
            elif kind == 3:
                client.ask(2, model=f"no-{self.num_asked}")
            elif kind < 6:
                simple.ask(max_tokens, stream=kind == 4, session_id=f"of {self.num_asked % 7}")
            else:
                client.ask(max_tokens, stream=kind == 6, seed=self.num_asked)
        if self.rng.random() < 0.5:
            self.world.run(0.2)
            client.cancel(-1)

    def _restart_broker(self) -> None:
        self.broker.die()
        self.world.at(self.world.now + 1.0, self.broker.restart)


def held() -> collections.Counter[str]:
    """Returns the bytes that all Python objects take, by type, without caches of what can be computed again."""
    for one in gc.get_objects():
        if isinstance(one, functools._lru_cache_wrapper) and str(one.__module__).startswith("tokenbus."):
            one.cache_clear()
    gc.collect()
    objects = gc.get_objects()
    others = {id(one): one for each in objects for one in gc.get_referents(each) if not gc.is_tracked(one)}
    sizes = collections.Counter[str]()
    for one in (*objects, *others.values()):
        sizes[f"{type(one).__module__}.{type(one).__qualname__}"] += sys.getsizeof(one)
    return sizes


@pytest.mark.long
@pytest.mark.usefixtures("unfrozen")
def test_a_day_of_requests_and_faults_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    # tables that keep their newest entries are full after a few hours
    monkeypatch.setattr(router_reach, "_MAX_ROUTERS", 4)
    monkeypatch.setattr(stats, "_MAX_SAMPLES", 64)
    with world(seed=1) as made:
        day = Day(made)
        made.run(2.0)
        day.router.router._traces._capacity = 100
        for number in range(_WARM_UP_HOURS):
            day.hour(number)
        before = held()  # which takes some memory itself
        before = held()
        for number in range(_WARM_UP_HOURS, HOURS):
            day.hour(number)
        after = held()
    grown = after - before
    assert grown.total() - (before - after).total() < _NOISE_BYTES, grown.most_common(20)
