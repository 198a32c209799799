"""An OpenTelemetry collector: receives spans over HTTP and returns them as tuples."""

import contextlib
import http.server
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


class Span(NamedTuple):
    service: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    is_error: bool


class Collector:
    """Collects the spans sent to `url`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._spans: list[Span] = []
        self._came = threading.Condition()

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._came:
            for resource in request.resource_spans:
                owner = {one.key: _value(one.value) for one in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self._spans += [_span(str(owner["service.name"]), span) for span in scope.spans]
            self._came.notify_all()

    def trace_of(self, request_id: str, names: set[tuple[str, str]], timeout_s: float = 60.0) -> list[Span]:
        """Waits until the request's trace has a span of each (service, name); returns all its spans."""
        deadline = time.monotonic() + timeout_s
        with self._came:
            while True:
                found = self._with(request_id)
                if names <= {(span.service, span.name) for span in found}:
                    return found
                assert self._came.wait(deadline - time.monotonic()), f"not all of {names}: {found}"

    def _with(self, request_id: str) -> list[Span]:
        ids = {span.trace_id for span in self._spans if span.attributes.get("tokenbus.request_id") == request_id}
        return [span for span in self._spans if span.trace_id in ids]


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        yield collector
        server.shutdown()
        serving.join()


def _span(service: str, span: Any) -> Span:
    return Span(
        service=service,
        name=span.name,
        kind=span.kind,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        began_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        attributes={one.key: _value(one.value) for one in span.attributes},
        is_error=span.status.code == 2,
    )


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
