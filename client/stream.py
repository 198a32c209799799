"""An answer as it arrives. Decision 0016 says when its request is cancelled.

```
reader's task cancelled while it waits ──▶ at once, in `__anext__`
`async with` left, `aclose`, `cancel`  ──▶ at once
no reference to the stream is left     ──▶ from `__del__`, in the loop's next round
```

The client holds the other half, a `ChunkStream`, which does not refer to this one.
"""

import asyncio
from types import TracebackType
from typing import Self

from tokenbus.client import answer, errors, event_loops
from tokenbus.client.answer import Answer, AnswerBuilder, AnswerChunk
from tokenbus.client.wire.chunk_stream import ChunkStream
from tokenbus.protocol.wire import messages
from tokenbus.protocol.wire.errors import Error

_CANCELLED = messages.FinishReason.CANCELLED


class Stream:
    """An async iterator of chunks, of which the last one has a `finish_reason`.

    It raises a TokenbusError, with the text so far, if the request fails. A lost request continues elsewhere, so that
    all chunks together are one text. Use it as `async with client.generate(...) as stream`, or leave it without a
    reference (`break` out of `async for chunk in client.generate(...)`): in both cases the request is cancelled unless
    it has ended, as it is when a task that waits for the stream is cancelled or runs into its timeout."""

    __slots__ = ("__weakref__", "_builder", "_error", "_is_awaited", "_loop", "_was_given_up", "_wire")

    def __init__(self, wire: ChunkStream, loop: asyncio.AbstractEventLoop) -> None:
        self._builder = AnswerBuilder()
        self._error: Error | None = None
        """The error with which the request ended."""
        self._is_awaited = False
        self._was_given_up = False
        """Whether this stream, and no one else, has cancelled the request."""
        self._loop = loop
        self._wire = wire

    def __repr__(self) -> str:
        return f"<Stream {self.request_id}{' ended' if self._wire.has_ended else ''}>"

    def __del__(self) -> None:
        # This runs in any thread, and in the middle of anything that allocates: the loop does it in its next round.
        if not self._wire.has_ended and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._wire.close)
            except RuntimeError:  # it was closed just now
                return

    @property
    def request_id(self) -> str:
        """The request's id, by which logs and `cancel` know it. It changes when a lost request continues."""
        return self._wire.request_id

    @property
    def so_far(self) -> Answer:
        """The answer as far as it has been read."""
        return self._builder.build(_CANCELLED if self._was_given_up and self._wire.has_ended else None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AnswerChunk:
        return answer.chunk_of(await self._next())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends the stream and cancels the request, unless it has ended. Idempotent."""
        self._check_loop()
        self._give_up()

    def cancel(self) -> None:
        """Cancels the request. The stream then ends, without an error, with what the model had generated: read on until
        its last chunk, whose `finish_reason` is `cancelled` unless another end came first."""
        self._check_loop()
        if not self._wire.has_ended:
            self._was_given_up = True
            self._wire.cancel()

    async def text(self) -> str:
        """Waits for the end and returns the whole text, including what has been read before."""
        return (await self.answer()).text

    async def answer(self) -> Answer:
        """Waits for the end and returns the whole answer, including what has been read before."""
        try:
            while True:
                await self._next()
        except StopAsyncIteration:
            return self.so_far

    async def _next(self) -> messages.Chunk:
        self._check_loop()
        if self._is_awaited:
            raise RuntimeError("another task is reading this stream: each stream has one reader")
        self._is_awaited = True
        try:
            chunk = await anext(self._wire)
        except StopAsyncIteration:
            self._check_end()
            raise
        except asyncio.CancelledError:  # by its own task, or by a timeout around it
            self._give_up()
            raise
        finally:
            self._is_awaited = False
        self._builder.add(chunk)
        if chunk.finish_reason is not None:
            self._error = self._error_in(chunk)
            self._check_end()
        return chunk

    def _error_in(self, terminal: messages.Chunk) -> Error | None:
        if terminal.finish_reason is _CANCELLED and not self._was_given_up:
            return errors.cancelled("the request was cancelled by another client").error
        return terminal.error or None

    def _check_end(self) -> None:
        """Raises the error with which the stream has ended, also to a reader that comes later."""
        if self._error is None and self._builder.finish_reason is None and not self._was_given_up:
            self._error = errors.cancelled("the client was closed").error
        if self._error is not None:
            raise errors.exception_of(self._error, self._builder.text, self._builder.usage)

    def _give_up(self) -> None:
        if not self._wire.has_ended:
            self._was_given_up = True
            self._wire.close()

    def _check_loop(self) -> None:
        event_loops.require(self._loop, "this stream")


async def read_ready(stream: Stream) -> list[AnswerChunk]:
    """Waits for a stream's next chunk, and returns it with all others that have arrived; none if the stream has ended.
    Raises what the stream raises, once everything before it has been returned."""
    try:
        chunks = [await anext(stream)]
    except StopAsyncIteration:
        return []
    while stream._wire.has_unread:
        try:
            chunks.append(await anext(stream))
        except errors.TokenbusError:  # the stream raises it again
            break
    return chunks
