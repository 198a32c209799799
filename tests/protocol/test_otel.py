"""Spans as OpenTelemetry records them, in an application that has set it up for itself."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tokenbus.protocol.telemetry import otel

BEGUN = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


class Application:
    def __init__(self) -> None:
        self.recorded = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.recorded))
        self.traces = otel.ApplicationTracer(self.provider)


@pytest.fixture
def application() -> Application:
    return Application()


def test_a_span_is_below_the_application_s_current_one(application: Application) -> None:
    tracer = application.provider.get_tracer("application")
    with tracer.start_as_current_span("page") as page, application.traces.start_span("chat m", "client", None) as span:
        headers = span.headers()
    ours, theirs = application.recorded.get_finished_spans()
    assert (ours.name, theirs.name) == ("chat m", "page")
    assert ours.parent is not None
    assert ours.parent.span_id == page.get_span_context().span_id
    assert headers["traceparent"].split("-")[2] == f"{ours.context.span_id:016x}"


def test_a_trace_that_the_request_names_goes_before_it(application: Application) -> None:
    with application.provider.get_tracer("application").start_as_current_span("page"):
        application.traces.start_span("chat m", "client", BEGUN).end()
    ours = application.recorded.get_finished_spans()[0]
    assert ours.parent is not None
    assert f"{ours.context.trace_id:032x}" == BEGUN["traceparent"].split("-")[1]
    assert f"{ours.parent.span_id:016x}" == BEGUN["traceparent"].split("-")[2]


def test_an_error_is_the_span_s_and_what_is_not_known_is_left_out(application: Application) -> None:
    span = application.traces.start_span("chat m", "client", None, {"known": 1, "unknown": None})
    span.set_attributes({"later": "x", "never": None})
    span.set_error("overloaded")
    span.end()
    (ours,) = application.recorded.get_finished_spans()
    assert dict(ours.attributes or {}) == {"known": 1, "later": "x", "error.type": "overloaded"}
    assert not ours.status.is_ok


def test_a_stretch_may_have_been_before(application: Application) -> None:
    span = application.traces.start_span("generate", "server", None, began_at=0.0)
    span.start_child("queue", began_at=1.0).end(3.5)
    span.end(10.0)
    queue, whole = application.recorded.get_finished_spans()
    assert whole.start_time is not None
    assert whole.end_time is not None
    assert queue.start_time is not None
    assert queue.end_time is not None
    assert (queue.end_time - queue.start_time) / 1e9 == pytest.approx(2.5, abs=0.01)
    assert (queue.start_time - whole.start_time) / 1e9 == pytest.approx(1.0, abs=0.01)
    assert (whole.end_time - whole.start_time) / 1e9 == pytest.approx(10.0, abs=0.01)
