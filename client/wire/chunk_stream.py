"""A completion as seen by its client: an async iterator of chunks that always ends with one terminal.

Decision 0016 says what it does beyond the wire: it continues lost requests, for example.
"""

import asyncio
import contextlib
import secrets
from collections import deque
from types import TracebackType
from typing import Protocol

from tokenbus.client.wire.continuation import Continuation
from tokenbus.client.wire.reassembler import BrokenStreamError, Duplicate, Gap, ReadyChunks, Reassembler
from tokenbus.client.wire.resync_timer import Action, ResyncTimer
from tokenbus.protocol.bus.bus import OutboundBufferLimitError
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import codec, errors, messages

_chunks = codec.Decoder(messages.Chunk)
_resyncs = codec.Decoder(messages.ResyncReply)

_SUBMIT_AGAIN_S = 0.2
_CONTINUE_AGAIN_S = 5.0
"""Time after which a continuation that was refused for now is tried again."""
_CANCEL_AGAIN_S = 1.0
MAX_UNREAD_BYTES = 4 * 1024 * 1024
"""Bytes of chunks, as received, that may wait for a slow reader. Beyond that the stream ends with an error. In memory
they take about four times as much."""


class StreamTransport(Protocol):
    """Everything that a stream needs from its client."""

    def submit(self, stream: "ChunkStream", request: messages.GenerateRequest) -> None:
        """Publishes a request under a new reply subject."""
        ...

    def send_cancel(self, stream: "ChunkStream") -> None: ...

    def send_resync(self, stream: "ChunkStream", offset: int, prompt_offset: int | None = None) -> None: ...

    def forget(self, stream: "ChunkStream") -> None:
        """Stops delivering to the stream; idempotent."""
        ...


class ChunkStream:
    """An async iterator of chunks. The last one is the terminal, the only one with a `finish_reason`.

    Lost chunks are requested again. A request whose worker is lost, or that no process holds any more, is resubmitted
    under a new id, at most three times in a row without a new token. Its stream continues after the last token received
    (`resume_from`), so that all chunks together form one text with one token count; `resume=False` disables this.
    `request_id` is the latest id, and each chunk has the id and the attempt under which it was sent: attempts restart
    at 1 for each id. If all that fails, the stream ends in `worker_lost`, or in `no_worker` if there is no router.
    Leaving an `async with` block early, or `aclose`, cancels the request."""

    def __init__(
        self,
        request: messages.GenerateRequest,
        encoding: codec.Encoding,
        transport: StreamTransport,
        now: float,
        span: tracing.Span = tracing.NOOP_SPAN,
        subject: str = "",
        *,
        resume: bool = True,
    ) -> None:
        assert request.id is not None
        self.request_id = request.id
        self._is_streamed = request.is_streamed
        self._encoding = encoding
        self._transport = transport
        self._submitted_at = now
        self.subject = subject
        """Subject to which the request is published; empty until it is known which model is the default."""
        self.served_by: str | None = None
        """The model whose workers have the request, once known from one of its chunks."""
        self._span = span
        self._first_chunk_seen = False
        self._continuation = Continuation(request, now, resume=resume)
        self._submitted = self._continuation.request
        """The request as it was last published."""
        self._submit_again_at: float | None = None
        """When it is published again, because it has had no listener yet."""
        self._continue_again_at: float | None = None
        """When it is continued again under a new id, because it was refused for now: until then no process has it."""
        scores_from = None if request.prompt_logprobs is None else request.prompt_logprobs_from or 0
        self._reassembler = Reassembler(len(request.resume_from.token_ids) if request.resume_from else 0, scores_from)
        self._resync_timer = ResyncTimer(now, streamed=request.is_streamed)
        self._unread: deque[tuple[messages.Chunk, int]] = deque()
        """Chunks, each with the bytes of the message that it came in."""
        self._unread_bytes = 0
        self._arrived = asyncio.Event()
        self._is_cancelled = False
        self._cancel_again_at: float | None = None
        """When the cancel is sent again if the stream has not ended by then."""
        self.is_uploading = False
        """Whether the request, or parts of it, are still unsent, so that no process can answer a resync."""
        self._ended = False

    @property
    def has_ended(self) -> bool:
        """Whether nothing more can arrive; some of what has may still be unread."""
        return self._ended

    @property
    def has_unread(self) -> bool:
        """Whether the next chunk has arrived."""
        return bool(self._unread)

    @property
    def trace_headers(self) -> dict[str, str]:
        """Headers for its messages, which join all spans of the request into one trace."""
        return self._span.headers()

    def __repr__(self) -> str:
        return f"<ChunkStream {self.request_id} {self._reassembler!r}{' ended' if self._ended else ''}>"

    def __aiter__(self) -> "ChunkStream":
        return self

    async def __anext__(self) -> messages.Chunk:
        while not self._unread:
            if self._ended:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        chunk, num_bytes = self._unread.popleft()
        self._unread_bytes -= num_bytes
        return chunk

    async def __aenter__(self) -> "ChunkStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Does what `close` does."""
        self.close()

    def close(self) -> None:
        """Ends the stream and cancels the request, unless it has ended. Idempotent."""
        if not self._ended:
            self._finish()
            self._send_cancel()

    def cancel(self) -> None:
        """Cancels the request. The stream continues until its terminal: `cancelled`, unless another arrived first."""
        if self._ended:
            return
        if self.is_uploading or self._is_nowhere:  # no process has the request
            self._end(messages.FinishReason.CANCELLED)
        else:
            self._is_cancelled = True
            self._send_cancel()

    @property
    def _is_nowhere(self) -> bool:
        return self._submit_again_at is not None or self._continue_again_at is not None

    def address(self, subject: str) -> None:
        """Sets the subject of a request that has had none yet."""
        assert not self.subject, f"{self!r} has the subject {self.subject}"
        self.subject = subject

    def submit(self) -> None:
        """Publishes the request; call it once."""
        self._transport.submit(self, self._submitted)

    def submit_soon(self, now: float) -> None:
        """Handles the news that the request has no listener yet: it is published again after a moment."""
        if self._is_cancelled:
            self._end(messages.FinishReason.CANCELLED)
        self._submit_again_at = now + _SUBMIT_AGAIN_S

    def feed(self, payload: bytes, now: float) -> None:
        """Handles a message to the stream's reply subject."""
        if self._ended:
            return
        try:
            chunk = _chunks.decode(payload, self._encoding)
        except errors.RequestError as error:
            self.give_up(errors.make_error(errors.Code.INTERNAL, f"a chunk can't be read: {error.error.message}"))
            return
        if chunk.error and chunk.attempt >= self._reassembler.attempt:
            final = self._error_after(chunk.error, now)
            if final is None:
                return
            chunk = codec.replace(chunk, error=final)
        self._add(chunk, len(payload), now)

    def feed_resync(self, payload: bytes, now: float) -> None:
        """Handles the answer to a resync."""
        with contextlib.suppress(errors.RequestError):
            if _resyncs.decode(payload, self._encoding).found:
                self._resync_timer.resync_answered(now)

    def resync_unheard(self, now: float) -> None:
        """Handles the broker's notice that nothing listened to a resync."""
        self._resync_timer.resync_unheard(now)

    def tick(self, now: float, pause_s: float = 0.0) -> None:
        """Must be called several times a second; `pause_s` is the time for which the client itself was blocked."""
        if self._ended or self.is_uploading:
            return
        if pause_s:
            self._resync_timer.extend(pause_s)
        if self._submit_again_at is not None:
            if now >= self._submit_again_at:
                again = self._continuation.in_time(self._submitted, now)
                self.fail(again) if isinstance(again, errors.Error) else self._submit(again, now)
            return
        if self._continue_again_at is not None:
            if now >= self._continue_again_at:
                self._lose("no process has continued it", now)
            return
        if self._is_cancelled:
            self._cancel_again(now)
        match self._resync_timer.poll(now):
            case Action.RESYNC:
                self._transport.send_resync(self, self._reassembler.num_tokens, self._reassembler.prompt_offset)
            case Action.LOST:
                self._lose("nothing more arrived, and no process holds the request any more", now)
            case Action.WAIT:
                pass

    def uploaded(self, now: float) -> None:
        """Records that the whole request has been sent: from now on silence counts."""
        self.is_uploading = False
        self._resync_timer = ResyncTimer(now, streamed=self._is_streamed)

    def reconnected(self, now: float) -> None:
        """Requests chunks that may have been lost while the client was disconnected."""
        self._resync_timer.resync_soon(now)
        self.tick(now)

    def fail_if_empty(self, error: errors.Error) -> None:
        """Ends the stream if nothing has arrived; called on a permission error that may concern it."""
        if self._continuation.is_empty:
            self.fail(error)

    def refuse(self, error: errors.Error, now: float) -> None:
        """Handles the news that the request could not be sent, or that it has no listener."""
        final = self._error_after(error, now)
        if final is not None:
            self.fail(final)

    def fail(self, error: errors.Error) -> None:
        """Ends the stream with an error terminal made here."""
        self._end(messages.FinishReason.ERROR, error)

    def give_up(self, error: errors.Error) -> None:
        """Ends the stream with an error made here, and cancels the request."""
        self.fail(error)
        self._send_cancel()

    def _end(self, reason: messages.FinishReason, error: errors.Error | None = None) -> None:
        if self._ended:
            return
        terminal = messages.Chunk(
            id=self.request_id,
            attempt=self._reassembler.attempt,
            offset=self._reassembler.num_tokens,
            text_offset=self._reassembler.text_bytes,
            finish_reason=reason,
            error=codec.unset_if_none(error),
        )
        self._unread.append((terminal, 0))
        self._trace(terminal)
        self._finish()

    def _add(self, chunk: messages.Chunk, num_bytes: int, now: float) -> None:
        try:
            added = self._reassembler.add(chunk)
        except BrokenStreamError as error:
            self._lose(str(error), now)
            return
        self.served_by = chunk.model or self.served_by
        match added:
            case ReadyChunks(new):
                self._resync_timer.chunk_received(now)
                self._take(self._continuation.take(new), num_bytes, now)
            case Gap():
                self._resync_timer.gap_found(now)
                self.tick(now)  # sends the resync at once
            case Duplicate():
                pass

    def _take(self, chunk: messages.Chunk, num_bytes: int, now: float) -> None:
        if self._unread and self._unread_bytes + num_bytes > MAX_UNREAD_BYTES:
            problem = f"the reader is too slow: {self._unread_bytes} bytes of chunks were not read"
            self.give_up(errors.make_error(errors.Code.OVERLOADED, problem))
            return
        self._unread.append((chunk, num_bytes))
        self._unread_bytes += num_bytes
        self._arrived.set()
        if chunk.tokens and not self._first_chunk_seen:
            self._first_chunk_seen = True
            self._span.set_attributes({"gen_ai.response.time_to_first_chunk": now - self._submitted_at})
        if chunk.finish_reason is not None:
            self._trace(chunk)
            self._finish()

    def _trace(self, terminal: messages.Chunk) -> None:
        if self._span.is_recording:
            self._span.set_attributes(tracing.terminal_attributes(terminal))
            self._span.set_attributes({tracing.WORKER_ID: terminal.worker_id or None})
            self._span.set_attributes({tracing.RESUBMITS: self._continuation.num_resubmits or None})
        if terminal.error:
            self._span.set_error(str(terminal.error.code))

    def _error_after(self, error: errors.Error, now: float) -> errors.Error | None:
        """Returns the error that ends the stream, or None if it continues or has been ended as cancelled."""
        is_lost = error.code in (errors.Code.WORKER_LOST, errors.Code.UPLOAD_LOST)
        if not is_lost and not self._continuation.is_pending:
            return error
        if self._is_cancelled:  # no process holds it, which is what its user wanted
            self._end(messages.FinishReason.CANCELLED)
            return None
        if not is_lost:
            final = self._continuation.error_after_refusal(error)
            if final is None and self._continue_again_at is None:
                self._continue_again_at = now + _CONTINUE_AGAIN_S
            return final
        again = self._continuation.request_after(error, now)
        if isinstance(again, errors.Error):
            return again
        self._resubmit(again, now)
        return None

    def _resubmit(self, request: messages.GenerateRequest, now: float) -> None:
        self._send_cancel()  # should a process still hold the old request, it must not run twice
        self._reassembler.restart_attempts()
        # A new id: the holder of the old one may only have been out of reach.
        before, self.request_id = self.request_id, secrets.token_urlsafe(16)
        first = self.request_id if request.copy_of == before else request.copy_of
        self._submit(codec.replace(request, id=self.request_id, copy_of=first), now)

    def _submit(self, request: messages.GenerateRequest, now: float) -> None:
        self._transport.forget(self)
        self._submitted, self._submit_again_at, self._continue_again_at = request, None, None
        self._resync_timer = ResyncTimer(now, streamed=self._is_streamed)
        self._transport.submit(self, request)

    def _lose(self, reason: str, now: float) -> None:
        """Continues the stream elsewhere, or ends it."""
        final = self._error_after(errors.make_error(errors.Code.WORKER_LOST, reason), now)
        if final is not None:
            self.give_up(final)

    def _send_cancel(self) -> None:
        # If it can't be sent, the worker itself notices that the inbox has no subscriber.
        with contextlib.suppress(ConnectionError, OutboundBufferLimitError):
            self._transport.send_cancel(self)

    def _cancel_again(self, now: float) -> None:
        """Sends the cancel once a second: it is lost if no router is left and the worker has not noticed yet."""
        if self._cancel_again_at is not None and now >= self._cancel_again_at:
            self._send_cancel()
            self._cancel_again_at = None
        if self._cancel_again_at is None:
            self._cancel_again_at = now + _CANCEL_AGAIN_S

    def _finish(self) -> None:
        self._ended = True
        self._arrived.set()
        self._transport.forget(self)
        self._span.end()
