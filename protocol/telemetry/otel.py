"""Spans that OpenTelemetry records: sent to a collector, or handed to the application that this is a part of.

What its SDK reads from variables holds: OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS and others.
Needs the extra `traces`."""

import abc
import asyncio
import contextvars
import logging
import threading
import time

import structlog
from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tokenbus.protocol.telemetry import tracing

_KINDS = {"server": trace.SpanKind.SERVER, "client": trace.SpanKind.CLIENT, "internal": trace.SpanKind.INTERNAL}
_CLOSE_S = 1.0
_EXPORT_S = 5.0
_SAY_AGAIN_S = 60.0
_wire = TraceContextTextMapPropagator()


class _RecordedSpan(tracing.Span):
    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        self.is_recording = span.is_recording()

    def __repr__(self) -> str:
        return f"<Span {self._span!r}>"

    def headers(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        _wire.inject(carrier, trace.set_span_in_context(self._span))
        return carrier

    def start_child(
        self,
        name: str,
        kind: tracing.Kind = "internal",
        attributes: tracing.Attributes = tracing.NO_ATTRIBUTES,
        began_at: float | None = None,
    ) -> tracing.Span:
        return _start(self._tracer, name, kind, trace.set_span_in_context(self._span), attributes, began_at)

    def set_attributes(self, attributes: tracing.Attributes) -> None:
        for name, value in attributes.items():
            if value is not None:
                self._span.set_attribute(name, value)

    def set_error(self, error_type: str) -> None:
        self._span.set_attribute("error.type", error_type)
        self._span.set_status(trace.StatusCode.ERROR)

    def end(self, ended_at: float | None = None) -> None:
        self._span.end(_wall_ns(ended_at))


class _OtelTracer(abc.ABC):
    """Begins spans with a tracer, below what `_above` finds."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    @abc.abstractmethod
    def _above(self, found: dict[str, str]) -> context.Context:
        """Of a message, by the headers of it that belong to a trace."""

    def start_span(
        self,
        name: str,
        kind: tracing.Kind,
        headers: tracing.Headers,
        attributes: tracing.Attributes = tracing.NO_ATTRIBUTES,
        began_at: float | None = None,
    ) -> tracing.Span:
        return _start(self._tracer, name, kind, self._above(tracing.trace_headers(headers)), attributes, began_at)


class ExportingTracer(_OtelTracer):
    """Sends the spans of this process to a collector at that very URL (OTLP over HTTP, from a thread of its own).

    At most 2,048 wait to be sent (OTEL_BSP_MAX_QUEUE_SIZE); what is more, or can't be sent, is lost."""

    def __init__(self, endpoint: str, process: str, instance: str) -> None:
        resource = Resource.create({"service.instance.id": instance})
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):  # no variable names it
            resource = resource.merge(Resource({"service.name": f"tokenbus-{process}"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=_EXPORT_S)))
        super().__init__(self._provider.get_tracer("tokenbus"))
        _log_as_we_do()

    def __repr__(self) -> str:
        return f"<Exported {self._provider!r}>"

    def _above(self, found: dict[str, str]) -> context.Context:
        return _wire.extract(found, context.Context())

    async def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)  # it may take half a minute
        closing.start()
        await asyncio.to_thread(closing.join, _CLOSE_S)


class ApplicationTracer(_OtelTracer):
    """Hands spans to the tracer that the application has set up, or to one of `provider`'s, below its current span."""

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        super().__init__(trace.get_tracer("tokenbus", tracer_provider=provider))

    def __repr__(self) -> str:
        return f"<ApplicationTracer {self._tracer!r}>"

    def _above(self, found: dict[str, str]) -> context.Context:
        return _wire.extract(found, context.get_current())

    async def close(self) -> None: ...


def _start(
    tracer: trace.Tracer,
    name: str,
    kind: tracing.Kind,
    above: context.Context,
    attributes: tracing.Attributes,
    began_at: float | None,
) -> tracing.Span:
    given = {key: value for key, value in attributes.items() if value is not None}
    return _RecordedSpan(tracer, tracer.start_span(name, above, _KINDS[kind], given, start_time=_wall_ns(began_at)))


def _wall_ns(at: float | None) -> int | None:
    """A time of time.monotonic as OpenTelemetry counts it."""
    return None if at is None else time.time_ns() - round((time.monotonic() - at) * 1e9)


class _Structured(logging.Handler):
    """The SDK's own complaints as lines of our log, one a minute."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said_at = float("-inf")
        self._context = contextvars.copy_context()  # it is told on a thread, which knows nothing of the process

    def emit(self, record: logging.LogRecord) -> None:
        if time.monotonic() - self._said_at >= _SAY_AGAIN_S:
            self._said_at = time.monotonic()
            self._context.run(self._say, record.getMessage()[:500])

    def _say(self, problem: str) -> None:
        structlog.get_logger().warning("traces_not_sent", error=problem)


def _log_as_we_do() -> None:
    logger = logging.getLogger("opentelemetry")
    logger.handlers = [_Structured()]
    logger.propagate = False
