"""Publishes a step's chunks, and the events around them, in the order that the wire promises.

Routers must know that a request has sent its first token, and which blocks changed, before its client can see the
tokens; they must learn of its end only after the client can. So an event goes before the chunks of a step, and another
one after its terminals."""

from collections.abc import Callable

from tokenbus.protocol.bus.bus import BadSubjectError, Bus, OutboundBufferLimitError
from tokenbus.protocol.wire import codec, limits, messages, subjects
from tokenbus.worker import contract
from tokenbus.worker.broker.announcer import Announcer
from tokenbus.worker.streams.request_telemetry import RequestTelemetry
from tokenbus.worker.streams.stream import Stream


class Outbox:
    """Collects the chunks of one step and publishes them at its end."""

    def __init__(self, connection: Bus, announcer: Announcer, telemetry: RequestTelemetry) -> None:
        self._connection = connection
        self._announcer = announcer
        self._telemetry = telemetry
        self._chunks: list[tuple[Stream, messages.Chunk, str]] = []
        self.dropped_chunks = 0
        """Chunks that were not published, mostly because too much was waiting for the broker."""
        self.on_truncated: Callable[[Stream], None] = lambda stream: None
        """Called with a stream that ended early because one of its chunks does not fit a message."""

    def __repr__(self) -> str:
        return f"<Outbox {len(self._chunks)} chunks, {self.dropped_chunks} dropped>"

    def put_head(self, stream: Stream, now: float, *, is_probe: bool = False) -> None:
        """Adds the empty chunk that opens a stream or shows that it is alive.

        The no-responders notice of a probe can be told from those of other chunks."""
        stream.last_chunk_at = now
        head = stream.head()
        if head is not None:
            suffix = subjects.PROBE_SUFFIX if is_probe else ""
            self._chunks.append((stream, head, stream.gone_subject + suffix))

    def replay(self, stream: Stream, offset: int, now: float) -> None:
        """Publishes at once a stream's chunks from a token on."""
        stream.last_chunk_at = now
        room = self._connection.max_payload - limits.MESSAGE_RESERVE_BYTES
        for chunk in stream.replay(offset, room):
            said = self._publish(stream, chunk, stream.gone_subject)
            # a chunk did not fit and became a terminal, so nothing may follow
            if said.finish_reason is not chunk.finish_reason:
                if stream.terminal is None:
                    self._end(stream, chunk, said)
                    self._announcer.publish_events()
                return

    def put(self, stream: Stream, output: contract.Output, now: float) -> None:
        """Adds the chunk of an engine's output."""
        chunk = stream.chunk(output)
        if chunk is None:
            return
        stream.last_chunk_at = now
        # an empty chunk shows no text, so another worker could still start over
        if chunk.tokens and not stream.first_token_sent:
            stream.first_token_sent = True
            self._announcer.first_token_sent(stream.key)
        self._chunks.append((stream, chunk, stream.gone_subject))

    def flush(self) -> None:
        """Publishes everything that was added since the last call."""
        if not self._chunks:
            return
        if self._announcer.has_events_before_chunks:
            self._announcer.publish_events()
        # taken out first: ending a stream may add chunks
        chunks, self._chunks = self._chunks, []
        has_ended = False
        for stream, wanted, gone_subject in chunks:
            if stream.terminal is not None:  # it ended early in this very step
                continue
            chunk = self._publish(stream, wanted, gone_subject)
            if chunk.finish_reason is not None:
                has_ended = True
                self._end(stream, wanted, chunk)
        if has_ended:  # at once: a client that has the terminal may use the id again
            self._announcer.publish_events()

    def _end(self, stream: Stream, wanted: messages.Chunk, terminal: messages.Chunk) -> None:
        stream.terminal = terminal
        self._announcer.request_finished(stream.key)
        self._telemetry.finished(stream, terminal)
        # the engine would continue: the streams have to abort it
        if wanted.finish_reason is None:
            self.on_truncated(stream)

    def _publish(self, stream: Stream, chunk: messages.Chunk, gone_subject: str) -> messages.Chunk:
        """Publishes a chunk, or a terminal in place of one that is too large; returns what was published."""
        payload = codec.encode(chunk, stream.run.encoding)
        if len(payload) + limits.MESSAGE_RESERVE_BYTES > self._connection.max_payload:
            chunk = stream.too_large_terminal(chunk)
            payload = codec.encode(chunk, stream.run.encoding)
        headers = codec.error_headers(chunk.error) if chunk.error else None
        try:
            self._connection.publish(stream.run.reply, payload, reply=gone_subject, headers=headers)
        except (OutboundBufferLimitError, BadSubjectError):
            self.dropped_chunks += 1
        return chunk
