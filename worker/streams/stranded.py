"""Streams that no engine of this worker can continue: routers take them, or they end after a while.

The engine that used an adapter has died, the adapter was unloaded meanwhile, and the next engine can't load it. Another
worker may have it. So the terminal with which the engine gives up such a stream is kept, and the stream stays open."""

from collections.abc import Iterable

from tokenbus.protocol.wire import codec, messages
from tokenbus.worker.broker.announcer import Announcer
from tokenbus.worker.streams.outbox import Outbox
from tokenbus.worker.streams.stream import WorkerStream

STRANDED_S = 10.0
"""Routers have this long to take a stream; then its client gets the terminal."""
_ANNOUNCE_INTERVAL_S = 1.0
"""Routers are told again after this time: a guardian may be gone, and its successor not know of it."""


class StrandedStreams:
    """Hands the stranded streams of one worker to routers."""

    def __init__(self, announcer: Announcer, outbox: Outbox) -> None:
        self._announcer = announcer
        self._outbox = outbox
        self._announced_at = 0.0

    def tick(self, streams: Iterable[WorkerStream], now: float) -> None:
        """Ends the streams that have been stranded too long, and tells routers of the others."""
        keys: list[str] = []
        for stream in streams:
            if stream.last_words is not None and now - stream.stranded_at >= STRANDED_S:
                self._end(stream, now)
            elif stream.last_words is not None:
                keys.append(stream.key)
        if keys and now - self._announced_at >= _ANNOUNCE_INTERVAL_S:
            self._announced_at = now
            self._announcer.log.stranded = keys
            self._announcer.publish_events()

    def cancel(self, stream: WorkerStream, now: float) -> None:
        """Ends a stream as cancelled, if it is stranded."""
        if stream.last_words is not None:
            cancelled = messages.FinishReason.CANCELLED
            stream.last_words = codec.replace(stream.last_words, finish_reason=cancelled, error=None)
            self._end(stream, now)

    def _end(self, stream: WorkerStream, now: float) -> None:
        assert stream.last_words is not None, stream
        output, stream.last_words = stream.last_words, None
        self._outbox.put(stream, output, now)
