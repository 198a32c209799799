"""Reads the body of a request within limits of size and memory, and detects client disconnects."""

import asyncio
import contextlib
import gc
import sys
import zlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from tokenbus.gateway.http.http_errors import (
    BODY_TIMEOUT,
    BROKEN_COMPRESSION,
    OVERLOADED,
    UNSUPPORTED_MEDIA_TYPE,
    ApiError,
    too_large,
    unsupported_encoding,
)
from tokenbus.protocol import tasks
from tokenbus.protocol.process.memory import trim_heap

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ParsedT = TypeVar("ParsedT")
BODY_TIMEOUT_S = 30.0
_PARSED_AT_ONCE_BYTES = 256 * 1024
"""Bodies up to this size are parsed within milliseconds."""
_MAX_DISCARDED_BYTES = 16 * 1024 * 1024
"""Bytes of a body that are read and discarded once it is too large: a client that is still sending would not read
why."""
_LARGE_BODIES = 32
"""The number of maximum-size bodies that fit at a time."""
_OF_WEB_PAGES = ("origin", "sec-fetch-site")
_IDENTITY = ("", "identity")
_PIECE_BYTES = 64 * 1024
"""A compressed body is expanded in pieces of up to this size."""
_MAX_ZSTD_WINDOW_LOG = 23
"""The binary logarithm of how many bytes zstd may look back: 8 MiB, which RFC 8878 recommends to support."""
_TRIM_DELAY_S = 0.5
"""The delay after a large body; by then nothing refers to it any more."""
_SMALL_BYTES = 1024 * 1024
"""This much of each body doesn't count, so that some clients' large bodies can't cause others' ordinary requests to be
refused."""


class ClientDisconnectedError(Exception):
    """The HTTP client has closed its connection."""


class BodyMemory:
    """The total bytes that open requests may have beyond a mebibyte each."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        """The size of one body."""
        self._max_bytes = _LARGE_BODIES * max_body_bytes
        self.held_bytes = 0
        self._trimming: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<BodyMemory {self.held_bytes} of {self._max_bytes} bytes>"

    @contextlib.contextmanager
    def holding(self) -> Iterator["HeldBody"]:
        """Yields the account of one request's body, released at the end of the block."""
        held = HeldBody(self)
        try:
            yield held
        finally:
            self.held_bytes -= held.counted_bytes
            if held.counted_bytes and self._trimming is None:
                self._trimming = asyncio.get_running_loop().call_later(_TRIM_DELAY_S, self._trim)

    def add(self, num_bytes: int) -> None:
        """Raises ApiError if there is no room for this many more bytes."""
        if self.held_bytes + num_bytes > self._max_bytes:
            raise ApiError(OVERLOADED)
        self.held_bytes += num_bytes

    def _trim(self) -> None:
        """Returns the memory of bodies to the system; the C library would keep it for the thread that parsed them."""
        self._trimming = None
        asyncio.get_running_loop().run_in_executor(None, trim_heap)


class HeldBody:
    """The body of one request."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._num_bytes = 0
        self.counted_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Records the receipt of this many more bytes. Raises ApiError if memory is short."""
        self._num_bytes += num_bytes
        more = max(0, self._num_bytes - _SMALL_BYTES) - self.counted_bytes
        self._memory.add(more)
        self.counted_bytes += more


async def read(request: Request, limit_bytes: int, held: HeldBody, *, takes_any_type: bool = False) -> bytes:
    """Returns the JSON body of a request, expanded if it is compressed. `takes_any_type`: it may be called something
    else, unless a web page sends it.

    Raises ClientDisconnectedError, and ApiError if it is not JSON, compressed in a way that is not supported, too large
    or too slow, or if memory is short."""
    # A foreign web page in a browser can send other content types without a preflight request, but not without a header
    # that says where it comes from.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json" and (
        not takes_any_type or any(name in request.headers for name in _OF_WEB_PAGES)
    ):
        raise ApiError(UNSUPPORTED_MEDIA_TYPE)
    if int(request.headers.get("content-length", 0)) > limit_bytes + _MAX_DISCARDED_BYTES:
        raise ApiError(too_large(limit_bytes))
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in (*_IDENTITY, *_EXPANDERS):
        raise ApiError(unsupported_encoding(encoding))
    expander = None if encoding in _IDENTITY else _EXPANDERS[encoding]()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body, num_bytes = await _read(request.receive, limit_bytes, held, expander)
    except TimeoutError as error:
        raise ApiError(BODY_TIMEOUT) from error
    if num_bytes > limit_bytes:
        raise ApiError(too_large(limit_bytes))
    return body


class LargeBodyParser:
    """Parses large bodies, and those that refer to something compressed, in a thread, one at a time: in the event loop
    they would hold up other requests."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def parse(self, parse: Callable[[], ParsedT], num_bytes: int, *, expands: bool = False) -> ParsedT:
        """Returns a parser's result, or raises its exception. `expands`: it expands something, which may become a
        thousand times as large."""
        if num_bytes <= _PARSED_AT_ONCE_BYTES and not expands:
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


class _Expander(Protocol):
    """Expands a body, piece by piece."""

    def pieces(self, part: bytes) -> Iterator[bytes]:
        """Yields what a part expands to. Raises ApiError for what is not compressed data."""
        ...

    def check_end(self) -> None:
        """Raises ApiError if the data has no end."""
        ...


class _ZlibExpander:
    """Expands gzip and zlib."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(zlib.MAX_WBITS | 32)  # recognizes both by their headers

    def pieces(self, part: bytes) -> Iterator[bytes]:
        while part:
            try:
                yield self._stream.decompress(part, _PIECE_BYTES)
            except zlib.error as error:
                raise ApiError(BROKEN_COMPRESSION) from error
            if self._stream.unused_data:
                raise ApiError(BROKEN_COMPRESSION)
            part = self._stream.unconsumed_tail

    def check_end(self) -> None:
        if not self._stream.eof:
            raise ApiError(BROKEN_COMPRESSION)


class _ZstdExpander:
    """Expands zstd."""

    def __init__(self) -> None:
        self._stream = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _MAX_ZSTD_WINDOW_LOG})

    def pieces(self, part: bytes) -> Iterator[bytes]:
        is_more = bool(part)
        while is_more:
            try:
                yield self._stream.decompress(part, _PIECE_BYTES)
            except (zstd.ZstdError, EOFError) as error:
                raise ApiError(BROKEN_COMPRESSION) from error
            if self._stream.unused_data:
                raise ApiError(BROKEN_COMPRESSION)
            part, is_more = b"", not (self._stream.eof or self._stream.needs_input)

    def check_end(self) -> None:
        if not self._stream.eof:
            raise ApiError(BROKEN_COMPRESSION)


_EXPANDERS: dict[str, Callable[[], _Expander]] = {
    "gzip": _ZlibExpander,
    "x-gzip": _ZlibExpander,
    "deflate": _ZlibExpander,
    "zstd": _ZstdExpander,
}
"""By content coding."""


async def _read(receive: Receive, limit_bytes: int, held: HeldBody, expander: _Expander | None) -> tuple[bytes, int]:
    """Returns the part of the body within the limit, and its number of bytes, or one more than the limit if it has
    more."""
    parts: list[bytes] = []
    num_bytes = num_received = 0
    while num_received <= limit_bytes + _MAX_DISCARDED_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        received = message.get("body", b"")
        num_received += len(received)
        for part in (received,) if expander is None else expander.pieces(received):
            num_bytes += len(part)
            if num_bytes > limit_bytes:
                break  # the rest is not even expanded
            held.add(len(part))
            parts.append(part)
            if expander is not None:
                await asyncio.sleep(0)  # a small body may expand to a large one: other requests have turns meanwhile
        if num_bytes > limit_bytes:
            expander = None
        if not message.get("more_body", False):
            if expander is not None:
                expander.check_end()
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
