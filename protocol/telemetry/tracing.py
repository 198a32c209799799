"""Spans of requests, which `traceparent` joins across processes; here those that record nothing and only pass it on.

Names and attributes are OpenTelemetry's for generative AI (v1.41) where it has any; ours begin with `tokenbus.`."""

import abc
from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Literal, Protocol, Self

from tokenbus.protocol.wire import errors, messages

Headers = Mapping[str, str] | None
"""Of a message, or of an HTTP request with its names in lower case."""
Attributes = Mapping[str, str | int | float | bool | Sequence[str] | None]
"""What is None is left out."""
NO_ATTRIBUTES: Attributes = MappingProxyType({})
Kind = Literal["server", "client", "internal"]

PROPAGATED_HEADERS = ("traceparent", "tracestate")
MAX_HEADER_CHARS = 512
"""What is longer is no trace context, and is not passed on."""

MODEL = "gen_ai.request.model"
OPERATION = "gen_ai.operation.name"
REQUEST_ID = "tokenbus.request_id"
TENANT = "tokenbus.tenant"
WORKER_ID = "tokenbus.worker_id"
ATTEMPT = "tokenbus.attempt"


class Span(abc.ABC):
    """One stretch of a request's way. Ended once, by `end` or at the end of its `with`; times are of time.monotonic."""

    is_recording: bool
    """False where nobody will see it: then its attributes need not be worked out."""

    @abc.abstractmethod
    def headers(self) -> dict[str, str]:
        """To go with a message, so that its receiver's span comes below this one."""

    @abc.abstractmethod
    def start_child(
        self, name: str, kind: Kind = "internal", attributes: Attributes = NO_ATTRIBUTES, began_at: float | None = None
    ) -> "Span":
        """A stretch of this one, which began now unless that is said."""

    @abc.abstractmethod
    def set_attributes(self, attributes: Attributes) -> None: ...

    @abc.abstractmethod
    def set_error(self, error_type: str) -> None:
        """It ends in an error, of that code."""

    @abc.abstractmethod
    def end(self, ended_at: float | None = None) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.set_error(str(error.error.code) if isinstance(error, errors.RequestError) else type(error).__name__)
        self.end()


class Tracer(Protocol):
    """What makes the spans of a process."""

    def start_span(
        self,
        name: str,
        kind: Kind,
        headers: Headers,
        attributes: Attributes = NO_ATTRIBUTES,
        began_at: float | None = None,
    ) -> Span:
        """A span below the one that `headers` name, or of a new trace."""
        ...

    async def close(self) -> None:
        """Sends what is left, for a bounded time."""
        ...


class _NoopSpan(Span):
    is_recording = False

    def __init__(self, headers: dict[str, str]) -> None:
        self._headers = headers

    def __repr__(self) -> str:
        return f"<Span not recorded, {self._headers}>"

    def headers(self) -> dict[str, str]:
        return self._headers

    def start_child(
        self, name: str, kind: Kind = "internal", attributes: Attributes = NO_ATTRIBUTES, began_at: float | None = None
    ) -> Span:
        return self

    def set_attributes(self, attributes: Attributes) -> None: ...

    def set_error(self, error_type: str) -> None: ...

    def end(self, ended_at: float | None = None) -> None: ...


NOOP_SPAN: Span = _NoopSpan({})


class NoopTracer:
    """Records nothing. What a client sent goes on as it came."""

    def __repr__(self) -> str:
        return "<Untraced>"

    def start_span(
        self,
        name: str,
        kind: Kind,
        headers: Headers,
        attributes: Attributes = NO_ATTRIBUTES,
        began_at: float | None = None,
    ) -> Span:
        context = trace_headers(headers)
        return _NoopSpan(context) if context else NOOP_SPAN

    async def close(self) -> None: ...


def make_tracer(endpoint: str, process: str, instance: str) -> Tracer:
    """Those of a server process: sent to a collector where there is an endpoint. Raises ValueError where that can't be.

    `process` (router, worker, gateway) and `instance` say whose they are."""
    if not endpoint:
        return NoopTracer()
    check_endpoint(endpoint)
    try:
        from tokenbus.protocol.telemetry import otel
    except ImportError as error:
        raise ValueError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'tokenbus[traces]'") from error
    return otel.ExportingTracer(endpoint, process, instance)


def check_endpoint(endpoint: str) -> None:
    """Raises ValueError for an endpoint that is none; an empty one is."""
    if endpoint and not endpoint.startswith(("http://", "https://")):
        shown = endpoint.rpartition("@")[2]  # without a password
        raise ValueError(f"--otlp-traces-endpoint must be a URL as http://127.0.0.1:4318/v1/traces, got {shown!r}")


def trace_headers(headers: Headers) -> dict[str, str]:
    """Those of a message's headers that belong to a trace."""
    if not headers:
        return {}
    known = {name.lower(): value for name, value in headers.items()}  # Go's libraries write Traceparent
    found = {name: known[name] for name in PROPAGATED_HEADERS if known.get(name)}
    return {name: value for name, value in found.items() if len(value) <= MAX_HEADER_CHARS and value.isascii()}


def terminal_attributes(terminal: messages.Chunk) -> Attributes:
    """What a span says of how a stream ended."""
    usage = terminal.usage or None
    found: dict[str, str | int | float | bool | Sequence[str] | None] = {
        "gen_ai.response.finish_reasons": [str(terminal.finish_reason)],
        "gen_ai.response.id": terminal.id,
    }
    if usage is not None:
        found["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        found["gen_ai.usage.output_tokens"] = usage.completion_tokens
        found["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    return found
