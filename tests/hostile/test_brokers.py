"""Brokers restart, stand still, send their clients away or are lost, and each kind of client copes with it.

They take minutes, so that only `make hostile` runs them; `tests/faults` has short ones."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.hostile import scale
from tests.support.cluster import Cluster
from tests.support.exact_client import ask, until_idle, until_ready
from tests.support.raw_client import Answer, RawClient, check_stream
from tests.support.system import System
from tokenbus.client.wire.wire_client import WireClient

pytestmark = pytest.mark.skipif(not scale.IS_LONG, reason="runs in `make hostile`")

NUM_TOKENS = 600
"""6 s of the simulated worker."""
SIMULATED = ("--engine", "sim", "--sim-speedup", "5")
SHORTER_S, LONGER_S = 0.8, 4.0
"""Than a frontend's fence and a router's patience with a silent worker."""


class Clients(NamedTuple):
    """Clients of every kind at one server."""

    bare: RawClient
    library: WireClient

    @classmethod
    async def connect(cls, url: str) -> "Clients":
        return cls(await RawClient.connect(url, reconnects=True), await WireClient.connect(url))

    async def close(self) -> None:
        await self.library.close()
        await self.bare.close()


class Answers(NamedTuple):
    """Answers that plain and whole clients at one server have got."""

    plain: list[Answer]
    whole: list[Answer]

    @property
    def ends(self) -> set[str]:
        """The finish reasons and error codes of the plain ones, each of which has ended exactly once."""
        assert {len(answer.terminals) for answer in self.plain} == {1}
        return {_end(answer) for answer in self.plain}

    @property
    def whole_ends(self) -> set[str]:
        """The ends of the whole ones, each of which has at most one; `lost` for those without an answer."""
        assert all(len(answer.terminals) <= 1 for answer in self.whole)
        return {_end(answer) if answer.terminals else "lost" for answer in self.whole}

    @property
    def missing(self) -> int:
        return max(answer.flaws[0] for answer in self.plain)

    @property
    def repeated(self) -> int:
        return max(answer.flaws[1] for answer in self.plain)

    def check_undisturbed(self) -> None:
        for answer in self.plain:
            check_stream(answer)
        assert (self.ends, self.whole_ends) == ({"length"}, {"length"})


def _end(answer: Answer) -> str:
    (terminal,) = answer.terminals
    return str(terminal["error"]["code"] if terminal.get("error") else terminal["finish_reason"])


async def load_through(event: Awaitable[object], places: Sequence[Clients], num_workers: int = 2) -> list[Answers]:
    """Lets something happen to running streams, after which there are `num_workers` workers. The streams of the library
    must all be whole in the end; returns those of the others at each place."""
    request = {"prompt": "Once upon a time", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    answers = [
        Answers(
            [await place.bare.generate(request) for _ in range(6)],
            [await place.bare.generate(request | {"stream": False}) for _ in range(3)],
        )
        for place in places
    ]
    exact = [ask(place.library, NUM_TOKENS) for place in places for _ in range(6)]
    await asyncio.gather(*(one.speaks() for one in exact))
    await event
    for one in await asyncio.gather(*(one.end() for one in exact)):
        one.check()
        assert one.is_whole, one.terminal
    for answer in (answer for there in answers for answer in there.plain + there.whole):
        with contextlib.suppress(TimeoutError):
            await answer.terminal(10)
    await until_ready(places[-1].bare, num_workers)
    await until_idle(places[-1].bare)
    return answers


def start(system: System, routers: dict[str, str], workers: dict[str, str]) -> None:
    """Starts routers and workers, by name, each at a URL."""
    for name, url in routers.items():
        system.router(name, "--policy", "round_robin", "--nats", url)
    for name, url in workers.items():
        system.worker(name, "--nats", url, *SIMULATED, model="steps-of-50ms")


@contextlib.asynccontextmanager
async def clients_at(*urls: str, num_workers: int = 2) -> AsyncIterator[list[Clients]]:
    places = [await Clients.connect(url) for url in urls]
    try:
        await until_ready(places[-1].bare, num_workers)
        yield places
    finally:
        for place in places:
            await place.close()


# One broker


@pytest.fixture
async def places(system: System) -> AsyncIterator[list[Clients]]:
    """Clients of a system with one broker, two routers and two workers."""
    start(system, dict.fromkeys(("router-a", "router-b"), system.url), dict.fromkeys(("a", "b"), system.url))
    async with clients_at(system.url) as places:
        yield places


async def test_a_broker_that_stands_still_for_a_moment_costs_nobody_anything(
    system: System, places: list[Clients]
) -> None:
    async def stand_still() -> None:
        with system.broker_frozen():
            await asyncio.sleep(SHORTER_S)

    (answers,) = await load_through(stand_still(), places)
    answers.check_undisturbed()


async def test_a_broker_that_stands_still_for_longer_ends_streams_or_lets_them_go_on_and_spoils_none(
    system: System, places: list[Clients]
) -> None:
    async def stand_still() -> None:
        with system.broker_frozen():
            await asyncio.sleep(LONGER_S)

    (answers,) = await load_through(stand_still(), places)
    assert answers.ends <= {"length", "worker_lost"}
    assert answers.whole_ends <= {"length", "worker_lost"}
    assert (answers.missing, answers.repeated) == (0, 0)


@pytest.mark.parametrize("away_s", [0.0, SHORTER_S])
async def test_a_broker_that_is_soon_back_may_cost_a_plain_client_a_chunk(
    system: System, places: list[Clients], away_s: float
) -> None:
    (answers,) = await load_through(system.restart_broker(away_s), places)
    assert answers.ends == {"length"}
    assert answers.whole_ends <= {"length", "lost"}
    assert answers.missing <= 20, "what was published until the client was back"
    assert answers.repeated == 0


async def test_a_broker_that_is_away_for_longer_ends_the_streams_of_plain_clients(
    system: System, places: list[Clients]
) -> None:
    (answers,) = await load_through(system.restart_broker(LONGER_S), places)
    assert answers.ends == {"worker_lost"}
    assert answers.whole_ends == {"worker_lost"}
    assert answers.repeated == 0


# A cluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Three servers. A worker is at each, a router at `b` and at `c`."""
    cluster = await Cluster.start(tmp_path)
    yield cluster
    cluster.stop()


@pytest.fixture
async def members(cluster: Cluster, tmp_path: Path) -> AsyncIterator[list[Clients]]:
    """Clients at each of the three servers."""
    system = System(cluster["a"], tmp_path)
    urls = [cluster[name].url for name in "abc"]
    start(system, {"router-b": urls[1], "router-c": urls[2]}, dict(zip("abc", urls, strict=True)))
    try:
        async with clients_at(*urls, num_workers=3) as places:
            yield places
    finally:
        await system.stop()


async def kill(cluster: Cluster, name: str) -> None:
    cluster[name].kill()


async def send_away(cluster: Cluster, name: str) -> None:
    cluster.send_away(name)


async def stand_still(cluster: Cluster, name: str, seconds: float) -> None:
    with cluster.frozen(name):
        await asyncio.sleep(seconds)


@pytest.mark.parametrize("name", ["a", "b"])  # a worker's and clients'; a router's too
async def test_a_server_of_a_cluster_that_is_killed_costs_plain_clients_what_it_had_not_passed_on(
    cluster: Cluster, members: list[Clients], name: str
) -> None:
    answers = await load_through(kill(cluster, name), members)
    for place, there in zip("abc", answers, strict=True):
        assert there.ends == {"length"}
        assert there.whole_ends <= {"length", "lost"}
        assert there.missing <= (50 if place == name else 5)
        assert there.repeated == 0


async def test_a_server_of_a_cluster_that_is_restarted_is_done_without_and_may_be_killed_again(
    cluster: Cluster, members: list[Clients]
) -> None:
    for name in "abc":
        for there in await load_through(cluster.restart(name), members):
            assert there.ends == {"length"}
            assert there.repeated == 0
        await cluster.until_whole()


@pytest.mark.parametrize("name", ["a", "b"])
async def test_a_server_of_a_cluster_that_sends_its_clients_away_costs_those_of_others_nothing(
    cluster: Cluster, members: list[Clients], name: str
) -> None:
    answers = await load_through(send_away(cluster, name), members)
    for place, there in zip("abc", answers, strict=True):
        if place != name:  # plain clients that are connected there are cut off when the server ends
            there.check_undisturbed()
    await cluster.until_ended(name)


async def test_a_server_of_a_cluster_that_stands_still_for_a_moment_costs_nobody_anything(
    cluster: Cluster, members: list[Clients]
) -> None:
    for there in await load_through(stand_still(cluster, "a", SHORTER_S), members):
        there.check_undisturbed()


@pytest.mark.parametrize("name", ["a", "b"])
async def test_a_server_of_a_cluster_that_stands_still_for_longer_ends_streams_of_its_workers(
    cluster: Cluster, members: list[Clients], name: str
) -> None:
    answers = await load_through(stand_still(cluster, name, LONGER_S), members)
    for place, there in zip("abc", answers, strict=True):
        if place != name:  # plain clients that stay there lose what others had for them
            assert there.ends <= {"length", "worker_lost"}
            assert there.whole_ends <= {"length", "worker_lost"}
            assert (there.missing, there.repeated) == (0, 0)


async def test_a_server_of_a_cluster_that_stands_still_is_done_without_after_six_seconds(
    cluster: Cluster, members: list[Clients]
) -> None:
    library = members[2].library
    with cluster.frozen("b"):
        await asyncio.sleep(6.5)
        began = time.monotonic()
        for _ in range(20):
            assert (await ask(library, 5).end(2)).is_whole
        assert time.monotonic() - began < 10


# A leaf node


@pytest.fixture
async def leaf(tmp_path: Path) -> AsyncIterator[Cluster]:
    leaf = await Cluster.start_leaf(tmp_path)
    yield leaf
    leaf.stop()


@pytest.fixture
async def behind(leaf: Cluster, tmp_path: Path) -> AsyncIterator[System]:
    """Two routers at the hub, two workers at the leaf node."""
    system = System(leaf["hub"], tmp_path)
    hub, there = leaf["hub"].url, leaf["leaf"].url
    start(system, dict.fromkeys(("router-a", "router-b"), hub), dict.fromkeys(("a", "b"), there))
    yield system
    await system.stop()


async def nothing() -> None:
    pass


async def test_workers_behind_a_leaf_node_serve_clients_on_both_sides(leaf: Cluster, behind: System) -> None:
    async with clients_at(leaf["leaf"].url, leaf["hub"].url) as places:
        for answers in await load_through(nothing(), places):
            answers.check_undisturbed()
        gone = await RawClient.connect(leaf["hub"].url)
        answer = await gone.generate({"prompt": "Once upon a time", "max_tokens": 5_000, "ignore_eos": True})
        await answer.until(5)
        await gone.close()
        await until_idle(places[0].bare, 20)


async def test_a_worker_behind_a_leaf_node_that_is_killed_is_done_without(leaf: Cluster, behind: System) -> None:
    async def end_one() -> None:
        behind.signal("a", signal.SIGKILL)

    async with clients_at(leaf["hub"].url) as places:
        (answers,) = await load_through(end_one(), places, num_workers=1)
        assert answers.ends <= {"length", "worker_lost"}
        assert (answers.missing, answers.repeated) == (0, 0)


async def test_a_hub_that_is_soon_back_costs_plain_clients_what_came_until_its_leaf_node_was_back(
    leaf: Cluster, behind: System
) -> None:
    async with clients_at(leaf["hub"].url) as places:
        (answers,) = await load_through(leaf.restart("hub"), places)
        assert answers.ends == {"length"}
        assert answers.missing <= 200
        assert answers.repeated == 0


async def test_a_hub_that_is_away_for_longer_costs_plain_clients_what_came_until_its_leaf_node_was_back(
    leaf: Cluster, behind: System
) -> None:
    async with clients_at(leaf["hub"].url) as places:
        (answers,) = await load_through(leaf.restart("hub", LONGER_S), places)
        assert answers.ends <= {"length", "worker_lost"}
        assert answers.repeated == 0


async def test_a_leaf_node_that_is_soon_back_may_cost_a_plain_client_a_chunk(leaf: Cluster, behind: System) -> None:
    async with clients_at(leaf["hub"].url) as places:
        (answers,) = await load_through(leaf.restart("leaf"), places)
        assert answers.ends == {"length"}
        assert answers.missing <= 5
        assert answers.repeated == 0


async def test_a_leaf_node_that_stands_still_for_a_moment_costs_nobody_anything(leaf: Cluster, behind: System) -> None:
    async with clients_at(leaf["hub"].url) as places:
        (answers,) = await load_through(stand_still(leaf, "leaf", SHORTER_S), places)
        answers.check_undisturbed()


async def test_a_leaf_node_that_stands_still_for_longer_may_repeat_words_to_plain_clients(
    leaf: Cluster, behind: System
) -> None:
    async with clients_at(leaf["hub"].url) as places:
        (answers,) = await load_through(stand_still(leaf, "leaf", LONGER_S), places)
        assert answers.ends <= {"length", "worker_lost"}
        assert answers.missing == 0
