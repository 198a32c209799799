"""The terminals that a router itself sends, for requests that no worker owns, and their keepalives.

A terminal is kept for a while after it was sent, so that a client that has missed it can ask for it again."""

import contextlib
import dataclasses
import time

import structlog

from tokenbus.protocol.bus.bus import Bus, OutboundBufferLimitError, PayloadTooLargeError
from tokenbus.protocol.bus.reply_sender import ReplySender
from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import codec, errors, limits, messages
from tokenbus.router.requests.flights.flight import Flight
from tokenbus.router.telemetry.metrics import RouterMetrics

_MAX_KEY_CHARS = 256
_MAX_ENDED = 4_096
"""Terminals that are kept; fewer if they are large, as the last words of a worker may be."""
_OBJECT_GROWTH = 4
"""Bytes of memory for each byte of a terminal's message."""


@dataclasses.dataclass(slots=True)
class _SentTerminal:
    reply: str
    encoding: codec.Encoding
    chunk: messages.Chunk
    sent_at: float


class TerminalPublisher:
    """Publishes a router's own terminals and logs the end of each request."""

    def __init__(self, bus: Bus, replies: ReplySender, router_id: str, metrics: RouterMetrics) -> None:
        self._bus = bus
        self._replies = replies
        self._router_id = router_id
        self._metrics = metrics
        self._sent: TTLCache[_SentTerminal] = TTLCache(limits.ENDED_STREAM_TTL_S, limits.MAX_ENDED_STREAM_BYTES)
        self._log = structlog.get_logger()

    def refuse(self, reply: str, encoding: codec.Encoding, request_id: str, key: str, error: errors.Error) -> None:
        """Ends a message that never became a flight; `key` names it in the log."""
        self._metrics.request_errors.labels(error.code).inc()
        chunk = messages.Chunk(id=request_id, finish_reason=messages.FinishReason.ERROR, error=error)
        self._publish(reply, encoding, chunk)
        self._log.info(
            "request_refused",
            request_id=key[:_MAX_KEY_CHARS],
            router_id=self._router_id,
            code=error.code,
            param=error.param,
        )

    def end(self, flight: Flight, error: errors.Error | None) -> None:
        """Ends a request with an error, or as cancelled without one."""
        reason = messages.FinishReason.ERROR if error else messages.FinishReason.CANCELLED
        if error:
            self._metrics.request_errors.labels(error.code).inc()
        now = time.monotonic()
        prompt_tokens, completion_tokens = flight.num_prompt_tokens, flight.num_streamed_tokens
        first = flight.completion.first_token
        total_ms = _ms(now - flight.received_at)
        chunk = messages.Chunk(
            id=flight.request_id,
            attempt=flight.attempt,
            offset=completion_tokens,
            finish_reason=reason,
            worker_id=None,
            model=flight.model,
            created=int(time.time()),
            error=codec.unset_if_none(error),
            usage=messages.Usage(
                prompt_tokens=prompt_tokens,
                completion_tokens=completion_tokens,
                total_tokens=prompt_tokens + completion_tokens,
                cached_tokens=first.cached_tokens if first else 0,
            ),
            timings=messages.Timings(queue_ms=total_ms, prefill_ms=0.0, ttft_ms=0.0, decode_ms=0.0, total_ms=total_ms),
        )
        self._send(flight, chunk)
        self.log_end(flight, reason, error)

    def end_with(self, flight: Flight, last_words: messages.Chunk) -> None:
        """Ends a request with the terminal that its last worker left, whatever has been tried since."""
        self._send(flight, codec.replace(last_words, attempt=flight.attempt))
        self.log_end(flight, str(last_words.finish_reason))

    def log_end(self, flight: Flight, reason: str, error: errors.Error | None = None) -> None:
        """Logs the end of a request. Its worker has sent the terminal, or will, if the reason is `by_worker`."""
        self._log.info(
            "request_finished",
            request_id=flight.key,
            model=flight.model,
            router_id=self._router_id,
            worker_id=flight.worker_id,
            attempt=flight.attempt,
            finish_reason=reason,
            code=error.code if error else None,
            placed_ms=None if flight.first_accepted_at is None else _ms(flight.first_accepted_at - flight.received_at),
            total_ms=_ms(time.monotonic() - flight.received_at),
        )

    def send_keepalive(self, flight: Flight, load_progress: float | None = None) -> None:
        """Publishes an empty chunk: this router still holds the request, perhaps while its model is loaded. It is
        skipped while the bus is busy."""
        chunk = messages.Chunk(
            id=flight.request_id,
            attempt=flight.attempt,
            offset=flight.num_streamed_tokens,
            worker_id=None,
            model=flight.model,
            created=int(time.time()),
            load_progress=codec.unset_if_none(load_progress),
        )
        with contextlib.suppress(OutboundBufferLimitError):
            self._bus.publish(flight.reply, codec.encode(chunk, flight.encoding))

    def replay(self, key: str, now: float) -> bool:
        """Publishes a kept terminal again, at most every `limits.REPLAY_INTERVAL_S`; returns False if there is none."""
        sent = self._sent.get(key, now)
        if sent is not None and now - sent.sent_at >= limits.REPLAY_INTERVAL_S:
            sent.sent_at = now
            self._publish(sent.reply, sent.encoding, sent.chunk)
        return sent is not None

    def drop(self, key: str) -> None:
        """Forgets a kept terminal, because a later request has its id."""
        self._sent.pop(key)

    def _send(self, flight: Flight, terminal: messages.Chunk) -> None:
        size = self._publish(flight.reply, flight.encoding, terminal)
        weight = max(_OBJECT_GROWTH * size, limits.MAX_ENDED_STREAM_BYTES // _MAX_ENDED)
        now = time.monotonic()
        kept = _SentTerminal(flight.reply, flight.encoding, terminal, now)
        self._sent.put(flight.key, kept, now, min(weight, limits.MAX_ENDED_STREAM_BYTES))

    def _publish(self, reply: str, encoding: codec.Encoding, chunk: messages.Chunk) -> int:
        """Publishes a terminal and returns the size of its message."""
        headers = codec.error_headers(chunk.error) if chunk.error else None
        payload = codec.encode(chunk, encoding)
        try:
            self._replies.send(reply, payload, headers)
        except PayloadTooLargeError as error:
            self._log.error("terminal_not_sent", request_id=chunk.id, error=str(error))
        return len(payload)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
