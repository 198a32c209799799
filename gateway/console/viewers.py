"""The open pages of the console share one view of the fleet. While none is open, the gateway looks at nothing."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from tokenbus.client.wire.fleet_viewer import FleetViewer
from tokenbus.gateway.console.feed import FleetFeed
from tokenbus.gateway.http.http_errors import OVERLOADED, ApiError
from tokenbus.protocol import tasks

ResultT = TypeVar("ResultT")

MAX_VIEWERS = 128
MAX_VIEWERS_OF_ONE = 64
"""Pages with one key: no single one keeps all others out."""
_MAX_WAITING = 8
"""Events that wait for a page that reads slowly; then it gets everything at once instead."""
_LEAST_S = 0.25
_SILENT_S = 2.0
"""The longest time between two events: a page that gets none knows that the gateway is gone."""


class ConsoleViewers:
    """All open pages of one gateway."""

    def __init__(self, view_fleet: Callable[[], FleetViewer]) -> None:
        self._view_fleet = view_fleet
        self._pages: dict[asyncio.Queue[bytes], str] = {}
        """The key of each page, by the events that wait for it."""
        self._feed = FleetFeed()
        self._looking: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<ConsoleViewers, {len(self._pages)}>"

    def __len__(self) -> int:
        return len(self._pages)

    def check_room(self, key_id: str) -> None:
        """Raises ApiError if no further page may be opened, with this key if it is not empty."""
        if not self._has_room(key_id):
            raise ApiError(OVERLOADED)

    def _has_room(self, key_id: str) -> bool:
        of_one = list(self._pages.values()).count(key_id) if key_id else 0
        return len(self._pages) < MAX_VIEWERS and of_one < MAX_VIEWERS_OF_ONE

    async def events(self, key_id: str, is_over: Callable[[], Awaitable[bool]]) -> AsyncIterator[bytes]:
        """Yields one page's events until `is_over`, which is asked at least every two seconds; none if the room has
        been taken since it was checked."""
        if not self._has_room(key_id):
            return
        waiting: asyncio.Queue[bytes] = asyncio.Queue(_MAX_WAITING)
        self._pages[waiting] = key_id
        if self._looking is None:
            self._looking = tasks.background("look at the fleet for the console", self._look())
        elif self._feed.has_begun:
            waiting.put_nowait(self._feed.whole())
        try:
            while not await is_over():
                if (event := await _within(waiting.get(), _SILENT_S)) is not None:
                    yield event
        finally:
            del self._pages[waiting]

    async def _look(self) -> None:
        """Sends an event after each digest, as long as a page is open."""
        try:
            while self._pages:  # one may be opened while the view before is closed
                self._feed = FleetFeed()
                async with self._view_fleet() as viewer:
                    await self._follow(viewer)
        finally:
            self._looking = None

    async def _follow(self, viewer: FleetViewer) -> None:
        while self._pages:
            await asyncio.sleep(_LEAST_S)  # several routers' digests are one event
            await _within(viewer.changed.wait(), _SILENT_S)
            viewer.changed.clear()
            is_first = not self._feed.has_begun
            event = self._feed.update(viewer.picture, viewer.problem, round(time.time() * 1e3))
            self._send(self._feed.whole() if is_first else event)

    def _send(self, event: bytes) -> None:
        for waiting in self._pages:
            if waiting.full():  # a page that reads slowly, or not at all
                while not waiting.empty():
                    waiting.get_nowait()
                event_for_it = self._feed.whole()
            else:
                event_for_it = event
            waiting.put_nowait(event_for_it)


async def _within(awaited: Awaitable[ResultT], seconds: float) -> ResultT | None:
    """Returns a result that comes in time, else None."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await awaited
    return None
