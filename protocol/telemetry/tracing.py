"""OpenTelemetry spans of requests, joined across processes by the headers `traceparent` and `tracestate`.

A process records spans if it exports them (`exporting`), or if the surrounding application passes a tracer. Otherwise
it records nothing, and passes on the headers that a client sent.

Names and attributes follow OpenTelemetry's conventions for generative AI (v1.41) as far as they go; our additions begin
with `tokenbus.`."""

import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Literal, Self

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tokenbus.protocol import extras
from tokenbus.protocol.wire import errors, messages

Tracer = trace.Tracer
NoopTracer = trace.NoOpTracer

Headers = Mapping[str, str] | None
"""Headers of a message, or of an HTTP request."""
Attributes = Mapping[str, str | int | float | bool | Sequence[str] | None]
"""Attributes of a span; None values are left out."""
NO_ATTRIBUTES: Attributes = MappingProxyType({})
Kind = Literal["server", "client", "internal"]

PROPAGATED_HEADERS = ("traceparent", "tracestate")
MAX_HEADER_CHARS = 512
"""Longer headers are ignored, and not passed on."""

MODEL = "gen_ai.request.model"
OPERATION = "gen_ai.operation.name"
REQUEST_ID = "tokenbus.request_id"
TENANT = "tokenbus.tenant"
KEY_ID = "tokenbus.key_id"
WORKER_ID = "tokenbus.worker_id"
ATTEMPT = "tokenbus.attempt"
RESUBMITS = "tokenbus.resubmits"

_KINDS = {"server": trace.SpanKind.SERVER, "client": trace.SpanKind.CLIENT, "internal": trace.SpanKind.INTERNAL}
_propagator = TraceContextTextMapPropagator()


class Span:
    """An OpenTelemetry span and its tracer. Ended once, by `end` or a `with` block; times are time.monotonic's."""

    __slots__ = ("_span", "_tracer")

    def __init__(self, tracer: Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span

    def __repr__(self) -> str:
        return f"<Span {self._span!r}>"

    @property
    def is_recording(self) -> bool:
        """False if this span won't be exported, so that its attributes need not be computed."""
        return self._span.is_recording()

    def headers(self) -> dict[str, str]:
        """Returns message headers that make the receiver's span a child of this one."""
        if self is NOOP_SPAN:
            return {}
        headers: dict[str, str] = {}
        _propagator.inject(headers, trace.set_span_in_context(self._span))
        return headers

    def start_child(
        self, name: str, kind: Kind = "internal", attributes: Attributes = NO_ATTRIBUTES, began_at: float | None = None
    ) -> "Span":
        if not self._span.is_recording():
            return self  # nothing to record, and the same headers to pass on
        context, known = trace.set_span_in_context(self._span), _without_none(attributes)
        span = self._tracer.start_span(name, context, _KINDS[kind], known, start_time=_wall_ns(began_at))
        return Span(self._tracer, span)

    def set_attributes(self, attributes: Attributes) -> None:
        self._span.set_attributes(_without_none(attributes))

    def set_error(self, error_type: str) -> None:
        """Marks the span as failed, with an error code or the name of an exception."""
        self._span.set_attribute("error.type", error_type)
        self._span.set_status(trace.StatusCode.ERROR)

    def end(self, ended_at: float | None = None) -> None:
        self._span.end(_wall_ns(ended_at))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.set_error(str(error.error.code) if isinstance(error, errors.RequestError) else type(error).__name__)
        self.end()


NOOP_SPAN = Span(NoopTracer(), trace.INVALID_SPAN)


def start_span(
    tracer: Tracer,
    name: str,
    kind: Kind,
    headers: Headers,
    attributes: Attributes = NO_ATTRIBUTES,
    began_at: float | None = None,
) -> Span:
    """Starts a child of the span named by `headers`, else of the context's current span, else a new trace."""
    parent = trace_headers(headers)
    if not parent and isinstance(tracer, NoopTracer) and trace.get_current_span() is trace.INVALID_SPAN:
        return NOOP_SPAN
    context = _propagator.extract(parent) if parent else None
    span = tracer.start_span(name, context, _KINDS[kind], _without_none(attributes), start_time=_wall_ns(began_at))
    return Span(tracer, span)


@contextlib.asynccontextmanager
async def exporting(endpoint: str, process: str, instance: str) -> AsyncIterator[Tracer]:
    """Yields the tracer of a server process, whose spans are sent to the collector at `endpoint`.

    Records nothing if `endpoint` is empty. `process` (router, worker, gateway) and `instance` name the process in its
    spans. Raises ValueError if `endpoint` is not a URL, and MissingExtraError without the extra `traces`."""
    if not endpoint:
        yield NoopTracer()
        return
    check_endpoint(endpoint)
    from tokenbus.protocol.telemetry import span_exporter

    provider = span_exporter.make_provider(endpoint, process, instance)
    try:
        yield provider.get_tracer("tokenbus")
    finally:
        await span_exporter.shut_down(provider)


def check_endpoint(endpoint: str) -> None:
    """Raises ValueError if `endpoint` is neither empty nor an HTTP URL, and MissingExtraError if spans can't be sent to
    it because the extra `traces` is not installed."""
    if not endpoint:
        return
    if not endpoint.startswith(("http://", "https://")):
        shown = endpoint.rpartition("@")[2]  # without a password
        raise ValueError(f"--otlp-traces-endpoint must be a URL like http://127.0.0.1:4318/v1/traces, got {shown!r}")
    extras.require("traces", "--otlp-traces-endpoint")


def trace_headers(headers: Headers) -> dict[str, str]:
    """Returns the headers that belong to a trace, with lower-case names."""
    if not headers:
        return {}
    known = {name.lower(): value for name, value in headers.items()}  # Go's libraries write Traceparent
    found = {name: known[name] for name in PROPAGATED_HEADERS if known.get(name)}
    return {name: value for name, value in found.items() if len(value) <= MAX_HEADER_CHARS and value.isascii()}


def terminal_attributes(terminal: messages.Chunk) -> Attributes:
    """Returns the attributes that a span records about the end of a stream."""
    usage = terminal.usage or None
    return {
        "gen_ai.response.finish_reasons": [str(terminal.finish_reason)],
        "gen_ai.response.id": terminal.id,
        "gen_ai.usage.input_tokens": usage and usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage and usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage and usage.cached_tokens,
        "gen_ai.usage.reasoning.output_tokens": (usage.reasoning_tokens or None) if usage else None,
    }


def _without_none(attributes: Attributes) -> dict[str, str | int | float | bool | Sequence[str]]:
    return {name: value for name, value in attributes.items() if value is not None}


def _wall_ns(at: float | None) -> int | None:
    """Converts a time of time.monotonic to nanoseconds since 1970."""
    return None if at is None else time.time_ns() - round((time.monotonic() - at) * 1e9)
