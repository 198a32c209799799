"""Spans of OpenTelemetry: where they begin, what they say, and what is passed on where nobody records them."""

import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tokenbus.protocol import extras
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import errors, messages

CONTEXT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "vendor=1"}
ENDPOINT = "http://127.0.0.1:4318/v1/traces"


class Application:
    """An application that has set up OpenTelemetry, and keeps the spans that end."""

    def __init__(self) -> None:
        self.recorded = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.recorded))
        self.tracer = self.provider.get_tracer("application")


@pytest.fixture
def application() -> Application:
    return Application()


async def test_without_an_endpoint_the_headers_that_came_go_on_through_every_span() -> None:
    async with tracing.exporting("", "router", "r1") as tracer:
        span = tracing.start_span(tracer, "route", "server", CONTEXT | {"Content-Type": "application/json"})
    assert not span.is_recording
    with span.start_child("dispatch", "client") as below:
        assert below.headers() == CONTEXT


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": "nonsense"}, {"tracestate": "vendor=1"}])
def test_without_an_endpoint_no_header_is_made_up(headers: tracing.Headers) -> None:
    assert tracing.start_span(tracing.NoopTracer(), "route", "server", headers).headers() == {}


def test_a_span_is_below_the_application_s_current_one(application: Application) -> None:
    tracer = application.tracer
    with tracer.start_as_current_span("page") as page, tracing.start_span(tracer, "chat m", "client", None) as span:
        headers = span.headers()
    ours, theirs = application.recorded.get_finished_spans()
    assert (ours.name, theirs.name) == ("chat m", "page")
    assert ours.parent is not None
    assert ours.parent.span_id == page.get_span_context().span_id
    assert headers["traceparent"].split("-")[2] == f"{ours.context.span_id:016x}"


def test_a_trace_that_the_request_names_goes_before_the_current_span(application: Application) -> None:
    with application.tracer.start_as_current_span("page"):
        tracing.start_span(application.tracer, "chat m", "client", CONTEXT).end()
    ours = application.recorded.get_finished_spans()[0]
    assert ours.parent is not None
    assert f"{ours.context.trace_id:032x}" == CONTEXT["traceparent"].split("-")[1]
    assert f"{ours.parent.span_id:016x}" == CONTEXT["traceparent"].split("-")[2]


def test_attributes_that_are_none_are_left_out(application: Application) -> None:
    span = tracing.start_span(application.tracer, "chat m", "client", None, {"known": 1, "unknown": None})
    span.set_attributes({"later": "x", "never": None})
    span.end()
    (ours,) = application.recorded.get_finished_spans()
    assert dict(ours.attributes or {}) == {"known": 1, "later": "x"}


def test_a_span_may_have_been_before(application: Application) -> None:
    span = tracing.start_span(application.tracer, "generate", "server", None, began_at=0.0)
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


@pytest.mark.parametrize(
    ("error", "name"),
    [(errors.request_error(errors.Code.OVERLOADED), "overloaded"), (ConnectionError("gone"), "ConnectionError")],
)
def test_an_error_that_leaves_a_span_ends_it_with_its_code(
    application: Application, error: Exception, name: str
) -> None:
    with pytest.raises(type(error)), tracing.start_span(application.tracer, "route", "server", None):
        raise error
    (ours,) = application.recorded.get_finished_spans()
    assert dict(ours.attributes or {}) == {"error.type": name}
    assert ours.status.status_code is trace.StatusCode.ERROR
    assert not ours.events, "an exception's text may hold a prompt"


@pytest.mark.parametrize(
    ("length", "is_passed"), [(tracing.MAX_HEADER_CHARS, True), (tracing.MAX_HEADER_CHARS + 1, False)]
)
def test_a_header_that_is_too_long_is_ignored(length: int, is_passed: bool) -> None:
    assert bool(tracing.trace_headers({"traceparent": "0" * length})) is is_passed


@pytest.mark.parametrize("value", ["", "v=" + "😀" * 8])
def test_a_header_that_is_empty_or_no_ascii_is_ignored(value: str) -> None:
    assert tracing.trace_headers({"tracestate": value}) == {}


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "grpc://127.0.0.1:4317", "/v1/traces"])
async def test_an_endpoint_must_be_a_url_of_http(endpoint: str) -> None:
    with pytest.raises(ValueError, match="--otlp-traces-endpoint must be a URL like http://127"):
        async with tracing.exporting(endpoint, "router", "r1"):
            pass


async def test_without_the_extra_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.sdk")] or ["opentelemetry.sdk"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "tokenbus.protocol.telemetry.span_exporter", raising=False)
    monkeypatch.delattr("tokenbus.protocol.telemetry.span_exporter", raising=False)
    with pytest.raises(extras.MissingExtraError, match=r"pip install 'tokenbus\[traces\]'"):
        async with tracing.exporting(ENDPOINT, "router", "r1"):
            pass


def test_a_terminal_says_how_many_tokens_there_were() -> None:
    usage = messages.Usage(prompt_tokens=7, completion_tokens=3, total_tokens=10, cached_tokens=5)
    terminal = messages.Chunk(id="r1", finish_reason=messages.FinishReason.STOP, usage=usage)
    assert tracing.terminal_attributes(terminal) == {
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.id": "r1",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 5,
        "gen_ai.usage.reasoning.output_tokens": None,
    }
