"""How many requests are open at a time, and how the gateway is left: nothing new, then what is open ends."""

import asyncio
import contextlib
from collections.abc import Iterator

from tokenbus.client import Stream
from tokenbus.gateway.openai.error_responses import OVERLOADED, SHUTTING_DOWN, ApiError
from tokenbus.protocol.wire import errors


class ConcurrencyLimit:
    """The one through which every request comes."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._num_open = 0
        self._streams: set[Stream] = set()
        self._is_draining = False
        self._is_over = False
        self._emptied = asyncio.Event()

    def __repr__(self) -> str:
        return f"<ConcurrencyLimit {self._num_open} of {self._max_requests}{' closed' if self._is_draining else ''}>"

    def resize(self, max_requests: int) -> None:
        """How many may be open, from now on."""
        self._max_requests = max_requests

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def num_open(self) -> int:
        return self._num_open

    @contextlib.contextmanager
    def admit(self) -> Iterator[None]:
        """While a request is open. Raises ApiError where there is no room, or no more will be taken."""
        if self._is_draining:
            raise ApiError(SHUTTING_DOWN)
        if self._num_open >= self._max_requests:
            raise ApiError(OVERLOADED)
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            if self._is_draining and not self._num_open:
                self._emptied.set()

    @contextlib.contextmanager
    def track(self, stream: Stream) -> Iterator[None]:
        """While a request waits for its stream."""
        self._streams.add(stream)
        try:
            if self._is_over:
                _end(stream)
            yield
        finally:
            self._streams.discard(stream)

    async def drain(self, grace_s: float) -> None:
        """Takes nothing new, waits so long for what is open, and has the rest end with `shutting_down`."""
        self._is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                if self._num_open:
                    await self._emptied.wait()
        self._is_over = True
        for stream in list(self._streams):
            _end(stream)


def _end(stream: Stream) -> None:
    stream.cancel()
    stream.fail(errors.make_error(errors.Code.SHUTTING_DOWN, "this gateway is shutting down"))
