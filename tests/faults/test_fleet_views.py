"""A view of the fleet stays true when workers and routers come and go."""

import asyncio
from collections.abc import Callable

from tests.support.exact_client import until_ready
from tests.support.system import System
from tokenbus.client.wire.fleet_viewer import FleetViewer
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import codec


async def _until(viewer: FleetViewer, holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await viewer.changed.wait()
            viewer.changed.clear()


def _workers(viewer: FleetViewer) -> list[str]:
    return [f"{one.sheet.worker_id} {one.numbers.state}" for one in viewer.picture.workers()]


async def test_a_view_survives_the_router_that_shows_it_and_sees_workers_come_and_go(system: System) -> None:
    system.router("one")
    system.router("two")
    system.worker("a", "--engine", "sim", model="dynamo")
    await until_ready(await system.connect(), 1)
    async with (
        await WireClient.connect(system.url, encoding=codec.Encoding.MSGPACK) as client,
        client.view_fleet() as viewer,
    ):
        await _until(viewer, lambda: viewer.picture.is_complete and len(viewer.picture.routers()) == 2)
        assert _workers(viewer) == ["a ready"]
        (asked,) = viewer.picture.requests(asyncio.get_running_loop().time())[1:]
        system.kill("one" if asked.router_id == "one" else "two")
        await _until(viewer, lambda: viewer.picture.is_complete and len(viewer.picture.routers()) == 1)
        assert _workers(viewer) == ["a ready"]
        system.worker("b", "--engine", "sim", model="dynamo")
        await _until(viewer, lambda: _workers(viewer) == ["a ready", "b ready"])
        system.kill("b")
        await _until(viewer, lambda: "b ready" not in _workers(viewer))
