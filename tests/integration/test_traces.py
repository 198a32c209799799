"""Traces of real processes: one for each request, from its client to its worker."""

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio

from tests.support.collector import Collector, Span, collecting
from tests.support.exact_client import until_ready
from tests.support.system import System, running_gateway
from tests.support.wire_answers import answer_of
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.telemetry import tracing

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # the exporter's session ends with its thread

PARENT_ID = "b7ad6b7169203331"
OF_ROUTER = {("tokenbus-router", name) for name in ("route", "tokenize", "place", "dispatch")}
OF_WORKER = {("tokenbus-worker", name) for name in ("generate", "queue", "prefill", "decode")}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with pytest.MonkeyPatch.context() as variables, collecting() as collector:
        variables.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield collector


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> AsyncIterator[System]:
    system = await System.start(tmp_path_factory.mktemp("system"))
    endpoint = ("--otlp-traces-endpoint", collector.url)
    system.router("router", *endpoint)
    system.worker("w1", *endpoint)
    await until_ready(await system.connect(), 1)
    yield system
    await system.stop()


def trace_id(number: int) -> str:
    return f"{number:032x}"


def began(number: int) -> dict[str, str]:
    """Returns the headers of a message whose sender has started a trace."""
    return {"traceparent": f"00-{trace_id(number)}-{PARENT_ID}-01"}


def parents(spans: list[Span]) -> dict[str, str]:
    names = {span.span_id: span.name for span in spans}
    return {span.name: names.get(span.parent_id, span.parent_id) for span in spans}


async def test_a_request_is_one_trace_from_its_client_to_its_worker(system: System, collector: Collector) -> None:
    async with (
        tracing.exporting(collector.url, "client", "test") as tracer,
        await WireClient.connect(system.url, tracer=tracer) as client,
    ):
        stream = client.generate("demo", prompt="Once upon a time", max_tokens=20, ignore_eos=True, id="whole")
        terminal = [chunk async for chunk in stream][-1]
    spans = collector.trace_of("whole", {("tokenbus-client", "text_completion demo")} | OF_ROUTER | OF_WORKER)
    assert parents(spans) == {
        "text_completion demo": "",
        "route": "text_completion demo",
        "tokenize": "route",
        "place": "route",
        "dispatch": "route",
        "generate": "dispatch",
        "queue": "generate",
        "prefill": "generate",
        "decode": "generate",
    }
    by_name = {span.name: span for span in spans}
    for asked in (by_name["text_completion demo"], by_name["generate"]):
        assert asked.attributes["gen_ai.request.model"] == "demo"
        assert asked.attributes["gen_ai.response.finish_reasons"] == ["length"]
        assert asked.attributes["gen_ai.usage.output_tokens"] == 20
        assert asked.attributes["gen_ai.usage.input_tokens"] == terminal.usage.prompt_tokens
        assert asked.attributes["tokenbus.worker_id"] == "w1"
    assert by_name["generate"].attributes["tokenbus.attempt"] == 1
    assert by_name["text_completion demo"].attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert not any(span.is_error for span in spans)


async def test_the_stretches_of_a_stream_follow_each_other_within_it(system: System, collector: Collector) -> None:
    async with await WireClient.connect(system.url) as client:
        async for _ in client.generate("demo", prompt="Once", max_tokens=20, id="stretches"):
            pass
    spans = [span for span in collector.trace_of("stretches", OF_WORKER) if span.service == "tokenbus-worker"]
    whole = next(span for span in spans if span.name == "generate")
    stretches = sorted((span.began_ns, span.ended_ns, span.name) for span in spans if span is not whole)
    assert [name for _, _, name in stretches] == ["queue", "prefill", "decode"]
    for (_, ended_ns, _), (began_ns, _, _) in itertools.pairwise(stretches):
        assert abs(began_ns - ended_ns) < 1_000_000
    assert abs(stretches[0][0] - whole.began_ns) < 50_000_000
    assert stretches[-1][1] <= whole.ended_ns + 50_000_000


async def test_a_trace_that_a_client_began_is_gone_on_with(system: System, collector: Collector) -> None:
    async with await WireClient.connect(system.url) as client:
        async for _ in client.generate("demo", prompt="Once", max_tokens=2, id="begun", headers=began(1)):
            pass
    spans = collector.trace_of("begun", OF_ROUTER | OF_WORKER)
    assert parents(spans)["route"] == PARENT_ID
    assert {span.trace_id for span in spans} == {trace_id(1)}


async def test_what_ends_in_an_error_says_which(system: System, collector: Collector) -> None:
    async with await WireClient.connect(system.url) as client:
        words = "word " * 4_000
        chunks = [chunk async for chunk in client.generate("demo", prompt=words, id="long")]
    assert chunks[-1].error.code == "prompt_too_long"
    spans = collector.trace_of("long", {("tokenbus-router", "route")})
    route = next(span for span in spans if span.name == "route")
    assert route.is_error
    assert route.attributes["error.type"] == "prompt_too_long"


async def test_a_gateway_goes_on_with_the_trace_of_an_http_request(
    system: System, collector: Collector, tmp_path: Path
) -> None:
    with running_gateway(system.url, tmp_path, "--otlp-traces-endpoint", collector.url) as gateway:
        asked = {"model": "demo", "messages": [{"role": "user", "content": "What is 2 + 2?"}], "max_tokens": 3}
        async with httpx2.AsyncClient() as http:
            answer = await http.post(f"{gateway.url}/chat/completions", json=asked, headers=began(2))
    assert answer.status_code == 200
    names = {("tokenbus-gateway", "POST /v1/chat/completions"), ("tokenbus-gateway", "chat demo")}
    spans = collector.trace_of(answer.headers["x-request-id"], names | OF_WORKER)
    assert parents(spans)["POST /v1/chat/completions"] == PARENT_ID
    assert parents(spans)["chat demo"] == "POST /v1/chat/completions"
    assert parents(spans)["route"] == "chat demo"
    assert {span.trace_id for span in spans} == {trace_id(2)}


async def test_a_collector_that_is_away_costs_nothing_but_a_line(tmp_path: Path) -> None:
    system = await System.start(tmp_path)
    try:
        system.router("router", "--otlp-traces-endpoint", "http://127.0.0.1:1/v1/traces")
        system.worker("w1")
        await until_ready(await system.connect(), 1)
        async with await WireClient.connect(system.url) as client:
            assert (await answer_of(client.generate("demo", prompt="12 + 30 =", max_tokens=4))).text
        await system.until_logged("router", "traces_not_sent")
    finally:
        await system.stop()


async def test_without_an_endpoint_a_trace_is_passed_on_as_it_came(tmp_path: Path, collector: Collector) -> None:
    """The router records nothing, so the worker's span is a child of the client's."""
    system = await System.start(tmp_path)
    try:
        system.router("router")
        system.worker("w1", "--otlp-traces-endpoint", collector.url)
        await until_ready(await system.connect(), 1)
        async with await WireClient.connect(system.url) as client:
            headers = began(3) | {"tracestate": "vendor=1"}
            async for _ in client.generate("demo", prompt="Once", max_tokens=2, id="passed", headers=headers):
                pass
        spans = collector.trace_of("passed", OF_WORKER)
        assert parents(spans)["generate"] == PARENT_ID
        assert {span.service for span in spans} == {"tokenbus-worker"}
    finally:
        await system.stop()
