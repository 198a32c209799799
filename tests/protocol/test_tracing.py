import sys

import pytest

from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import errors, messages

CONTEXT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "vendor=1"}


def test_without_an_endpoint_what_came_goes_on_through_every_span() -> None:
    span = tracing.make_tracer("", "router", "r1").start_span(
        "route", "server", CONTEXT | {"Content-Type": "application/json"}
    )
    assert not span.is_recording
    with span.start_child("dispatch", "client") as below:
        assert below.headers() == CONTEXT


def test_without_an_endpoint_nothing_is_made_up() -> None:
    assert tracing.NoopTracer().start_span("route", "server", None).headers() == {}
    assert tracing.NoopTracer().start_span("route", "server", {"tracestate": "vendor=1"}).headers() == {
        "tracestate": "vendor=1"
    }


@pytest.mark.parametrize(
    ("length", "is_passed"), [(tracing.MAX_HEADER_CHARS, True), (tracing.MAX_HEADER_CHARS + 1, False)]
)
def test_a_header_that_is_too_long_is_not_passed_on(length: int, is_passed: bool) -> None:
    assert bool(tracing.trace_headers({"traceparent": "0" * length})) is is_passed


def test_an_empty_header_is_none() -> None:
    assert tracing.trace_headers({"traceparent": ""}) == {}


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "grpc://127.0.0.1:4317", "/v1/traces"])
def test_an_endpoint_must_be_a_url_of_http(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"--otlp-traces-endpoint must be a URL as http://127\.0\.0\.1:4318/v1/traces"):
        tracing.make_tracer(endpoint, "router", "r1")


def test_without_the_extra_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    for name in [
        name for name in sys.modules if name.startswith(("opentelemetry.", "tokenbus.protocol.telemetry.otel"))
    ]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delattr("tokenbus.protocol.telemetry.otel", raising=False)
    with pytest.raises(ValueError, match=r"pip install 'tokenbus\[traces\]'"):
        tracing.make_tracer("http://127.0.0.1:4318/v1/traces", "router", "r1")


class _Noted(tracing.Span):
    """A span that remembers how it ended."""

    is_recording = True

    def __init__(self) -> None:
        self.said: list[str] = []

    def headers(self) -> dict[str, str]:
        return {}

    def start_child(
        self,
        name: str,
        kind: tracing.Kind = "internal",
        attributes: tracing.Attributes = tracing.NO_ATTRIBUTES,
        began_at: float | None = None,
    ) -> tracing.Span:
        return self

    def set_attributes(self, attributes: tracing.Attributes) -> None: ...

    def set_error(self, error_type: str) -> None:
        self.said.append(error_type)

    def end(self, ended_at: float | None = None) -> None:
        self.said.append("end")


@pytest.mark.parametrize(
    ("error", "said"),
    [(errors.request_error(errors.Code.OVERLOADED), "overloaded"), (ConnectionError("gone"), "ConnectionError")],
)
def test_what_leaves_a_span_by_an_error_ends_it_with_its_code(error: Exception, said: str) -> None:
    span = _Noted()
    with pytest.raises(type(error)), span:
        raise error
    assert span.said == [said, "end"]


def test_a_terminal_says_how_many_tokens_there_were() -> None:
    usage = messages.Usage(prompt_tokens=7, completion_tokens=3, total_tokens=10, cached_tokens=5)
    terminal = messages.Chunk(id="r1", finish_reason=messages.FinishReason.STOP, usage=usage)
    assert tracing.terminal_attributes(terminal) == {
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.id": "r1",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 5,
    }


def test_a_header_that_is_no_ascii_is_not_passed_on() -> None:
    assert tracing.trace_headers({"tracestate": "v=" + "😀" * 8}) == {}
