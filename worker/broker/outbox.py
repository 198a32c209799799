"""Publishes a step's chunks, and the events around them, in the order that the wire promises.

Routers must know which tokens were sampled, and which blocks changed, before clients can see the tokens; they must
learn of a request's end only after its client can. So an event goes before the chunks of a step, and another one after
its terminals. All of it is published together or, while too much waits for the broker, later together with what comes
next: a stream remembers how much of it has been published."""

import contextlib
from collections.abc import Callable

from tokenbus.protocol.bus.bus import Bus, OutboundBufferLimitError, Outgoing
from tokenbus.protocol.wire import codec, limits, messages, subjects
from tokenbus.worker import contract
from tokenbus.worker.broker.announcer import Announcer
from tokenbus.worker.broker.sampled_tokens import SampledTokens
from tokenbus.worker.streams.request_telemetry import RequestTelemetry
from tokenbus.worker.streams.stream import Stream


class Outbox:
    """Collects the streams that have something to publish, and publishes it at the end of a step."""

    def __init__(self, connection: Bus, announcer: Announcer, telemetry: RequestTelemetry) -> None:
        self._connection = connection
        self._announcer = announcer
        self._telemetry = telemetry
        self._streams: dict[Stream, None] = {}
        """The streams with something to publish, in order."""
        self._sampled = [SampledTokens()]
        """Their tokens, as many as fit into each event."""
        self.on_ended: Callable[[Stream], None] = lambda stream: None
        """Called with a stream whose terminal has been published. Its engine request may be open still: a stream also
        ends when one of its chunks does not fit a message."""

    def __repr__(self) -> str:
        return f"<Outbox of {len(self._streams)} streams>"

    def put_head(self, stream: Stream, now: float) -> None:
        """Adds the empty chunk that opens a stream or shows that it is alive."""
        stream.last_chunk_at = now
        stream.want_head()
        self._streams[stream] = None

    def put(self, stream: Stream, output: contract.Output, now: float) -> None:
        """Adds an engine's output."""
        stream.add(output)
        if output.token_ids:
            if self._sampled[-1].is_full:
                self._sampled.append(SampledTokens())
            self._sampled[-1].add(stream, output)
        stream.last_chunk_at = now
        self._streams[stream] = None

    def fail(self, stream: Stream) -> None:
        """Ends a stream because of a bug."""
        stream.fail()
        self._streams[stream] = None

    def remove(self, stream: Stream) -> None:
        """Forgets what a stream has to publish."""
        if stream in self._streams:
            del self._streams[stream]
            for sampled in self._sampled:
                sampled.remove(stream)

    def probe(self, stream: Stream, now: float) -> None:
        """Publishes an empty chunk at once. Its no-responders notice can be told from those of other chunks."""
        stream.last_chunk_at = now
        head = stream.head()
        if head is not None:
            payload = codec.encode(head, stream.run.encoding)
            self._publish(Outgoing(stream.run.reply, payload, stream.gone_subject + subjects.PROBE_SUFFIX))

    def replay(self, stream: Stream, offset: int, now: float) -> None:
        """Publishes again, at once, what a stream has published from token `offset` on."""
        stream.last_chunk_at = now
        for chunk in stream.replay(offset, self._room_bytes):
            outgoing = _to_message(stream, chunk)
            if len(outgoing.payload) <= self._room_bytes:
                self._publish(outgoing)
                continue
            # an earlier broker took it; the present one allows less
            if stream.terminal is not None:
                self._publish(_to_message(stream, stream.too_large_terminal(chunk)))
            elif not stream.has_ended:
                stream.ending = stream.too_large_terminal(chunk)
                self._streams[stream] = None
                self.flush()
            return

    def flush(self) -> None:
        """Publishes everything that was added since the last flush that succeeded, or nothing."""
        if not self._streams:
            return
        room_bytes = self._room_bytes
        chunks: list[Outgoing] = []
        for stream in self._streams:
            try:
                chunks += _unpublished(stream, room_bytes)
            except Exception:  # outermost frame of a stream: whatever went wrong, its client gets a terminal
                self._telemetry.failed(stream)
                stream.fail()
                chunks += _unpublished(stream, room_bytes)
        ended = [stream.key for stream in self._streams if stream.ending is not None]
        if not self._announcer.publish_step(self._sampled, chunks, ended):
            return
        # taken first: ending a stream may add outputs
        published, self._streams, self._sampled = self._streams, {}, [SampledTokens()]
        for stream in published:
            stream.mark_published()
            if stream.terminal is not None:
                self._telemetry.finished(stream, stream.terminal)
                self.on_ended(stream)

    @property
    def _room_bytes(self) -> int:
        return self._connection.max_payload - limits.MESSAGE_RESERVE_BYTES

    def _publish(self, outgoing: Outgoing) -> None:
        """Publishes a chunk, or drops it if the broker is away: its client asks for it again."""
        with contextlib.suppress(OutboundBufferLimitError):
            self._connection.publish_all([outgoing])


def _to_message(stream: Stream, chunk: messages.Chunk) -> Outgoing:
    headers = codec.error_headers(chunk.error) if chunk.error else None
    return Outgoing(stream.run.reply, codec.encode(chunk, stream.run.encoding), stream.gone_subject, headers)


def _unpublished(stream: Stream, room_bytes: int) -> list[Outgoing]:
    """Returns a stream's unpublished chunks. One that does not fit a message becomes the terminal."""
    outgoing: list[Outgoing] = []
    for chunk in stream.unpublished(room_bytes):
        outgoing.append(_to_message(stream, chunk))
        if len(outgoing[-1].payload) > room_bytes:
            stream.ending = stream.too_large_terminal(chunk)
            outgoing[-1] = _to_message(stream, stream.ending)
            break
    return outgoing
