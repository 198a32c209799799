"""One generation as its client sees it: an async iterator of chunks that always ends with one terminal."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from types import TracebackType

from client.order import BrokenStreamError, Order
from protocol import codec, errors, messages
from protocol.bus import BusyError

_chunks = codec.Decoder(messages.Chunk)

MAX_UNREAD_CHUNKS = 65_536
"""Chunks that may wait for a reader who is slow; then the stream ends with an error."""


class Stream:
    """Iterate over it for chunks. The last one is the terminal: the only one with a `finish_reason`.

    What goes wrong on the way ends the stream with a terminal made here: `no_worker` where nobody listens,
    `worker_lost` where chunks are missing or nothing comes for `silence_s`. Leaving the loop early, or the `async
    with` block, cancels the request."""

    def __init__(
        self,
        request_id: str,
        encoding: codec.Encoding,
        silence_s: float,
        cancel: Callable[[], None],
        close: Callable[[], None],
    ) -> None:
        self.request_id = request_id
        self._encoding = encoding
        self._silence_s = silence_s
        self._cancel = cancel
        self._close = close
        self._order = Order()
        self._unread: deque[messages.Chunk] = deque()
        self._arrived = asyncio.Event()
        self._ended = False

    def __repr__(self) -> str:
        return f"<Stream {self.request_id} {self._order!r}{' ended' if self._ended else ''}>"

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> messages.Chunk:
        while not self._unread:
            if self._ended:
                raise StopAsyncIteration
            self._arrived.clear()
            try:
                async with asyncio.timeout(self._silence_s):
                    await self._arrived.wait()
            except TimeoutError:
                self.end(errors.make_error(errors.Code.WORKER_LOST, f"nothing came for {self._silence_s:g} s"))
                self._send_cancel()
        return self._unread.popleft()

    async def __aenter__(self) -> "Stream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancels the request unless it has ended. Safe to call again."""
        if not self._ended:
            self._finish()
            self._send_cancel()

    def cancel(self) -> None:
        """Asks for the end; the stream goes on until its terminal, `cancelled` if nothing else came first."""
        if not self._ended:
            self._send_cancel()

    async def text(self) -> str:
        """The whole text, at the end. Raises RequestError if the stream ends in an error."""
        texts = []
        async for chunk in self:
            texts.append(chunk.text)
            if chunk.error:
                raise errors.RequestError(chunk.error)
        return "".join(texts)

    def feed(self, payload: bytes) -> None:
        """Takes a message from the broker."""
        if self._ended:
            return
        try:
            chunk = _chunks.decode(payload, self._encoding)
            if not self._order.take(chunk):
                return
            if len(self._unread) >= MAX_UNREAD_CHUNKS:
                raise BrokenStreamError(f"{MAX_UNREAD_CHUNKS} chunks were not read")
        except (BrokenStreamError, errors.RequestError) as error:
            self.end(errors.make_error(errors.Code.WORKER_LOST, str(error)))
            self._send_cancel()
            return
        self._unread.append(chunk)
        self._arrived.set()
        if chunk.finish_reason is not None:
            self._finish()

    def end(self, error: errors.Error) -> None:
        """Ends the stream with a terminal of our own."""
        if self._ended:
            return
        self._unread.append(
            messages.Chunk(
                id=self.request_id,
                attempt=self._order.attempt,
                offset=self._order.num_tokens,
                text_offset=self._order.text_bytes,
                finish_reason=messages.FinishReason.ERROR,
                error=error,
            )
        )
        self._finish()

    def _send_cancel(self) -> None:
        """Where it can't be sent the worker finds out by itself that nobody listens."""
        with contextlib.suppress(ConnectionError, BusyError):
            self._cancel()

    def _finish(self) -> None:
        self._ended = True
        self._arrived.set()
        self._close()
