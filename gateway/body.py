"""Reads the body of a request within bounds, and notices when its sender goes away."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.requests import Request
from starlette.types import Receive

from tokenbus.gateway.openai.error_responses import BODY_TIMEOUT, UNSUPPORTED_MEDIA_TYPE, ApiError, too_large

BODY_TIMEOUT_S = 30.0
"""In which a body must have come."""
_MAX_DISCARDED_BYTES = 16 * 1024 * 1024
"""Of a body that is too large so much is read and thrown away: who still sends would not read why it was refused."""


class ClientDisconnectedError(Exception):
    """The HTTP client went away."""


async def read(request: Request, limit_bytes: int) -> bytes:
    """The JSON body of a request. Raises ApiError for one that is none, too large or too slow;
    ClientDisconnectedError."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(UNSUPPORTED_MEDIA_TYPE)  # a foreign page in a browser can send any other without being asked
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body, num_bytes = await _read(request.receive, limit_bytes)
    except TimeoutError as error:
        raise ApiError(BODY_TIMEOUT) from error
    if num_bytes > limit_bytes:
        raise ApiError(too_large(limit_bytes))
    return body


async def _read(receive: Receive, limit_bytes: int) -> tuple[bytes, int]:
    """As much of the body as may be, and how much there was."""
    parts: list[bytes] = []
    num_bytes = 0
    while num_bytes <= limit_bytes + _MAX_DISCARDED_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes <= limit_bytes:
            parts.append(part)
        if not message.get("more_body", False):
            break
    return b"".join(parts), num_bytes


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does the work; breaks it off and raises ClientDisconnectedError when the client goes away.

    To be called when the whole body has been read. An answer that is complete looks like a client that is gone."""
    working, watching = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnectedError
        working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
