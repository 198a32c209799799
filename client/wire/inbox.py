"""The inbox of one client: a reply subject for each open stream, and what streams need from the connection."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable
from operator import methodcaller

from nats.aio.msg import Msg

from tokenbus.client.wire.chunk_stream import ChunkStream
from tokenbus.protocol import late_logger, tasks
from tokenbus.protocol.bus import bus
from tokenbus.protocol.bus.reply_inbox import ReplyInbox
from tokenbus.protocol.parts.sender import PartsSender
from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import codec, errors, messages, subjects

_chunks = codec.Decoder(messages.Chunk)

_TICK_S = 0.1
_MAX_PAUSE_S = 0.5
"""A client that was blocked for longer could not receive anything meanwhile, so silence proves nothing."""
_RESYNC_SUFFIX = "-resync"
"""The end of a resync's reply subject: its answer is not a chunk."""
_MAX_ORPHANS = 1_024
_CANCEL_AGAIN_S = 2.0
"""An abandoned stream that still sends chunks is cancelled this often: a cancel may get lost with the last router."""
_ROUTERS_RETURN_S = 5.0
"""Routers that lost the broker when the client did are back at most this long after it. Until then a request without a
listener is sent again."""


class Inbox:
    """Sends the requests of one tenant's streams and delivers the replies; the `Transport` of these streams."""

    def __init__(
        self, connection: bus.Bus, names: subjects.Subjects, tenant: str, encoding: codec.Encoding, prefix: str = ""
    ) -> None:
        self._connection = connection
        self._names = names
        self._tenant = tenant
        self._encoding = encoding
        self._prefix = f"{prefix}.{secrets.token_hex(8)}" if prefix else connection.new_inbox()
        self._replies = ReplyInbox(connection, lambda token: f"{self._prefix}.answer.{token}")
        self._parts = PartsSender(connection, self._replies, encoding)
        self._uploads: dict[str, asyncio.Task[None]] = {}
        """Tasks that send large requests, by the last token of their reply subjects; kept until a reply arrives."""
        self._streams: dict[str, ChunkStream] = {}
        """Open streams, by the last token of their reply subjects."""
        self._reply_tokens: dict[ChunkStream, str] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_busy = asyncio.Event()
        self._orphans: TTLCache[bool] = TTLCache(_CANCEL_AGAIN_S, _MAX_ORPHANS)
        """Ids of recently cancelled requests, so that none is cancelled again for each of its late chunks."""
        self._error: errors.Error | None = None
        """Why nothing can be received here."""
        self._ticker: asyncio.Task[None] | None = None
        self._subscription: bus.Subscription | None = None

    def __repr__(self) -> str:
        return f"<Inbox {self._prefix}, {len(self._streams)} streams>"

    @property
    def prefix(self) -> str:
        """The beginning of all its reply subjects."""
        return self._prefix

    @property
    def num_streams(self) -> int:
        assert len(self._streams) == len(self._reply_tokens), (self._streams, self._reply_tokens)
        return len(self._streams)

    async def open(self) -> None:
        # One subscription for all streams: a subscription for each would cost the broker two messages a request.
        self._subscription = await self._connection.subscribe(f"{self._prefix}.*", self._deliver)
        self._ticker = tasks.background("tick", self._tick_forever())

    async def wait_idle(self) -> None:
        """Returns when no stream is open."""
        while self._streams:  # one that is being resubmitted is briefly not open
            await self._is_idle.wait()

    async def close(self) -> None:
        """Cancels every open stream. The subscription ends with the connection, or earlier by `unsubscribe`."""
        for stream in list(self._streams.values()):
            await stream.aclose()
        if self._ticker is not None:
            self._ticker.cancel()

    async def unsubscribe(self) -> None:
        if self._subscription is not None:
            with contextlib.suppress(ConnectionError):
                await self._connection.unsubscribe(self._subscription)
                await self._replies.close()

    def submit(self, stream: ChunkStream, request: messages.GenerateRequest) -> None:
        """Publishes a stream's request under a new reply subject. If that fails, the stream is told why."""
        payload = codec.encode(request, self._encoding)  # may raise, so it comes before the stream is registered
        token = secrets.token_hex(8)
        self._register(token, stream)
        if self._error is not None:
            stream.refuse(self._error, time.monotonic())
            return
        headers = stream.trace_headers | (codec.content_headers(self._encoding) or {})
        message = bus.Outgoing(stream.subject, payload, f"{self._prefix}.{token}", headers)
        if self._parts.fits(payload):
            self._publish(stream, message)
        else:
            stream.is_uploading = True
            self._uploads[token] = tasks.background(
                "upload",
                self._upload(stream, message),
                lambda _: stream.refuse(errors.make_error(errors.Code.INTERNAL), time.monotonic()),
            )

    def submit_when_addressed(self, stream: ChunkStream, find_subject: Callable[[], Awaitable[str]]) -> None:
        """Submits a stream as soon as the subject of its request is found. If none is, the stream is told why."""
        token = secrets.token_hex(8)
        self._register(token, stream)
        stream.is_uploading = True
        self._uploads[token] = tasks.background(
            "address",
            self._address(stream, find_subject),
            lambda _: stream.fail(errors.make_error(errors.Code.INTERNAL)),
        )

    def _register(self, token: str, stream: ChunkStream) -> None:
        self._streams[token], self._reply_tokens[stream] = stream, token
        self._is_idle.clear()
        self._is_busy.set()

    async def _address(self, stream: ChunkStream, find_subject: Callable[[], Awaitable[str]]) -> None:
        try:
            subject = await find_subject()
        except errors.RequestError as error:
            stream.fail(error.error)
            return
        self.forget(stream)  # it is submitted under a reply subject of its own
        stream.uploaded(time.monotonic())
        stream.address(subject)
        stream.submit()

    def _publish(self, stream: ChunkStream, message: bus.Outgoing) -> None:
        try:
            self._connection.publish(message.subject, message.payload, message.reply, message.headers)
        except bus.PayloadTooLargeError as error:
            stream.refuse(errors.make_error(errors.Code.PAYLOAD_TOO_LARGE, str(error)), time.monotonic())
        except (bus.OutboundBufferLimitError, ConnectionError) as error:
            stream.refuse(errors.make_error(errors.Code.NO_WORKER, str(error)), time.monotonic())

    async def _upload(self, stream: ChunkStream, message: bus.Outgoing) -> None:
        """Sends a request in parts. If no router ends up with it, the stream is told why."""
        try:
            last = await self._parts.stage(message)
        except bus.NoRespondersError:
            stream.uploaded(time.monotonic())
            self._refuse_unheard(stream)
            return
        except errors.RequestError as error:
            problem = error.error
        except TimeoutError as error:
            problem = errors.make_error(errors.Code.UPLOAD_LOST, str(error))
        except bus.PayloadTooLargeError as error:  # it has reconnected to a broker that allows less
            problem = errors.make_error(errors.Code.PAYLOAD_TOO_LARGE, str(error))
        except ConnectionError as error:
            problem = errors.make_error(errors.Code.NO_WORKER, str(error))
        else:
            stream.uploaded(time.monotonic())
            self._publish(stream, last)
            return
        stream.uploaded(time.monotonic())
        stream.refuse(problem, time.monotonic())

    def send_cancel(self, stream: ChunkStream) -> None:
        if not stream.subject:  # nothing has been published
            return
        self._orphans.put(stream.request_id, True, time.monotonic())
        self._connection.publish(self._names.cancel(stream.request_id, self._tenant, self._model_of(stream)), b"")

    def send_resync(self, stream: ChunkStream, offset: int, prompt_offset: int | None = None) -> None:
        with contextlib.suppress(ConnectionError, bus.OutboundBufferLimitError):
            self._connection.publish(
                self._names.resync(stream.request_id, self._tenant, self._model_of(stream)),
                codec.encode(messages.ResyncRequest(offset=offset, prompt_offset=prompt_offset), self._encoding),
                reply=f"{self._prefix}.{self._reply_tokens[stream]}{_RESYNC_SUFFIX}",
                headers=codec.content_headers(self._encoding),
            )

    def _model_of(self, stream: ChunkStream) -> str | None:
        """Returns the model whose workers may be asked directly about a stream; None if only routers may know it."""
        asked = self._names.parse_model(stream.subject).model
        # a name with a colon may mean a model with an adapter, and a chunk may contain any name
        if ":" not in asked or asked == stream.served_by:
            return asked
        return stream.served_by if asked.rpartition(":")[0] == stream.served_by else None

    async def request(self, message: bus.Outgoing, timeout_s: float) -> Msg:
        """Sends a request, in parts if it is large, and returns its single answer; raises what `PartsSender.stage` and
        `ReplyInbox.request` do."""
        message = await self._parts.stage(message)
        await self._replies.open()
        return await self._replies.request(message, timeout_s)

    def forget(self, stream: ChunkStream) -> None:
        token = self._reply_tokens.pop(stream, None)
        if token is not None:
            del self._streams[token]
            if not self._streams:
                self._is_idle.set()
                self._is_busy.clear()
            uploading = self._uploads.pop(token, None)
            if uploading is not None and uploading is not asyncio.current_task():
                uploading.cancel()

    def end_streams(self, key_id: str, error: errors.Error) -> None:
        """Ends the streams whose requests name a key."""

        def end(stream: ChunkStream) -> None:
            if stream.subject and self._names.parse_model(stream.subject).key_id == key_id:
                stream.give_up(error)

        self._for_each(end)

    def reconnected(self) -> None:
        """Makes every stream request what it may have missed."""
        now = time.monotonic()
        self._for_each(lambda stream: stream.reconnected(now))

    def permissions_violated(self, words: str) -> None:
        """Ends the requests that the broker forbids, and all streams if it forbids the inbox."""
        hint = "check that tenant and inbox prefix belong to this user (--tenant, --nats-inbox)"
        self._replies.forbid(words, hint)
        error = errors.make_error(errors.Code.NO_WORKER, f"{words}: {hint}")
        forbidden = words.lower()  # nats-py reports the subject in lower case
        if self._prefix.lower() in forbidden:
            self._error = error

        def end(stream: ChunkStream) -> None:
            if self._error is not None or f'"{stream.subject}"'.lower() in forbidden:
                stream.fail_if_empty(error)

        self._for_each(end)

    def _deliver(self, message: Msg) -> None:
        token = message.subject.rpartition(".")[2]
        stream = self._streams.get(token.removesuffix(_RESYNC_SUFFIX))
        if stream is None:
            if not token.endswith(_RESYNC_SUFFIX):
                self._cancel_orphan(message)
        elif token.endswith(_RESYNC_SUFFIX) and bus.is_no_responders(message):
            stream.resync_unheard(time.monotonic())
        elif token.endswith(_RESYNC_SUFFIX):
            stream.feed_resync(message.data, time.monotonic())
        elif bus.is_no_responders(message):
            # the router that had begun to receive a request in parts is gone, but there may be others
            is_upload = self._uploads.pop(token, None) is not None
            lost = errors.make_error(errors.Code.UPLOAD_LOST, "the router that received the request is gone")
            stream.refuse(lost, time.monotonic()) if is_upload else self._refuse_unheard(stream)
        else:
            self._uploads.pop(token, None)
            stream.feed(message.data, time.monotonic())

    def _refuse_unheard(self, stream: ChunkStream) -> None:
        """Tells a stream that no router listens, unless routers may still be reconnecting to the broker."""
        now = time.monotonic()
        if now - self._connection.reconnected_at < _ROUTERS_RETURN_S:
            stream.submit_soon(now)
        else:
            stream.refuse(errors.make_error(errors.Code.NO_WORKER, "no router listens on this broker"), now)

    def _cancel_orphan(self, message: Msg) -> None:
        """Cancels, once, an abandoned stream that still sends chunks."""
        with contextlib.suppress(errors.RequestError, ValueError, ConnectionError, bus.OutboundBufferLimitError):
            chunk = _chunks.decode(message.data, self._encoding)
            if chunk.finish_reason is None and self._orphans.get(chunk.id, time.monotonic()) is None:
                self._orphans.put(chunk.id, True, time.monotonic())
                self._connection.publish(self._names.cancel(chunk.id, self._tenant), b"")

    async def _tick_forever(self) -> None:
        while True:
            await self._is_busy.wait()  # a gateway has an inbox for each tenant, most of which are idle
            ticked_at = time.monotonic()
            while self._streams:
                await asyncio.sleep(_TICK_S)
                now = time.monotonic()
                pause_s = now - ticked_at
                ticked_at = now
                self._for_each(methodcaller("tick", now, pause_s if pause_s > _MAX_PAUSE_S else 0.0))

    def _for_each(self, act: Callable[[ChunkStream], None]) -> None:
        """Calls `act` with each open stream. If that raises, this stream ends in `internal`, and no other."""
        for stream in list(self._streams.values()):
            try:
                act(stream)
            except Exception:  # outermost frame of a stream: it ends, and the others are still served
                late_logger.get_logger().exception("stream_failed", request_id=stream.request_id)
                stream.fail(errors.make_error(errors.Code.INTERNAL))
