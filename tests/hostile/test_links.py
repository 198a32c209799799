"""Links between sites go down, stand still, are long and lose packets, and no stream is cancelled for that.

They take minutes, so that only `make hostile` runs them; `tests/faults/test_links.py` has a short one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.hostile import scale
from tests.hostile.test_brokers import clients_at, load_through, nothing, start
from tests.support.cluster import Cluster
from tests.support.exact_client import ask
from tests.support.link import Link, opened
from tests.support.ports import free_ports
from tests.support.system import System

pytestmark = pytest.mark.skipif(not scale.IS_LONG, reason="runs in `make hostile`")

DOWN_S = (1.5, 2.2, 5.0, 30.0)


class Sites(NamedTuple):
    """Brokers of two sites, `here` with the clients, and what lies between."""

    system: System
    here: str
    there: str
    links: tuple[Link, ...]

    async def be_cut(self, seconds: float) -> None:
        for link in self.links:
            link.cut()
        await asyncio.sleep(seconds)
        for link in self.links:
            link.restore()

    async def stand_still(self, seconds: float) -> None:
        for link in self.links:
            link.stall()
        await asyncio.sleep(seconds)
        for link in self.links:
            link.restore()


@contextlib.asynccontextmanager
async def leaf_sites(folder: Path, rtt_s: float = 0.0, loss: float = 0.0) -> AsyncIterator[Sites]:
    """A hub here and a leaf node there."""
    cluster = Cluster(folder)
    try:
        port = await cluster.add_hub()
        async with opened(port, rtt_s, loss) as link:
            await cluster.add_leaf("leaf", link.port)
            system = System(cluster["hub"], folder)
            yield Sites(system, cluster["hub"].url, cluster["leaf"].url, (link,))
            await system.stop()
    finally:
        cluster.stop()


@contextlib.asynccontextmanager
async def clusters(folder: Path, rtt_s: float = 0.0, loss: float = 0.0) -> AsyncIterator[Sites]:
    """Two clusters of one server each, which gateways join into a supercluster."""
    cluster = Cluster(folder)
    ports = free_ports(2)
    try:
        async with opened(ports[0], rtt_s, loss) as here, opened(ports[1], rtt_s, loss) as there:
            await cluster.add_gateway("here", ports[0], here.port, {"there": there.port})
            await cluster.add_gateway("there", ports[1], there.port, {"here": here.port})
            await cluster.until_joined(("here", "there"))
            system = System(cluster["here"], folder)
            yield Sites(system, cluster["here"].url, cluster["there"].url, (here, there))
            await system.stop()
    finally:
        cluster.stop()


SITES = {"leaf": leaf_sites, "gateway": clusters}


@pytest.fixture(params=SITES)
async def sites(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Sites]:
    async with SITES[request.param](tmp_path) as made:
        yield made


@pytest.mark.parametrize("down_s", DOWN_S)
async def test_workers_beyond_a_link_that_was_down_continue_every_stream(sites: Sites, down_s: float) -> None:
    start(sites.system, {"router": sites.here}, dict.fromkeys(("a", "b"), sites.there))
    async with clients_at(sites.here) as places:
        (answers,) = await load_through(sites.be_cut(down_s), places)
        assert (answers.ends, answers.whole_ends) == ({"length"}, {"length"})
        assert answers.missing <= 10, "no more than what was in flight"
        assert answers.repeated == 0


@pytest.mark.parametrize("down_s", DOWN_S)
async def test_sites_of_which_each_has_all_it_needs_continue_every_stream(sites: Sites, down_s: float) -> None:
    start(sites.system, {"here": sites.here, "there": sites.there}, {"a": sites.here, "b": sites.there})
    async with clients_at(sites.here, sites.there) as places:
        for router in ("here", "there"):  # else the clients of one are those of the other, alone beyond the link
            await sites.system.until_logged(router, "router_ready")
        for answers in await load_through(sites.be_cut(down_s), places):
            assert (answers.ends, answers.whole_ends) == ({"length"}, {"length"})
            assert answers.missing <= 10
            assert answers.repeated == 0


async def test_clients_alone_beyond_a_link_that_is_down_for_a_moment_lose_nothing(sites: Sites) -> None:
    start(sites.system, {"router": sites.there}, dict.fromkeys(("a", "b"), sites.there))
    async with clients_at(sites.here) as places:
        (answers,) = await load_through(sites.be_cut(0.5), places)
        assert (answers.ends, answers.whole_ends) == ({"length"}, {"length"})
        assert answers.repeated == 0


@pytest.mark.parametrize("seconds", [1.0, 4.0])
async def test_a_link_that_stands_still_repeats_no_more_than_what_was_on_its_way(sites: Sites, seconds: float) -> None:
    start(sites.system, {"router": sites.here}, {"a": sites.here, "b": sites.there})
    async with clients_at(sites.here) as places:
        (answers,) = await load_through(sites.stand_still(seconds), places)
        assert answers.ends <= {"length", "worker_lost"}
        assert answers.missing <= 10
        assert answers.repeated <= 250, "1.5 s of text, and what the link held"


@pytest.mark.parametrize(("rtt_s", "loss"), [(0.04, 0.0), (0.04, 0.01), (0.15, 0.01)])
@pytest.mark.parametrize("name", SITES)
async def test_a_long_link_that_loses_packets_costs_no_stream_anything(
    tmp_path: Path, name: str, rtt_s: float, loss: float
) -> None:
    async with SITES[name](tmp_path, rtt_s, loss) as sites:
        start(sites.system, {"router": sites.here}, dict.fromkeys(("a", "b"), sites.there))
        async with clients_at(sites.here) as places:
            (answers,) = await load_through(nothing(), places)
            answers.check_undisturbed()
            assert (await ask(places[0].library, 5).end(10)).is_whole
        assert not [line for one in "ab" for line in sites.system.log(one) if line["event"] == "self_fenced"]
