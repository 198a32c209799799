"""What a router itself says to a client: refusals, and the terminals of requests that it owns."""

import contextlib
import time

import structlog
from msgspec import UNSET

from tokenbus.protocol.bus.bus import Bus, OutboundBufferLimitError, PayloadTooLargeError
from tokenbus.protocol.bus.reply_sender import ReplySender
from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import codec, errors, limits, messages
from tokenbus.router.metrics import RouterMetrics
from tokenbus.router.requests.flight import Flight

_MOST_KEY_CHARS = 256
MAX_ENDED = 4_096
"""Terminals of this router that can be had again."""


class _Said:
    """A terminal as it was sent, and when it was sent last."""

    __slots__ = ("at", "chunk", "encoding", "reply")

    def __init__(self, reply: str, encoding: codec.Encoding, chunk: messages.Chunk, at: float) -> None:
        self.reply = reply
        self.encoding = encoding
        self.chunk = chunk
        self.at = at


def _usage(flight: Flight) -> messages.Usage:
    """What this router knows of it: the completion is its worker's."""
    prompt = flight.num_prompt_tokens
    return messages.Usage(prompt_tokens=prompt, completion_tokens=0, total_tokens=prompt, cached_tokens=0)


def _timings(flight: Flight) -> messages.Timings:
    total_ms = round((time.monotonic() - flight.received_at) * 1e3, 3)
    return messages.Timings(queue_ms=total_ms, prefill_ms=0.0, ttft_ms=0.0, decode_ms=0.0, total_ms=total_ms)


class TerminalPublisher:
    """Publishes a router's own terminals, each with its line in the log."""

    def __init__(self, connection: Bus, replies: ReplySender, router_id: str, metrics: RouterMetrics) -> None:
        self._connection = connection
        self._replies = replies
        self._router_id = router_id
        self._metrics = metrics
        self._ended: TTLCache[_Said] = TTLCache(limits.ENDED_STREAM_TTL_S, MAX_ENDED)
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<Answers of {self._router_id}>"

    def refuse(self, reply: str, encoding: codec.Encoding, request_id: str, key: str, error: errors.Error) -> None:
        """The terminal of a request that was never taken; `key` is what the log calls it."""
        self._metrics.request_errors.labels(error.code).inc()
        chunk = messages.Chunk(id=request_id, finish_reason=messages.FinishReason.ERROR, error=error)
        self._publish(reply, encoding, chunk)
        self._log.info(
            "request_refused",
            request_id=key[:_MOST_KEY_CHARS],
            router_id=self._router_id,
            code=error.code,
            param=error.param,
        )

    def alive(self, flight: Flight) -> None:
        """An empty chunk: the request is held here. It is left out while the broker has too much to take."""
        with contextlib.suppress(OutboundBufferLimitError):
            self._connection.publish(flight.reply, codec.encode(self._own(flight), flight.encoding))

    def has_said(self, key: str, now: float) -> bool:
        """Whether a terminal of this router for that request can be had again."""
        return self._ended.get(key, now) is not None

    def repeat(self, key: str, now: float) -> bool:
        """Publishes a terminal of this router again; False if it has sent none for that request lately."""
        said = self._ended.get(key, now)
        if said is not None and now - said.at >= limits.REPLAY_INTERVAL_S:
            said.at = now
            self._publish(said.reply, said.encoding, said.chunk)
        return said is not None

    def fail(self, flight: Flight, error: errors.Error) -> None:
        """The terminal of a taken request that ends in an error."""
        self._metrics.request_errors.labels(error.code).inc()
        self._end(flight, messages.FinishReason.ERROR, error)

    def cancelled(self, flight: Flight) -> None:
        """The terminal of a request that was cancelled before a worker had it."""
        self._end(flight, messages.FinishReason.CANCELLED, None)

    def _end(self, flight: Flight, reason: messages.FinishReason, error: errors.Error | None) -> None:
        chunk = self._own(flight, reason, error)
        self._publish(flight.reply, flight.encoding, chunk)
        now = time.monotonic()
        self._ended.put(flight.key, _Said(flight.reply, flight.encoding, chunk, now), now)
        self._log_end(flight, reason, error)

    def _own(
        self, flight: Flight, reason: messages.FinishReason | None = None, error: errors.Error | None = None
    ) -> messages.Chunk:
        return messages.Chunk(
            id=flight.request_id,
            attempt=flight.attempt,
            finish_reason=reason,
            worker_id=None,
            model=flight.model,
            created=int(time.time()),
            error=codec.unset_if_none(error),
            usage=UNSET if reason is None else _usage(flight),
            timings=UNSET if reason is None else _timings(flight),
        )

    def handed_over(self, flight: Flight) -> None:
        """Notes the end of a request whose terminal is its worker's: it has sent it, or will without this router."""
        self._log_end(flight, "by_worker", None)

    def _log_end(self, flight: Flight, reason: str, error: errors.Error | None) -> None:
        self._log.info(
            "request_finished",
            request_id=flight.key,
            router_id=self._router_id,
            worker_id=flight.worker_id,
            attempt=flight.attempt,
            finish_reason=reason,
            code=error.code if error else None,
            total_ms=round((time.monotonic() - flight.received_at) * 1e3, 3),
        )

    def _publish(self, reply: str, encoding: codec.Encoding, chunk: messages.Chunk) -> None:
        headers = codec.error_headers(chunk.error) if chunk.error else None
        try:
            self._replies.send(reply, codec.encode(chunk, encoding), headers)
        except PayloadTooLargeError as error:
            self._log.error("terminal_not_sent", request_id=chunk.id, error=str(error))
