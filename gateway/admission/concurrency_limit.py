"""Limits the number of open requests, and drains them when the gateway shuts down."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Protocol

from tokenbus.gateway.http.http_errors import OVERLOADED, SHUTTING_DOWN, ApiError
from tokenbus.protocol.wire import errors


class OpenRequest(Protocol):
    """A request that draining can end."""

    def cancel(self) -> None: ...

    def fail(self, error: errors.Error) -> None:
        """Ends it with an error."""
        ...


class ConcurrencyLimit:
    """Admits requests up to a limit, and none while the gateway drains."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self.num_open = 0
        self._tracked: set[OpenRequest] = set()
        self.is_draining = False
        self._grace_is_over = False
        self._drained = asyncio.Event()

    def __repr__(self) -> str:
        return f"<ConcurrencyLimit {self.num_open} of {self._max_requests}{', draining' if self.is_draining else ''}>"

    def resize(self, max_requests: int) -> None:
        """Changes the maximum number of open requests; existing ones stay."""
        self._max_requests = max_requests

    @contextlib.contextmanager
    def admit(self) -> Iterator[None]:
        """Counts a request as open during the block. Raises ApiError at the limit, or while the gateway drains."""
        if self.is_draining:
            raise ApiError(SHUTTING_DOWN)
        if self.num_open >= self._max_requests:
            raise ApiError(OVERLOADED)
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1
            if self.is_draining and not self.num_open:
                self._drained.set()

    @contextlib.contextmanager
    def track(self, one: OpenRequest) -> Iterator[None]:
        """Registers an open request during the block, so that draining can end it."""
        self._tracked.add(one)
        try:
            if self._grace_is_over:  # this request's body was still being read when the others were ended
                _end(one)
            yield
        finally:
            self._tracked.discard(one)

    async def drain(self, grace_s: float) -> None:
        """Stops admitting requests, waits up to `grace_s` for open ones, and ends the rest with `shutting_down`."""
        self.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                if self.num_open:
                    await self._drained.wait()
        self._grace_is_over = True
        for one in list(self._tracked):
            _end(one)


def _end(one: OpenRequest) -> None:
    one.cancel()
    one.fail(errors.make_error(errors.Code.SHUTTING_DOWN, "this gateway is shutting down"))
