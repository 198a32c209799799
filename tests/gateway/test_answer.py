"""When an answer begins, and with which status."""

import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from tests.support.fed_stream import FakeTransport, stream_over
from tokenbus.client.wire.choices import Choices
from tokenbus.gateway.admission.metrics import GatewayMetrics
from tokenbus.gateway.http.http_errors import ApiError, ErrorResponse
from tokenbus.gateway.http.response_writer import ResponseWriter
from tokenbus.gateway.openai import chat
from tokenbus.gateway.openai.choices import StreamForm
from tokenbus.gateway.serving import answering
from tokenbus.gateway.serving.dialect import ResponseHead
from tokenbus.gateway.serving.request_log import RequestLog
from tokenbus.protocol.wire import codec, errors, messages

HEADING = ResponseHead("r", 1_700_000_000, "demo")
HEAD = messages.Chunk(id="r", worker_id="w", model="demo", created=1, hash_scheme="xxh3-64:f")
FAILURE = errors.make_error(errors.Code.NO_WORKER)
NEVER_S = 1e9


class Peer:
    """The HTTP client's side."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.is_complete = False

    async def take(self, message: MutableMapping[str, Any]) -> None:
        assert not self.is_complete
        if message["type"] == "http.response.start":
            assert not self.status
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            assert self.status
            self.body += message["body"]
            self.is_complete = not message["more_body"]


def chunk(text: str, offset: int = 0, reason: messages.FinishReason | None = None, **fields: Any) -> messages.Chunk:
    return messages.Chunk(
        id="r", tokens=len(text), offset=offset, text_offset=offset, text=text, finish_reason=reason, **fields
    )


def failed(offset: int = 0) -> messages.Chunk:
    return chunk("", offset, messages.FinishReason.ERROR, error=FAILURE)


def choices_over(*chunks: messages.Chunk) -> Choices:
    stream = stream_over(FakeTransport(), *chunks)
    return Choices(messages.GenerateRequest(id="r"), 1, lambda request: stream)


async def events_of(*chunks: messages.Chunk, hold_s: float, streamed_errors: frozenset[str] = frozenset()) -> Peer:
    peer = Peer()
    await stream_to(peer, *chunks, hold_s=hold_s, streamed_errors=streamed_errors)
    assert peer.is_complete
    return peer


async def stream_to(
    peer: Peer, *chunks: messages.Chunk, hold_s: float, streamed_errors: frozenset[str] = frozenset()
) -> None:
    choices, events = choices_over(*chunks), chat.ChunkEncoder(HEADING, form=StreamForm(include_usage=False))
    log, writer = RequestLog("r", GatewayMetrics()), ResponseWriter(peer.take, "r")
    await answering.send_stream(choices, 1, events, writer, log, hold_s, streamed_errors)


async def test_a_stream_that_fails_before_it_speaks_can_be_answered_with_the_status_of_the_error() -> None:
    peer = Peer()
    with pytest.raises(ApiError) as raised:
        await stream_to(peer, HEAD, HEAD, failed(), hold_s=NEVER_S)
    assert raised.value.response.status == 503
    assert not peer.status


async def test_an_error_that_a_dialect_streams_is_an_event_even_before_the_first_text() -> None:
    streamed = frozenset({str(FAILURE.code)})
    peer = await events_of(HEAD, failed(), hold_s=NEVER_S, streamed_errors=streamed)
    assert (peer.status, peer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert peer.body.startswith(b'data: {"error"')
    with pytest.raises(ApiError):
        await events_of(HEAD, failed(), hold_s=NEVER_S, streamed_errors=frozenset({"overloaded"}))


async def test_a_stream_that_fails_after_it_spoke_ends_with_the_error_and_done() -> None:
    peer = await events_of(HEAD, chunk("a"), failed(1), hold_s=NEVER_S)
    assert (peer.status, peer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    *_, error, done, end = peer.body.split(b"\n\n")
    assert error.startswith(b'data: {"error"')
    assert (done, end) == (b"data: [DONE]", b"")


async def test_a_stream_that_is_silent_for_too_long_is_begun_and_kept_alive_by_comments() -> None:
    peer = await events_of(HEAD, HEAD, failed(), hold_s=0.0)
    assert peer.status == 200
    assert peer.body.startswith(b': still here\n\n: still here\n\ndata: {"error"')
    assert peer.body.endswith(b"data: [DONE]\n\n")


async def test_while_the_model_is_loaded_a_comment_says_how_far_that_is() -> None:
    loading = codec.replace(HEAD, worker_id=None, load_progress=0.404)
    peer = await events_of(loading, failed(), hold_s=0.0)
    assert peer.body.startswith(b': loading the model, 40 %\n\n: still here\n\ndata: {"error"')


async def test_a_stream_that_outlives_its_worker_goes_on_in_the_same_response_and_is_counted() -> None:
    peer, metrics = Peer(), GatewayMetrics()
    log = RequestLog("r", metrics)
    lost = chunk("", 1, messages.FinishReason.ERROR, error=errors.make_error(errors.Code.WORKER_LOST))
    end = codec.replace(chunk("b", 1, messages.FinishReason.STOP), id="again")
    choices = choices_over(HEAD, chunk("a", token_ids=[7]), lost, end)
    events = chat.ChunkEncoder(HEADING, form=StreamForm(include_usage=False))
    await answering.send_stream(choices, 1, events, ResponseWriter(peer.take, "r"), log)
    log.finished(peer.status)
    told = [json.loads(event.removeprefix(b"data: ")) for event in peer.body.split(b"\n\n")[:-2]]
    assert {event["id"] for event in told} == {"chatcmpl-r"}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in told) == "ab"
    assert [event["choices"][0]["finish_reason"] for event in told][-1] == "stop"
    (family,) = metrics.resubmitted.collect()
    assert family.samples[0].value == 1


async def test_a_whole_answer_is_sent_when_it_has_ended_well() -> None:
    peer = Peer()
    await respond_to(peer, chunk("b", 1, messages.FinishReason.STOP))
    assert (peer.status, int(peer.headers["content-length"]), peer.is_complete) == (200, len(peer.body), True)
    assert peer.headers["x-request-id"] == peer.headers["request-id"] == "r"
    assert b'"content":"ab"' in peer.body


@pytest.mark.parametrize(
    ("reason", "status"), [(messages.FinishReason.CANCELLED, 499), (messages.FinishReason.ERROR, 503)]
)
async def test_a_whole_answer_that_fails_has_the_status_of_its_end(reason: messages.FinishReason, status: int) -> None:
    peer = Peer()
    with pytest.raises(ApiError) as raised:
        await respond_to(peer, chunk("b", 1, reason, **({"error": FAILURE} if status == 503 else {})))
    assert raised.value.response.status == status
    assert not peer.status


async def test_a_whole_answer_has_log_probabilities_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    alternative = messages.TokenAlternative(id=7, text="b", bytes=[98], logprob=-1.0)
    sampled = messages.TokenLogprob(id=7, text="b", bytes=[98], logprob=-1.0, top=[alternative] * 2)
    end = chunk("bb", 1, messages.FinishReason.STOP, logprobs=[sampled] * 2)
    monkeypatch.setattr(answering, "MAX_LOGPROBS", 6)
    peer = Peer()
    await respond_to(peer, end)
    assert len(json.loads(peer.body)["choices"][0]["logprobs"]["content"]) == 2
    monkeypatch.setattr(answering, "MAX_LOGPROBS", 5)
    with pytest.raises(ApiError) as raised:
        await respond_to(Peer(), end)
    assert raised.value.response.status == 413
    assert b'"logprobs":{"content"' in (await events_of(HEAD, chunk("a"), end, hold_s=NEVER_S)).body


async def respond_to(peer: Peer, end: messages.Chunk) -> None:
    log, writer = RequestLog("r", GatewayMetrics()), ResponseWriter(peer.take, "r")
    await answering.send_whole(choices_over(HEAD, chunk("a"), end), 1, chat.ChunkEncoder(HEADING), writer, log)


async def test_an_error_has_the_status_and_the_body_of_its_api_and_names_the_request() -> None:
    peer, response = Peer(), ErrorResponse(503, "overloaded", "busy", retryable=True)
    await ResponseWriter(peer.take, "r").send_error(529, response, lambda error: str(error.request_id).encode())
    assert (peer.status, peer.body, peer.headers["x-should-retry"]) == (529, b"r", "true")
