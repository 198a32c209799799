"""Sends a process's spans to a collector, with OpenTelemetry's SDK. Needs the extra `traces`.

The SDK reads its own variables: OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS and others."""

import asyncio
import contextvars
import logging
import threading
import time

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

_SHUTDOWN_S = 1.0
_EXPORT_S = 5.0
_LOG_INTERVAL_S = 60.0


def make_provider(endpoint: str, process: str, instance: str) -> TracerProvider:
    """Returns a provider whose spans are sent to exactly that URL (OTLP over HTTP), from its own thread.

    At most 2,048 spans wait to be sent (OTEL_BSP_MAX_QUEUE_SIZE). Any more, and those that can't be sent, are lost."""
    resource = Resource.create({"service.instance.id": instance})
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):  # no variable names it
        resource = resource.merge(Resource({"service.name": f"tokenbus-{process}"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=_EXPORT_S)))
    logger = logging.getLogger("opentelemetry")
    logger.handlers = [_StructuredHandler()]
    logger.propagate = False
    return provider


async def shut_down(provider: TracerProvider) -> None:
    """Sends the remaining spans, for a second at most: the SDK itself would try for half a minute."""
    closing = threading.Thread(target=provider.shutdown, daemon=True)
    closing.start()
    await asyncio.to_thread(closing.join, _SHUTDOWN_S)


class _StructuredHandler(logging.Handler):
    """Writes the SDK's warnings to our log, at most one a minute."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._logged_at = float("-inf")
        self._context = contextvars.copy_context()  # the SDK's threads don't have the keys bound to this process's log

    def emit(self, record: logging.LogRecord) -> None:
        if time.monotonic() - self._logged_at >= _LOG_INTERVAL_S:
            self._logged_at = time.monotonic()
            self._context.run(self._log, record.getMessage()[:500])

    def _log(self, problem: str) -> None:
        structlog.get_logger().warning("traces_not_sent", error=problem)
