"""Clients' hints about their sessions' prefixes in workers' caches: each is passed on to the model's workers.

Only workers know which sessions they have seen, so all of them are told, and none answers: the reply to the client is
the same whether or not a worker knows the session, and reveals nothing about other tenants' sessions."""

import contextlib
import time

import structlog

from tokenbus.protocol.bus.bus import OutboundBufferLimitError
from tokenbus.protocol.bus.reply_sender import ReplySender
from tokenbus.protocol.wire import codec, errors, internal, messages, subjects
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.requests.flights.worker_client import WorkerClient, workers_for
from tokenbus.router.requests.queueing.rate_limiter import RateLimiter
from tokenbus.router.telemetry.metrics import RouterMetrics

FEATURE = "cache_control"


class CacheHints:
    """Passes hints on. Each counts as a request of its tenant."""

    def __init__(
        self,
        replies: ReplySender,
        fleet: Fleet,
        workers: WorkerClient,
        rate_limiter: RateLimiter,
        metrics: RouterMetrics,
    ) -> None:
        self._replies = replies
        self._fleet = fleet
        self._workers = workers
        self._rate_limiter = rate_limiter
        self._metrics = metrics
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<CacheHints to {self._fleet!r}>"

    def take(self, address: subjects.ModelAddress, request: messages.CacheRequest) -> messages.CacheReply:
        """Passes a valid hint on, and returns the reply. Raises RequestError for a model that is not served, and
        for a tenant that has used up its requests."""
        now = time.monotonic()
        assert request.session_id is not None
        assert request.cache_control is not None
        told = self._fleet.workers_of(address.model) or workers_for(self._fleet, address.model, now)
        throttled = self._rate_limiter.charge_request(address.tenant, 0, now)
        if throttled is not None:
            wait_ms = round(throttled.retry_after_s * 1e3, 1)
            raise errors.RequestError(
                errors.make_error(errors.Code.OVERLOADED, throttled.reason, retry_after_ms=wait_ms)
            )
        hint = internal.Control(
            op="retain",
            tenant=address.tenant,
            session_id=request.session_id,
            ttl_ms=request.cache_control.ttl_ms,
        )
        for worker in told:
            if FEATURE in worker.card.features:
                with contextlib.suppress(OutboundBufferLimitError, ConnectionError):  # only a hint
                    self._workers.publish(worker.card, "control", hint)
        kind = "keep" if hint.ttl_ms else "end"
        self._metrics.cache_hints.labels(kind).inc()
        key = subjects.request_key(address.tenant, request.id or "")
        self._log.info("cache_hint", request_id=key, model=address.model, op=kind)
        return messages.CacheReply(id=request.id or "", model=address.model)

    def send(self, subject: str, encoding: codec.Encoding, reply: messages.CacheReply) -> None:
        headers = codec.error_headers(reply.error) if reply.error else None
        self._replies.send(subject, codec.encode(reply, encoding), headers)
