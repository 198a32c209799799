"""Publishes what clients lack of their streams, and the events around it, in the order that the wire promises.

Routers must know which tokens were sampled, and which blocks changed, before clients can see the tokens, but they must
not learn of a request's end before its client can. So one entry of the event log goes before the chunks of a step, and
another one after its terminals. All of it is published together. While the broker lags too far, nothing is published:
the cursors of the streams stay where they are, and what comes next is published together with that. That is bounded:
after 1.5 s without the broker, the fence ends every stream (`worker/broker/fence.py`)."""

import contextlib
import math
from collections.abc import Callable, Sequence

from tokenbus.protocol.bus.bus import Bus, OutboundBufferLimitError, Outgoing, lease_time
from tokenbus.protocol.wire import codec, limits, messages
from tokenbus.worker.broker.announcer import Announcer
from tokenbus.worker.broker.event_log import NO_ENDS, Ends, SampledTokens
from tokenbus.worker.contract import engine_output
from tokenbus.worker.streams.request_telemetry import StreamTelemetry, has_failed
from tokenbus.worker.streams.stream import WorkerStream

_AT_ONCE_BYTES = 2 * 1024 * 1024
"""No more of one stream is published at once: a client may ask for all of a long one again, with log probabilities.
An open stream continues with the next step or tick, an ended one when its client asks for the rest."""


class Outbox:
    """Publishes the streams of one worker, those that have changed at the end of each step."""

    def __init__(self, connection: Bus, announcer: Announcer, telemetry: StreamTelemetry) -> None:
        self._connection = connection
        self._announcer = announcer
        self._telemetry = telemetry
        self._changed: dict[WorkerStream, None] = {}
        """The streams of which something may have to be published, in the order of their changes."""
        self.on_ended: Callable[[WorkerStream, int], None] = lambda stream, terminal_bytes: None
        """Called with a stream whose terminal has been published. Its engine request may still be open: a stream also
        ends when one of its chunks does not fit in a message."""

        self.publish_until = math.inf
        """From this time on, some streams have to be held before anything more is published: `on_late` does that."""
        self.on_late: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        return f"<Outbox of {len(self._changed)} streams>"

    @property
    def confirmed_at(self) -> float:
        """Everything published before this time has reached the broker, whose notices have all arrived."""
        return self._connection.confirmed_at

    def put(self, stream: WorkerStream, output: engine_output.Output, now: float) -> None:
        """Takes an engine's output for a stream. If that fails, nothing of it is published."""
        stream.take(output)
        stream.last_chunk_at = now
        self._changed[stream] = None

    def put_head(self, stream: WorkerStream, now: float) -> None:
        """Has an empty chunk published that opens a stream or shows that it is alive, unless there is more."""
        stream.show()
        stream.last_chunk_at = now
        self._changed[stream] = None

    def fail(self, stream: WorkerStream) -> None:
        """Ends a stream because of a bug."""
        stream.fail()
        self._changed[stream] = None

    def remove(self, stream: WorkerStream) -> None:
        """Publishes nothing more of a stream."""
        self._changed.pop(stream, None)

    def publish_again(self, stream: WorkerStream, now: float) -> None:
        """Publishes what the client of a stream lacks, open or ended, or an empty chunk if it lacks nothing."""
        if stream.is_open:
            self.put_head(stream, now)
            self.flush()
            return
        chunks, outgoing, _ = self._make(stream)
        with contextlib.suppress(OutboundBufferLimitError):  # its client will ask for it again, and for what is left
            self._connection.publish_all(outgoing)
        stream.flushed(chunks)

    def probe(self, stream: WorkerStream) -> bool:
        """Publishes a probe of a held stream; returns whether it could."""
        probe = stream.probe()
        if probe is None:
            return False
        chunk, reply = probe
        try:
            self._connection.publish(stream.run.reply, codec.encode(chunk, stream.run.encoding), reply)
        except OutboundBufferLimitError:
            return False
        return True

    def flush(self) -> bool:
        """Publishes everything that is due, or nothing; returns whether nothing is left."""
        if lease_time() >= self.publish_until:
            self.on_late()
        if not self._changed:
            return True
        sampled: list[SampledTokens] = []
        outgoing: list[Outgoing] = []
        made: list[tuple[WorkerStream, Sequence[messages.Chunk]]] = []
        unfinished: dict[WorkerStream, None] = {}
        ended: list[tuple[WorkerStream, messages.Chunk, int]] = []
        room_bytes = self.room_bytes
        for stream in self._changed:
            chunks: Sequence[messages.Chunk] = ()
            if stream.hold is None and (plain := stream.plain_chunk(room_bytes)) is not None:
                outgoing.append(_to_message(stream, plain, 0))
                chunks = (plain,)
            elif stream.hold is None:
                chunks, some, is_whole = self._make(stream)
                outgoing += some
                if not is_whole:
                    unfinished[stream] = None
                if chunks and chunks[-1].finish_reason is not None:
                    ended.append((stream, chunks[-1], len(some[-1].payload)))
            stream.announce(sampled)  # last: a stream whose chunks can't be made has ended
            made.append((stream, chunks))
        ends = NO_ENDS
        if ended:
            failed = [stream.key for stream, terminal, _ in ended if has_failed(terminal)]
            reports = [stream.end_report(terminal, tells_answer=True) for stream, terminal, _ in ended]
            ends = Ends([stream.key for stream, *_ in ended], failed, reports)
        if not self._announcer.publish_step(sampled, outgoing, ends):
            return False
        self._changed = unfinished
        for stream, chunks in made:
            stream.flushed(chunks)
        for stream, terminal, terminal_bytes in ended:
            self._telemetry.finished(stream, terminal)
            self.on_ended(stream, terminal_bytes)
        return not self._changed

    @property
    def room_bytes(self) -> int:
        """The largest payload that the current broker accepts."""
        return self._connection.max_payload - limits.MESSAGE_RESERVE_BYTES

    def _make(self, stream: WorkerStream) -> tuple[list[messages.Chunk], list[Outgoing], bool]:
        """Returns the chunks with what a stream's client lacks, the messages that carry them, and whether that is all,
        not just as much as is published at once. If one can't be made, or would not fit, an error is the last one."""
        chunks: list[messages.Chunk] = []
        outgoing: list[Outgoing] = []
        room_bytes, left_bytes = self.room_bytes, _AT_ONCE_BYTES
        try:
            for chunk in stream.unpublished(room_bytes):
                message = _to_message(stream, chunk, len(chunks))
                if len(message.payload) > room_bytes:
                    chunk = stream.too_large(chunk)
                    return [*chunks, chunk], [*outgoing, _to_message(stream, chunk, len(chunks))], True
                if left_bytes <= 0:
                    return chunks, outgoing, False
                chunks.append(chunk)
                outgoing.append(message)
                left_bytes -= len(message.payload)
        except Exception:  # outermost frame of a stream: in any case, its client gets a terminal
            self._telemetry.failed(stream)
            terminal = stream.fail()
            return [terminal], [_to_message(stream, terminal, 0)], True
        return chunks, outgoing, True


def _to_message(stream: WorkerStream, chunk: messages.Chunk, ahead: int) -> Outgoing:
    """Returns the message of a chunk that is published behind `ahead` others of its stream."""
    headers = codec.error_headers(chunk.error) if chunk.error else None
    run = stream.run
    return Outgoing(run.reply, codec.encode(chunk, run.encoding), stream.marks.subject(ahead), headers)
