"""What routers tell of requests is put together, checked, and said in sentences."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tokenbus.client.wire import trace_reader, trace_story
from tokenbus.client.wire.trace_reader import TraceReader, Traces
from tokenbus.protocol.wire import codec, errors, messages
from tokenbus.protocol.wire.traces import first_token_ms

JSON = codec.Encoding.JSON
SURVIVOR = messages.RequestTrace(
    id="r1",
    model="m",
    received_at_ms=1_000,
    state="stop",
    queue_ms=1_500.0,
    attempts=[
        messages.TraceAttempt(
            worker_id="w1", begun_ms=1_501.0, accepted_ms=1_502.0, policy="kv", candidates=3, held_tokens=64,
            most_held_tokens=64, left_ms=6_000.0, left="lost", heard_ms=4_000.0,
        ),
        messages.TraceAttempt(
            worker_id="w2", begun_ms=6_001.0, accepted_ms=6_010.0, continued_ms=6_500.0, policy="kv", candidates=2,
            tokens=300,
        ),
    ],
    worker_queue_ms=8.0,
    prefill_ms=20.0,
    total_ms=9_000.0,
    prompt_tokens=80,
    cached_tokens=64,
    completion_tokens=900,
    gaps=[0, 0, 0, 800, 98, 0, 0, 0, 1, 0, 0, 0, 0, 0],
)  # fmt: skip


def trace(request_id: str, received_at_ms: int = 0) -> messages.RequestTrace:
    return messages.RequestTrace(id=request_id, model="m", received_at_ms=received_at_ms, state="stop")


def reply(router_id: str, *requests: messages.RequestTrace) -> bytes:
    return codec.encode(messages.TraceReply(router_id=router_id, requests=list(requests)), JSON)


async def read(monkeypatch: pytest.MonkeyPatch, asked: messages.TraceRequest, *answers: bytes) -> Traces:
    """Reads what routers answer at once; those that could still come do not."""
    monkeypatch.setattr(trace_reader, "_FIRST_S", 0.01)
    monkeypatch.setattr(trace_reader, "_OTHERS_S", 0.01)

    class Bus:
        is_connected = True

        async def subscribe(self, subject: str, take: Any) -> None:
            for answer in answers:
                message = SimpleNamespace(data=answer, headers=None, reply="")
                asyncio.get_running_loop().call_soon(take, message)

        def publish(self, *given: object) -> None: ...

        async def unsubscribe(self, subscription: object) -> None: ...

    return await TraceReader(asked).read(Bus(), "trace", "_INBOX.x", JSON)  # type: ignore[arg-type]


async def test_the_answers_of_all_routers_are_one_list_the_latest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await read(
        monkeypatch,
        messages.TraceRequest(limit=2),
        reply("one", trace("c", 3), trace("a", 1)),
        reply("two", trace("b", 2)),
    )
    assert [(one.router_id, one.trace.id) for one in found.requests] == [("one", "c"), ("two", "b")]
    assert (found.router_ids, found.truncated) == (["one", "two"], True)


async def test_forged_answers_and_those_of_other_versions_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    forged = reply("forged", trace("another"))
    for bad in (b"{", b"[]", b'{"router_id": 7}', b'{"requests": "<script>"}', forged):
        found = await read(monkeypatch, messages.TraceRequest(id="r1"), bad, reply("one", trace("r1")))
        assert [(one.router_id, one.trace.id) for one in found.requests] == [("one", "r1")]
        with pytest.raises(errors.RequestError, match="a router"):
            await read(monkeypatch, messages.TraceRequest(id="r1"), bad)


async def test_routers_that_do_not_answer_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.RequestError, match="no router answers"):
        await read(monkeypatch, messages.TraceRequest())


def test_the_story_says_why_it_waited_which_worker_it_had_and_where_it_continued() -> None:
    assert trace_story.story(SURVIVOR, "one") == [
        "In router one it waited 1.5 s until a worker had a place and memory for it.",
        "w1 was chosen by the policy kv, among 3 workers: it held 64 of the prompt's 80 tokens (no other held more) "
        "and w1 was free.",
        "w1 was last heard of after 4.0 s, and counted as lost after 6.0 s.",
        "It continued at w2 after a pause of 2.5 s, with the 300 tokens that the client had.",
        "w2 was chosen by the policy kv, among 2 workers: no worker held any of the prompt and w2 was free.",
        "64 of its 80 prompt tokens were cached; computing the others took 20 ms.",
        "The first token came 1.5 s after the request; it waited 8.0 ms at the worker for its turn, a place or memory.",
        "Half of the times between tokens at w2 were 4 to 8 ms, the longest 128 to 256 ms.",
        "It ended after 9.0 s with 900 tokens (stop).",
    ]


def test_what_a_worker_held_where_a_stream_continued_is_a_part_of_prompt_and_answer() -> None:
    first, second = SURVIVOR.attempts
    second = msgspec.structs.replace(second, held_tokens=96, most_held_tokens=96)
    told = trace_story.story(msgspec.structs.replace(SURVIVOR, attempts=[first, second]), "one")
    assert any("it held 96 of the 380 tokens of prompt and answer (no other held more)" in one for one in told)


def test_where_a_router_does_not_tell_when_a_stream_went_on_its_pause_ends_as_its_worker_accepts_it() -> None:
    first, second = SURVIVOR.attempts
    second = msgspec.structs.replace(second, continued_ms=None)
    told = trace_story.story(msgspec.structs.replace(SURVIVOR, attempts=[first, second]), "one")
    assert any(sentence.startswith("It continued at w2 after a pause of 2.0 s") for sentence in told)


def test_a_router_that_has_taken_a_request_over_does_not_claim_to_know_when_its_first_token_came() -> None:
    at_worker = messages.TraceAttempt(worker_id="w1", begun_ms=26_000.0, accepted_ms=26_000.0)
    taken = msgspec.structs.replace(SURVIVOR, adopted=True, attempts=[at_worker], total_ms=30_000.0)
    assert first_token_ms(taken) is None
    assert first_token_ms(msgspec.structs.replace(SURVIVOR, adopted=True)) == 1_530.0, "it has placed that one itself"
    told = " ".join(trace_story.story(taken, "r2"))
    assert "The first token came 28 ms after its first worker had accepted it" in told
    assert [(span.kind, span.begin_ms) for span in trace_story.spans(taken) if span.where] == [("decode", 26_000.0)]


def test_a_wait_that_was_misjudged_is_called_longer_than_expected() -> None:
    late = msgspec.structs.replace(SURVIVOR, worker_queue_ms=3_000.0)
    assert any(
        sentence.endswith("a place or memory, longer than was expected.") for sentence in trace_story.story(late, "one")
    )


def test_the_spans_of_a_request_follow_each_other_from_its_receipt_to_its_end() -> None:
    spans = trace_story.spans(SURVIVOR)
    assert [(one.kind, one.where) for one in spans] == [
        ("queue", ""), ("accept", "w1"), ("worker_queue", "w1"), ("prefill", "w1"), ("decode", "w1"), ("gap", ""),
        ("accept", "w2"), ("prefill", "w2"), ("decode", "w2"),
    ]  # fmt: skip
    assert spans[-1].end_ms == SURVIVOR.total_ms
    for before, after in zip(spans, spans[1:], strict=False):
        assert 0 <= after.begin_ms - before.end_ms <= 1.0, (before, after)


def test_a_request_that_waits_and_one_that_was_refused_have_their_stories() -> None:
    waiting = messages.RequestTrace(id="r", model="m", received_at_ms=0, state="waiting", held_ms=3e4, total_ms=3e4)
    assert trace_story.story(waiting, "one") == [
        "In router one it waited 30 s for a worker that has m loaded.",
        "No worker has been chosen yet: none has a place and memory for it, or its model is being loaded.",
        "It has been waiting for 30 s, with 0 tokens.",
    ]
    queued = msgspec.structs.replace(waiting, held_ms=0.0, tokenize_ms=2.0)
    assert [(one.kind, one.end_ms) for one in trace_story.spans(queued)] == [("tokenize", 2.0), ("waiting", 3e4)]
    refused = messages.RequestTrace(
        id="r",
        model="m",
        received_at_ms=0,
        state="error",
        code="overloaded",
        attempts=[messages.TraceAttempt(worker_id="w1", begun_ms=0.1, policy="kv", refused="overloaded")],
        total_ms=5.0,
    )
    told = trace_story.story(refused, "one")
    assert "w1 refused it (overloaded)." in told
    assert told[-1] == "It ended in the error overloaded after 5.0 ms and 0 tokens."
