"""Many pages share one view of the fleet, and none of them can keep the others from it."""

import asyncio
import contextlib
import json

import pytest

from tokenbus.client.wire.fleet_picture import FleetPicture
from tokenbus.gateway.console import viewers
from tokenbus.gateway.console.viewers import MAX_VIEWERS_OF_ONE, ConsoleViewers
from tokenbus.gateway.http.http_errors import ApiError


class Fleet:
    """Stands in for the fleet's viewer."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.picture, self.problem = FleetPicture(), ""
        self.num_looks = 0
        self.may_close = asyncio.Event()
        self.may_close.set()

    async def __aenter__(self) -> "Fleet":
        self.num_looks += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.may_close.wait()
        self.num_looks -= 1


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    monkeypatch.setattr(viewers, "_LEAST_S", 0.0)
    return Fleet()


async def _never() -> bool:
    return False


async def test_pages_with_one_key_leave_room_for_another_and_none_are_forgotten(fleet: Fleet) -> None:
    pages = ConsoleViewers(lambda: fleet)  # type: ignore[arg-type, return-value]
    async with contextlib.AsyncExitStack() as stack:
        for key_id in ["one"] * (MAX_VIEWERS_OF_ONE + 1) + ["two"]:
            page = await stack.enter_async_context(contextlib.aclosing(pages.events(key_id, _never)))
            fleet.changed.set()
            await anext(page, b"")
        assert len(pages) == MAX_VIEWERS_OF_ONE + 1, "also of those that were let in at the same time"
        with pytest.raises(ApiError):
            pages.check_room("one")
        pages.check_room("two")
        assert fleet.num_looks == 1
    assert len(pages) == 0
    fleet.changed.set()
    async with asyncio.timeout(5):
        while fleet.num_looks:
            await asyncio.sleep(0)


async def test_a_page_that_is_opened_while_the_view_is_closed_opens_another(fleet: Fleet) -> None:
    pages = ConsoleViewers(lambda: fleet)  # type: ignore[arg-type, return-value]
    fleet.may_close.clear()
    async with contextlib.aclosing(pages.events("", _never)) as page:
        fleet.changed.set()
        await anext(page)
    fleet.changed.set()
    for _ in range(8):  # the view is being closed then
        await asyncio.sleep(0)
    async with asyncio.timeout(5), contextlib.aclosing(pages.events("", _never)) as page:
        await anext(page)  # what was known before
        fleet.may_close.set()
        for _ in range(2):
            fleet.changed.set()
            await anext(page)


async def test_what_a_page_does_not_read_is_replaced_by_everything_at_once(fleet: Fleet) -> None:
    pages = ConsoleViewers(lambda: fleet)  # type: ignore[arg-type, return-value]
    deaf, other = pages.events("", _never), pages.events("", _never)
    async with contextlib.aclosing(deaf), contextlib.aclosing(other):
        fleet.changed.set()
        await anext(deaf)
        last = await anext(other)
        for _ in range(50):
            fleet.changed.set()
            last = await anext(other)
        seqs, wholes = [], 0
        while not seqs or seqs[-1] < _told(last)["seq"]:
            told = _told(await anext(deaf))
            seqs.append(told["seq"])
            wholes += told["whole"]
        assert len(seqs) < 20
        assert wholes == 1


def _told(event: bytes) -> dict[str, int]:
    told: dict[str, int] = json.loads(event.removeprefix(b"data: "))
    return told
