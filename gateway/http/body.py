"""Reads the body of a request within limits, and detects client disconnects."""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from tokenbus.gateway.http.body_memory import HeldBody
from tokenbus.gateway.http.http_errors import BODY_TIMEOUT, UNSUPPORTED_MEDIA_TYPE, ApiError, too_large
from tokenbus.protocol import tasks

ParsedT = TypeVar("ParsedT")
BODY_TIMEOUT_S = 30.0
_PARSED_AT_ONCE_BYTES = 256 * 1024
"""Bodies up to this size are parsed within milliseconds."""
_MAX_DISCARDED_BYTES = 16 * 1024 * 1024
"""Bytes of a body that are read and discarded once it is too large: a client that is still sending would not read
why."""


class ClientDisconnectedError(Exception):
    """The HTTP client has closed its connection."""


async def read(request: Request, limit_bytes: int, held: HeldBody) -> bytes:
    """Returns the JSON body of a request.

    Raises ClientDisconnectedError, and ApiError if it is not JSON, too large or too slow, or if memory is short."""
    # A foreign web page in a browser can send other content types without a preflight request.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(UNSUPPORTED_MEDIA_TYPE)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body, num_bytes = await _read(request.receive, limit_bytes, held)
    except TimeoutError as error:
        raise ApiError(BODY_TIMEOUT) from error
    if num_bytes > limit_bytes:
        raise ApiError(too_large(limit_bytes))
    return body


class LargeBodyParser:
    """Parses large bodies in a thread, one at a time: in the event loop they would hold up other requests."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<LargeBodyParser, {'busy' if self._turn.locked() else 'idle'}>"

    async def parse(self, parse: Callable[[], ParsedT], num_bytes: int) -> ParsedT:
        """Returns a parser's result, or raises its exception."""
        if num_bytes <= _PARSED_AT_ONCE_BYTES:
            return parse()
        async with self._turn:
            return await asyncio.to_thread(_without_collections, parse)


def _without_collections(parse: Callable[[], ParsedT]) -> ParsedT:
    """Parses with garbage collection disabled: everything created is in use, and scanning it stops every thread."""
    gc.disable()
    try:
        return parse()
    finally:
        gc.enable()


async def _read(receive: Receive, limit_bytes: int, held: HeldBody) -> tuple[bytes, int]:
    """Returns the part of the body within the limit, and the number of bytes received."""
    parts: list[bytes] = []
    num_bytes = 0
    while num_bytes <= limit_bytes + _MAX_DISCARDED_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes <= limit_bytes:
            held.add(len(part))
            parts.append(part)
        if not message.get("more_body", False):
            break
    return b"".join(parts), num_bytes


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`; if the client disconnects first, cancels it and raises ClientDisconnectedError.

    The body must have been read. ASGI reports a disconnect after a complete response too."""
    working, watching = tasks.awaited(work), tasks.awaited(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnectedError
        working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait((working, watching))
        for task in (working, watching):
            if not task.cancelled():
                task.exception()  # or it would be logged as never retrieved
        # A failed task refers to its exception, whose traceback refers to this frame: the frame must not complete the
        # cycle, or whole bodies would stay until the next garbage collection.
        del task, working, watching


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
