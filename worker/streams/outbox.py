"""Publishes a step's chunks, and the events around them, in the order that the wire promises.

Routers must know which tokens were sampled, and which blocks changed, before clients can see the tokens, but they must
not learn of a request's end before its client can. So one entry of the event log goes before the chunks of a step, and
another one after its terminals. All of it is published together. While the broker lags too far, it waits here and is
published together with what comes next. That is bounded: after 1.5 s without the broker, the fence ends every stream
(`worker/broker/fence.py`)."""

import contextlib
import math
from collections.abc import Callable

from tokenbus.protocol.bus.bus import Bus, OutboundBufferLimitError, Outgoing, lease_time
from tokenbus.protocol.wire import codec, limits, messages
from tokenbus.worker.broker.announcer import Announcer
from tokenbus.worker.broker.event_log import NO_ENDS, Ends, SampledTokens
from tokenbus.worker.contract import engine_output
from tokenbus.worker.streams.chunk_marks import prompt_offset
from tokenbus.worker.streams.holds import Hold
from tokenbus.worker.streams.request_telemetry import StreamTelemetry, has_failed
from tokenbus.worker.streams.stream import WorkerStream


class Outbox:
    """Collects the chunks of a step and publishes them at its end."""

    def __init__(self, connection: Bus, announcer: Announcer, telemetry: StreamTelemetry) -> None:
        self._connection = connection
        self._announcer = announcer
        self._telemetry = telemetry
        self._waiting: list[tuple[WorkerStream, messages.Chunk, Outgoing]] = []
        """The chunks to publish, in order, and the messages that carry them."""
        self._sampled: list[SampledTokens] = []
        """The tokens to announce; each item holds as many as fit in one entry of the event log."""
        self.on_ended: Callable[[WorkerStream, int], None] = lambda stream, terminal_bytes: None
        """Called with a stream whose terminal has been published. Its engine request may still be open: a stream also
        ends when one of its chunks does not fit in a message."""

        self.publish_until = math.inf
        """From this time on, some streams have to be held before anything more is published: `on_late` does that."""
        self.on_late: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        return f"<Outbox of {len(self._waiting)} chunks>"

    @property
    def confirmed_at(self) -> float:
        """Everything published before this time has reached the broker, whose notices have all arrived."""
        return self._connection.confirmed_at

    def put_head(self, stream: WorkerStream, now: float) -> None:
        """Adds the empty chunk that opens a stream or shows that it is alive."""
        stream.last_chunk_at = now
        head = stream.head()
        if head is not None and stream.hold is None:
            self._waiting.append((stream, head, _to_message(stream, head)))

    def withhold(self, stream: WorkerStream, hold: Hold) -> None:
        """Takes back the chunks of a stream that wait to be published; its tokens are still announced."""
        for chunk in [chunk for one, chunk, _ in self._waiting if one is stream]:
            hold.lack(chunk.offset, prompt_offset(chunk))
        self._waiting = [entry for entry in self._waiting if entry[0] is not stream]

    def publish_last(self, stream: WorkerStream) -> None:
        """Adds the terminal of a stream that is given up."""
        if stream.terminal is not None:
            self._waiting.append((stream, stream.terminal, _to_message(stream, stream.terminal)))
            self.flush()

    def probe(self, stream: WorkerStream) -> bool:
        """Publishes a probe of a held stream; returns whether it could."""
        assert stream.hold is not None, stream
        probe = stream.probe(stream.hold.offset)
        if probe is None:
            return False
        chunk, reply = probe
        try:
            self._connection.publish(stream.run.reply, codec.encode(chunk, stream.run.encoding), reply)
        except OutboundBufferLimitError:
            return False
        return True

    def release(self, stream: WorkerStream, held: Hold) -> None:
        """Adds what an open stream's client lacks since it was held."""
        stream.hold = None
        for chunk in stream.replay(held.offset, self.room_bytes, held.prompt_offset):
            self._waiting.append((stream, chunk, _to_message(stream, chunk)))
        self.flush()

    def put(self, stream: WorkerStream, output: engine_output.Output, now: float) -> None:
        """Adds an engine's output. If its chunk can't be made, nothing is added."""
        if output.prompt_logprobs:
            chunks = list(stream.prompt_chunks(output, self.room_bytes))
            if stream.hold is None:
                self._waiting += [(stream, one, _to_message(stream, one)) for one in chunks]
            elif chunks:
                stream.hold.lack(stream.hold.offset, chunks[0].prompt_offset or 0)
            stream.last_chunk_at = now if chunks else stream.last_chunk_at
            return
        chunk = stream.chunk(output)
        stream.last_chunk_at = now
        if output.token_ids:
            if not self._sampled or self._sampled[-1].is_full:
                self._sampled.append(SampledTokens())
            first_token = stream.first_token if output.first_token is not None else None
            self._sampled[-1].add(stream.stream_no, output.token_ids, stream.last_logprobs, first_token)
        if chunk is not None and stream.hold is None:
            self._waiting.append((stream, chunk, _to_message(stream, chunk)))

    def fail(self, stream: WorkerStream) -> None:
        """Ends a stream because of a bug."""
        terminal = stream.fail()
        if stream.hold is not None:
            return
        self._waiting.append((stream, terminal, _to_message(stream, terminal)))

    def remove(self, stream: WorkerStream) -> None:
        """Discards everything that waits to be published for a stream."""
        self._waiting = [entry for entry in self._waiting if entry[0] is not stream]
        for sampled in self._sampled:
            sampled.remove(stream.stream_no)
        self._sampled = [sampled for sampled in self._sampled if sampled]

    def replay(self, stream: WorkerStream, offset: int, now: float, prompt_offset: int | None = None) -> None:
        """Publishes a stream's chunks again from token `offset` on, and the log probabilities of its prompt from
        `prompt_offset` on, unless that is None; does nothing while others wait."""
        if not self.flush():
            return
        stream.last_chunk_at = now
        for chunk in stream.replay(offset, self.room_bytes, prompt_offset):
            outgoing = _to_message(stream, chunk)
            if len(outgoing.payload) <= self.room_bytes:
                self._publish(outgoing)
                continue
            # an earlier broker accepted it; the current one allows less
            if stream.terminal is not None:
                self._publish(_to_message(stream, stream.too_large_terminal(chunk)))
            else:
                self._waiting.append((stream, chunk, outgoing))
                self.flush()  # which ends the stream
            return

    def flush(self) -> bool:
        """Publishes everything that waits, or nothing; returns whether nothing is left."""
        if lease_time() >= self.publish_until:
            self.on_late()
        if not self._waiting and not self._sampled:
            return True
        self._replace_too_large()
        chunks = [outgoing for _, _, outgoing in self._waiting]
        ended = [entry for entry in self._waiting if entry[1].finish_reason is not None]
        ends = NO_ENDS
        if ended:
            failed = [stream.key for stream, terminal, _ in ended if has_failed(terminal)]
            reports = [stream.end_report(terminal, tells_answer=True) for stream, terminal, _ in ended]
            ends = Ends([stream.key for stream, *_ in ended], failed, reports)
        if not self._announcer.publish_step(self._sampled, chunks, ends):
            return False
        self._waiting, self._sampled = [], []
        for stream, terminal, outgoing in ended:
            self._telemetry.finished(stream, terminal)
            self.on_ended(stream, len(outgoing.payload))
        return True

    @property
    def room_bytes(self) -> int:
        """The largest payload that the current broker accepts."""
        return self._connection.max_payload - limits.MESSAGE_RESERVE_BYTES

    def _replace_too_large(self) -> None:
        """Puts a terminal in place of each chunk that does not fit in a message, and of its stream's later chunks."""
        room_bytes = self.room_bytes
        if max([len(outgoing.payload) for _, _, outgoing in self._waiting], default=0) <= room_bytes:
            return
        fitting: list[tuple[WorkerStream, messages.Chunk, Outgoing]] = []
        ended: set[WorkerStream] = set()
        for stream, chunk, outgoing in self._waiting:
            if stream in ended:
                continue
            if len(outgoing.payload) > room_bytes:
                ended.add(stream)
                stream.terminal = chunk = stream.too_large_terminal(chunk)
                outgoing = _to_message(stream, chunk)
            fitting.append((stream, chunk, outgoing))
        self._waiting = fitting

    def _publish(self, outgoing: Outgoing) -> None:
        """Publishes a chunk, or discards it if the outbound buffer is full: its client will ask for it again."""
        with contextlib.suppress(OutboundBufferLimitError):
            self._connection.publish_all([outgoing])


def _to_message(stream: WorkerStream, chunk: messages.Chunk) -> Outgoing:
    headers = codec.error_headers(chunk.error) if chunk.error else None
    run = stream.run
    return Outgoing(run.reply, codec.encode(chunk, run.encoding), stream.marks.mark(chunk), headers)
