"""Clients' hints about their sessions' prefixes in workers' caches: each is passed on to the model's workers.

Only workers know which sessions they have seen, so all of them are told, and none answers: the reply to the client is
the same whether or not a worker knows the session, and reveals nothing about other tenants' sessions."""

import contextlib
import time

import structlog

from tokenbus.protocol.bus.bus import OutboundBufferLimitError
from tokenbus.protocol.wire import codec, internal, messages
from tokenbus.protocol.wire.checks import validation
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.requests.calls.client_calls import Call, CallKind
from tokenbus.router.requests.flights.worker_client import WorkerClient, workers_for
from tokenbus.router.telemetry.metrics import RouterMetrics

FEATURE = "cache_control"


class CacheHints(CallKind[messages.CacheRequest, internal.Control]):
    """Passes hints on. Each counts as a request of its key and tenant."""

    operation = otel_operation = "cache"
    bodies = codec.Decoder(messages.CacheRequest)
    replies = messages.CacheReply

    def __init__(self, fleet: Fleet, workers: WorkerClient, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._workers = workers
        self._metrics = metrics
        self._log = structlog.get_logger()

    def check(self, body: messages.CacheRequest) -> internal.Control:
        validation.check_cache_request(body)
        assert body.cache_control is not None
        return internal.Control(op="retain", session_id=body.session_id, ttl_ms=body.cache_control.ttl_ms)

    async def answer(self, call: Call[messages.CacheRequest, internal.Control]) -> messages.CacheReply:
        """Passes a hint on. Raises RequestError for a model that is not served."""
        now = time.monotonic()
        model, tenant, _ = call.address
        told = self._fleet.workers_of(model) or workers_for(self._fleet, model, now)
        hint = codec.replace(call.work, tenant=tenant)
        for worker in told:
            if FEATURE in worker.card.features:
                with contextlib.suppress(OutboundBufferLimitError, ConnectionError):  # only a hint
                    self._workers.publish(worker.card, "control", hint)
        kind = "keep" if hint.ttl_ms else "end"
        self._metrics.cache_hints.labels(kind).inc()
        self._log.info("cache_hint", request_id=call.key, model=model, op=kind)
        return messages.CacheReply(id=call.request_id, model=model)
