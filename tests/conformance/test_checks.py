"""Each check of wire-check accepts correct messages and says what is wrong with others."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
import xxhash

from tokenbus.conformance.probing import field_types, stream_checks
from tokenbus.conformance.probing.acting_router import PROMPT_IDS
from tokenbus.conformance.probing.assertions import BrokenError
from tokenbus.conformance.probing.exchange import Exchange, any_tokens, decode
from tokenbus.conformance.probing.link import Received
from tokenbus.conformance.probing.report import Outcome, RuleVerdict, json_line, line, summary
from tokenbus.conformance.rules import fields
from tokenbus.conformance.rules.guardians import check_guardian_check, check_offer
from tokenbus.conformance.rules.models import check_embeddings, check_models, check_ranks, check_text, check_tokens
from tokenbus.conformance.rules.registry import all_rules
from tokenbus.conformance.rules.resync import check_replayed, split_replayed
from tokenbus.conformance.rules.runs import check_parts
from tokenbus.conformance.rules.workers import (
    check_beats,
    check_event_log,
    check_request_events,
    check_snapshot,
    check_snapshot_order,
)

Message = dict[str, Any]
Change = Callable[[list[Message]], object]

ORIGIN = {"worker_id": "w", "model": "m", "created": 1_800_000_000}
USAGE = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6, "cached_tokens": 0}
TIMINGS = {"queue_ms": 0.0, "prefill_ms": 1.5, "ttft_ms": 1.5, "decode_ms": 3, "total_ms": 5.0}
LOAD = {
    "running": 0, "waiting": 0, "queued_prefill_tokens": 0, "used_blocks": 0, "cached_blocks": 0, "free_blocks": 1,
    "step_age_ms": 0.0,
}  # fmt: skip
MADE = {"dimensions": 8, "pooling": "last", "max_input_tokens": 9}
CARD = {
    **ORIGIN, "epoch": "1-a", "source": "m.gguf", "engine": "sim", "engine_version": "1", "context_length": 10,
    "max_num_seqs": 1, "max_num_batched_tokens": 1, "hash_scheme": "x", "features": ["generate"], "state": "ready",
    "host": "h", "pids": {"front": 1, "engine": 2}, "versions": {}, "load": LOAD,
}  # fmt: skip


def chunk(offset: int, text_offset: int, text: str, tokens: int = 1, **more: object) -> Message:
    same: Message = {"id": "r", "attempt": 1, "finish_reason": None}
    return {**same, "offset": offset, "tokens": tokens, "text_offset": text_offset, "text": text, **more}


def right() -> list[Message]:
    """Returns a correct stream: a head, two chunks and a terminal. `ü` has two bytes."""
    return [
        chunk(0, 0, "", 0, **ORIGIN),
        chunk(0, 0, "ü"),
        chunk(1, 2, "b", token_ids=[2]),
        chunk(2, 3, "c", finish_reason="length", usage=dict(USAGE), timings=dict(TIMINGS), **ORIGIN),
    ]


def refusal(**changes: object) -> Message:
    error = {"code": "invalid_request", "message": "no", "retryable": False, "param": "stop[1]"}
    return {**chunk(0, 0, "", 0, finish_reason="error", error=error), "attempt": 0, **changes}


def test_a_right_stream_passes_every_check() -> None:
    messages = right()
    stream_checks.check_order(messages)
    stream_checks.check_fields(messages)
    stream_checks.check_numbers(messages)
    stream_checks.check_usage(messages)
    stream_checks.check_timings(messages[-1])
    stream_checks.check_attempts(messages)
    stream_checks.check_ids(messages, "r")


def test_a_routers_empty_chunks_may_come_before_the_head() -> None:
    waiting = chunk(0, 0, "", 0, worker_id=None, model="m", created=1) | {"attempt": 0}
    stream_checks.check_order([waiting, *right()])
    stream_checks.check_fields([waiting, *right()])
    stream_checks.check_attempts([waiting, *right()])


def test_a_routers_empty_chunk_amid_a_stream_has_no_text_offset() -> None:
    holding = chunk(1, 0, "", 0, worker_id=None, model="m", created=1)
    stream_checks.check_numbers([*right()[:2], holding, *right()[2:]])
    with pytest.raises(BrokenError, match="message 3 is a router's and has text_offset 2 instead of 0"):
        stream_checks.check_numbers([*right()[:2], holding | {"text_offset": 2}, *right()[2:]])


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda m: m.pop(), "no terminal among 3"),
        (lambda m: m.append(dict(m[-1])), "2 terminals"),
        (lambda m: m.append(chunk(3, 4, "d")), "1 messages after the terminal"),
        (lambda m: m.pop(0), "no head before"),
        (lambda m: m[0].pop("worker_id"), "no head before"),
        (lambda m: m[0].update(text="x"), "no head before"),
    ],
)
def test_a_wrong_order_is_seen(change: Change, seen: str) -> None:
    messages = right()
    change(messages)
    with pytest.raises(BrokenError, match=seen):
        stream_checks.check_order(messages)


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda m: m[1].pop("id"), "message 2: id is None"),
        (lambda m: m[1].update(attempt=-1), "attempt is -1"),
        (lambda m: m[1].update(offset="0"), "offset is '0'"),
        (lambda m: m[1].update(tokens=True), "tokens is True"),
        (lambda m: m[1].update(text=b"x"), "text is b'x'"),
        (lambda m: m[1].update(finish_reason="done"), "finish_reason is 'done'"),
        (lambda m: m[0].pop("created"), "message 1: created is None"),
        (lambda m: m[3].pop("model"), "message 4: model is None"),
        (lambda m: m[2].update(usage=USAGE), "message 3 is not a terminal but has usage"),
        (lambda m: m[3].pop("usage"), "the terminal's usage is None"),
        (lambda m: m[3]["timings"].pop("ttft_ms"), "ttft_ms is None"),
        (lambda m: m[3].update(finish_reason="stop"), "finish_reason stop with stop_match None"),
        (lambda m: m[3].update(stop_match="x"), "finish_reason length with stop_match 'x'"),
        (lambda m: m[3].update(finish_reason="error"), "finish_reason error with error None"),
        (lambda m: m[3].update(error={"code": "internal"}), "finish_reason length with error"),
    ],
)
def test_a_wrong_field_is_seen(change: Change, seen: str) -> None:
    messages = right()
    change(messages)
    with pytest.raises(BrokenError, match=seen):
        stream_checks.check_fields(messages)


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda m: m[2].update(offset=2), r"message 3 has offset, text_offset \(2, 2\) instead of \(1, 2\)"),
        (lambda m: m[2].update(text_offset=1), r"\(1, 1\) instead of \(1, 2\)"),
        (lambda m: m[0].update(tokens=1), "message 2"),
        (lambda m: m.pop(2), "message 3"),
    ],
)
def test_a_gap_in_the_numbers_is_seen(change: Change, seen: str) -> None:
    messages = right()
    change(messages)
    with pytest.raises(BrokenError, match=seen):
        stream_checks.check_numbers(messages)


def test_chunks_of_a_lower_attempt_are_not_heeded() -> None:
    late = chunk(5, 5, "late")
    later = [message | {"attempt": 2} for message in right()]
    stream_checks.check_numbers([*later[:2], late, *later[2:]])
    with pytest.raises(BrokenError, match="attempt 1 after 2"):
        stream_checks.check_attempts([*later[:2], late, *later[2:]])


@pytest.mark.parametrize(
    ("check", "change", "seen"),
    [
        (
            stream_checks.check_usage,
            lambda m: m[-1]["usage"].update(completion_tokens=2),
            "completion_tokens 2, but 3 in chunks",
        ),
        (stream_checks.check_usage, lambda m: m[-1]["usage"].update(total_tokens=7), "total_tokens 7 instead of 6"),
        (stream_checks.check_usage, lambda m: m[-1]["usage"].update(cached_tokens=4), "more cached tokens"),
        (stream_checks.check_attempts, lambda m: m[0].update(attempt=0), "message 1 of a worker has attempt 0"),
        (stream_checks.check_token_ids, lambda m: None, "0 token_ids for 1 tokens"),
        (stream_checks.check_token_ids, lambda m: m[1].update(token_ids=["a"]), "message 2 has token_ids"),
        (stream_checks.check_alone, lambda m: None, "4 messages instead of a lone terminal"),
        (stream_checks.check_alone, lambda m: m.__delitem__(slice(3)), r"\(2, 3\) in a terminal"),
    ],
)
def test_wrong_counts_are_seen(check: Callable[[list[Message]], None], change: Change, seen: str) -> None:
    messages = right()
    change(messages)
    with pytest.raises(BrokenError, match=seen):
        check(messages)


def test_wrong_timings_and_ids_are_seen() -> None:
    messages = right()
    messages[-1]["timings"]["decode_ms"] = 100
    with pytest.raises(BrokenError, match="decode_ms 100 exceeds"):
        stream_checks.check_timings(messages[-1])
    with pytest.raises(BrokenError, match="message 1 has id 'r' instead of 's'"):
        stream_checks.check_ids(messages, "s")


def test_a_right_refusal_passes() -> None:
    error = stream_checks.check_refusal([refusal()], "overloaded", "invalid_request", param="stop")
    assert error["code"] == "invalid_request"


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({"tokens": 1}, "a refusal with offset"),
        ({"text": "x"}, "a refusal with offset"),
        ({"finish_reason": "stop"}, "finish_reason stop instead of error"),
        ({"error": {"code": "wrong", "message": "x", "retryable": False}}, "code is 'wrong'"),
        ({"error": {"code": "invalid_request", "message": "", "retryable": False}}, "message is ''"),
        ({"error": {"code": "invalid_request", "message": "x", "retryable": True}}, "has retryable: True"),
        ({"error": {"code": "internal", "message": "x", "retryable": True}}, "internal .* instead of invalid_request"),
        ({"error": {"code": "invalid_request", "message": "x", "retryable": False}}, "param is None"),
        ({"error": {"code": "invalid_request", "message": "x", "retryable": False, "param": "stops"}}, "'stops'"),
    ],
)
def test_a_wrong_refusal_is_seen(change: Message, seen: str) -> None:
    with pytest.raises(BrokenError, match=seen):
        stream_checks.check_refusal([refusal(**change)], "invalid_request", param="stop")


def test_a_refusal_is_alone() -> None:
    with pytest.raises(BrokenError, match="2 messages instead of a refusal"):
        stream_checks.check_refusal([right()[0], refusal()], "invalid_request")


def test_what_is_said_again_is_told_from_what_is_new() -> None:
    first = right()
    check_replayed(split_replayed([*first, *first[2:]]), 1, 3, ended=True)
    check_replayed(split_replayed([*first[:3], first[2], first[3]]), 1, 2, ended=False)
    joined = chunk(0, 0, "üb", 2)
    check_replayed(split_replayed([*first, joined, first[3]]), 0, 3, ended=True)


@pytest.mark.parametrize(
    ("again", "seen"),
    [
        ([], "nothing was published again"),
        ([1, 2, 3], "token 0 was published again instead of 1"),
        ([2], "only up to token 2, not 3"),
        ([2, 3, 3], "token 2 was published again instead of 3"),
        ([3], "token 2 was published again instead of 1"),
    ],
)
def test_a_wrong_repeat_is_seen(again: list[int], seen: str) -> None:
    first = right()
    with pytest.raises(BrokenError, match=seen):
        check_replayed(split_replayed(first + [first[number] for number in again]), 1, 3, ended=True)


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({"text": "d"}, "the text differs"),
        ({"text_offset": 2}, "the terminal differs|the text differs"),
        ({"usage": None}, "the terminal differs"),
        ({"finish_reason": None}, "0 terminals were published again"),
    ],
)
def test_a_repeat_that_says_something_else_is_seen(change: Message, seen: str) -> None:
    first = right()
    with pytest.raises(BrokenError, match=seen):
        check_replayed(split_replayed([*first, first[2], first[3] | change]), 1, 3, ended=True)


def event(seq: int, **more: object) -> Message:
    return {"worker_id": "w", "epoch": "1-a", "seq": seq, "load": LOAD, "state": "ready", **more}


def test_a_log_has_no_gaps() -> None:
    check_event_log([event(seq) for seq in range(8)], "w")
    with pytest.raises(BrokenError, match="event 9 follows 7"):
        check_event_log([event(seq) for seq in (5, 6, 7, 9, 10)], "w")
    with pytest.raises(BrokenError, match="seq is None"):
        check_event_log([{**event(0), "seq": None}], "w")


def at(order: int) -> Received:
    return Received(order, 0.0, "", b"", {})


def test_a_beat_knows_the_last_event_of_each_worker_that_it_names() -> None:
    events = [(at(1), event(4)), (at(2), event(5)), (at(9), event(6))]
    beat = {"epoch": event(0)["epoch"], "next_ms": 1_000.0, "seqs": {"w": 5}}
    check_beats(events, [(at(3), beat)], "w")
    check_beats([], [(at(3), beat)], "w")
    with pytest.raises(BrokenError, match="says 5 of w, whose last event is 6"):
        check_beats(events, [(at(10), beat)], "w")
    with pytest.raises(BrokenError, match="next_ms"):
        check_beats(events, [(at(3), {**beat, "next_ms": None})], "w")


def told(order: int, **what: object) -> tuple[Received, Message]:
    return at(order), event(order, **what)


def with_token(order: int, token_id: int, stream_no: int = 7) -> tuple[Received, Message]:
    return told(order, stream_nos=bytes([stream_no, 0, 0, 0]), token_ids=bytes([token_id, 0, 0, 0]))


STARTED = told(11, started=[{"id": "t:r", "stream_no": 7, "attempt": 1, "prompt_tokens": 3}])
FINISHED = told(50, finished=["t:r"])
TOKENS = [with_token(15, 1), with_token(25, 2), with_token(35, 3)]
"""Entries with the tokens of three chunks, which arrive at 20, 30 and 40. The entry at 50 seals them."""


@pytest.mark.parametrize(
    ("events", "seen"),
    [
        ([STARTED, *TOKENS, FINISHED], None),
        ([STARTED, with_token(12, 9, stream_no=8), *TOKENS, FINISHED], None),
        ([STARTED, *TOKENS[:2], FINISHED], "token 2 of the answer is in no entry"),
        ([STARTED, TOKENS[0], with_token(25, 9), TOKENS[2], FINISHED], "token 1 is 2, and 9 in the event log"),
        ([STARTED, TOKENS[0], with_token(31, 2), TOKENS[2], FINISHED], "token 1 came before the entry that has it"),
        ([STARTED, *TOKENS, with_token(45, 4), FINISHED], "the event log has other tokens than chunks"),
        ([*TOKENS, FINISHED], "started was reported 0 times"),
        ([STARTED, *TOKENS, FINISHED, FINISHED], "finished was reported 2 times"),
        ([STARTED, *TOKENS, told(38, finished=["t:r"])], "finished came before the terminal"),
    ],
)
def test_events_come_in_order_with_the_chunks(events: list[tuple[Received, Message]], seen: str | None) -> None:
    if seen is None:
        check_request_events("t:r", events, [], answered())
        return
    with pytest.raises(BrokenError, match=seen):
        check_request_events("t:r", events, [], answered())


@pytest.mark.parametrize(("sealed_at", "is_sealed"), [(41, True), (39, False)])
def test_an_entry_is_sealed_behind_its_chunks(sealed_at: int, is_sealed: bool) -> None:
    # the last entry seals no more than the one at 25; one with tokens seals nothing
    events = [STARTED, *TOKENS, with_token(45, 9, stream_no=8), (at(60), event(26, finished=["t:r"]))]
    seals = [(at(sealed_at), {"epoch": "1-a", "seq": 35}), (at(70), {"epoch": "2-b", "seq": 35})]
    if is_sealed:
        check_request_events("t:r", events, seals, answered())
        return
    with pytest.raises(BrokenError, match="entry 35 was not sealed after its chunks"):
        check_request_events("t:r", events, seals, answered())


def answered() -> Exchange:
    """Returns a right stream whose messages have arrived at 10, 20, 30 and 40."""
    answer = Exchange("inbox", msgpack=False)
    for number, message in enumerate(right(), 1):
        answer.received.append(at(10 * number))
        answer.messages.append({**message, "token_ids": [number - 1] if message["tokens"] else []})
    return answer


def snapshot(**changes: object) -> Message:
    running = [{"id": "t:r", "attempt": 1, "stream_no": 7, "num_tokens": 2, "router_id": "q"}]
    return {**event(4), "part": 0, "parts": 1, "runs": [], "running": running, **changes}


@pytest.mark.parametrize(
    ("parts", "seen"),
    [
        ([snapshot()], None),
        ([snapshot(part=1, parts=2, running=[]), snapshot(parts=2)], None),
        ([snapshot(parts=2)], r"parts \[0\] of 2"),
        ([snapshot(parts=2), snapshot(part=1, parts=2, seq=5)], "parts of 2 instants"),
        ([snapshot(running=[])], "is not among the 0 running"),
        (
            [snapshot(running=[{"id": "t:r", "attempt": 1, "stream_no": 7}])],
            "a request that has sent tokens is",
        ),
        (
            [snapshot(running=[{"id": "t:r", "attempt": 1, "stream_no": 7, "num_tokens": 2}])],
            "t:r is listed without its guardian",
        ),
        ([snapshot(load=None)], "load is None"),
    ],
)
def test_a_snapshots_parts_are_of_one_instant(parts: list[Message], seen: str | None) -> None:
    if seen is None:
        check_snapshot(parts, "t:r")
        return
    with pytest.raises(BrokenError, match=seen):
        check_snapshot(parts, "t:r")


def test_a_snapshot_stands_between_the_events() -> None:
    check_snapshot_order(15, 4, [(5, 3), (10, 4), (20, 5)])
    with pytest.raises(BrokenError, match=r"after event 3 arrived after event \[4\]"):
        check_snapshot_order(15, 3, [(5, 3), (10, 4), (20, 5)])
    with pytest.raises(BrokenError, match=r"after event 5 arrived before event \[5\]"):
        check_snapshot_order(15, 5, [(5, 3), (10, 4), (20, 5)])
    with pytest.raises(BrokenError, match="no events"):
        check_snapshot_order(15, 5, [])


@pytest.mark.parametrize(
    ("check", "reply", "seen"),
    [
        ({"request_ids": ["t:r"]}, "unguarded.q", None),
        ({"request_ids": ["t:r", "t:s"]}, "unguarded.q", r"a check of \['t:r', 't:s'\]"),
        ({"request_ids": []}, "unguarded.q", r"a check of \[\]"),
        ({"request_ids": "t:r"}, "unguarded.q", "request_ids is 't:r'"),
        ({"request_ids": ["t:r"]}, "inbox", "reply subject 'inbox' instead of unguarded.q"),
    ],
)
def test_a_guardian_is_asked_for_exactly_the_streams_that_it_has_placed(
    check: Message, reply: str, seen: str | None
) -> None:
    received = Received(1, 0.0, "router.q", b"", {}, reply)
    if seen is None:
        check_guardian_check(received, check, "t:r", "unguarded.q")
        return
    with pytest.raises(BrokenError, match=seen):
        check_guardian_check(received, check, "t:r", "unguarded.q")


def offer(*, resume_from: object = None, run: Message | None = None, **changes: object) -> Message:
    placed = {
        "request_id": "t:r", "attempt": 1, "epoch": "1-a", "router_id": "q", "reply": "inbox", "encoding": "json",
        "token_ids": PROMPT_IDS, "params": {}, "resume_from": resume_from,
    }  # fmt: skip
    return {"run": placed | (run or {}), "stream_no": 7, "hash_scheme": "x", **changes}


@pytest.mark.parametrize(
    ("guard", "seen"),
    [
        (offer(), None),
        (offer(resume_from={"token_ids": b"\0" * 8, "elapsed_ms": 5.0}), None),
        (offer(stream_no=8), "stream 7 was offered as 8"),
        (offer(stream_no=None), "stream 7 was offered as None"),
        (offer(run={"router_id": "other"}), "its guardian was q, and the offer names other"),
        (offer(run={"token_ids": b""}), "another prompt"),
        (offer(run={"epoch": ""}), "no epoch or no hash scheme"),
        (offer(hash_scheme=None), "no epoch or no hash scheme"),
        (offer(run={"reply": None}), "run is"),
        (offer(resume_from={"token_ids": b"\0" * 7}), "not of four bytes each"),
        (offer(resume_from={"token_ids": [1]}), r"token_ids is \[1\], not bytes"),
    ],
)
def test_an_offer_has_all_that_another_router_needs(guard: Message, seen: str | None) -> None:
    if seen is None:
        check_offer(guard, "q", 7)
        return
    with pytest.raises(BrokenError, match=seen):
        check_offer(guard, "q", 7)


def test_a_tokenizers_parts_must_fit_the_digest() -> None:
    digest = xxhash.xxh3_128_hexdigest(b"onetwo")
    parts: list[Message] = [
        {"digest": digest, "part": number, "parts": 2, "data": data} for number, data in enumerate((b"one", b"two"))
    ]
    check_parts(parts[::-1], digest)
    for wrong, seen in (
        ([parts[0]], "parts"),
        ([parts[0], parts[1] | {"data": b"x"}], "all parts together have digest"),
        ([parts[0], parts[1] | {"digest": "other"}], "a part with digest other"),
        ([parts[0], parts[1] | {"data": "two"}], "data is 'two', not bytes"),
    ):
        with pytest.raises(BrokenError, match=seen):
            check_parts(wrong, digest)


def models(**changes: object) -> Message:
    served = {"model": "m", "context_length": 10, "features": ["chat"], "workers": [CARD]}
    return {"models": [served | changes], "limits": {"max_request_bytes": 5}}


def test_a_models_reply_has_the_fields_of_models_cards_loads_and_limits() -> None:
    check_models(models())
    check_models(models(workers=None) | {"truncated": True})
    for wrong, seen in (
        (models(workers=None), "workers is None"),
        (models(features="chat"), "features is 'chat'"),
        (models(workers=[CARD | {"load": None}]), "a card's load is None"),
        (models(workers=[CARD | {"model": "n"}]), "a card of model n under m"),
        (models(workers=[CARD | {"pids": {"front": 1}}]), "pids is"),
        (models(workers=[CARD | {"embeddings": {"dimensions": 8, "pooling": "last"}}]), "embeddings is"),
        (models(workers=[CARD | {"embeddings": MADE}]), "has embeddings without the feature embed"),
        (models(workers=[CARD | {"epoch": "x"}]), "epoch is 'x'"),
        (models() | {"limits": {}}, "max_request_bytes is None"),
    ):
        with pytest.raises(BrokenError, match=seen):
            check_models(wrong)


def test_an_embeddings_reply_has_one_for_each_input_or_an_error() -> None:
    good: Message = {"id": "e", "model": "m", "embeddings": [[0.5], [1]], "usage": {}}
    check_embeddings(good, "e", 2)
    check_embeddings({"id": "e", "error": refusal()["error"]}, "e", 2)
    for wrong, seen in (
        (good | {"id": "f"}, "the id is 'f'"),
        (good | {"embeddings": [[1]]}, "1 embeddings for 2 inputs"),
        (good | {"embeddings": ["x"]}, "embeddings is"),
        ({"id": "e", "error": {"code": "x"}}, "code is 'x'"),
    ):
        with pytest.raises(BrokenError, match=seen):
            check_embeddings(wrong, "e", 2)


def test_a_reply_with_tokens_has_as_many_as_it_counts() -> None:
    good: Message = {"id": "t", "model": "m", "count": 2, "token_ids": [5, 6], "context_length": 10}
    check_tokens(good, "t")
    for wrong, seen in (
        (good | {"id": "u"}, "the id is 'u'"),
        (good | {"count": 3}, "2 ids, and the count 3"),
        (good | {"token_ids": "56"}, "token_ids"),
        ({"id": "t", "error": refusal()["error"]}, "model"),
    ):
        with pytest.raises(BrokenError, match=seen):
            check_tokens(wrong, "t")


def test_a_reply_with_text_has_the_text_of_the_tokens() -> None:
    good: Message = {"id": "t", "model": "m", "text": " a b"}
    check_text(good, "t", "a b")
    for wrong, seen in ((good | {"id": "u"}, "the id is 'u'"), (good | {"text": "a"}, "the text is"), ({}, "id")):
        with pytest.raises(BrokenError, match=seen):
            check_text(wrong, "t", "a b")


def test_a_reply_to_rerank_has_distinct_documents_in_order_or_an_error() -> None:
    first, second = {"index": 1, "relevance_score": 0.5}, {"index": 0, "relevance_score": -1}
    good: Message = {"id": "e", "model": "m", "results": [first, second], "usage": {}}
    check_ranks(good, "e", num_documents=2, count=2)
    check_ranks({"id": "e", "error": refusal()["error"]}, "e", num_documents=2, count=2)
    for wrong, seen in (
        (good | {"id": "f"}, "the id is 'f'"),
        (good | {"results": [first]}, "1 results, 2 were asked for"),
        (good | {"results": [first, first]}, "the indices are"),
        (good | {"results": [second, first]}, "the scores are"),
        (good | {"results": [first, second | {"index": 2}]}, "the indices are"),
        (good | {"results": [first, {"index": 0}]}, "relevance_score"),
        (good | {"results": ["x", "y"]}, "results is"),
        ({"id": "e", "error": {"code": "x"}}, "code is 'x'"),
    ):
        with pytest.raises(BrokenError, match=seen):
            check_ranks(wrong, "e", num_documents=2, count=2)


@pytest.mark.parametrize(
    ("payload", "msgpack"), [(b'{"a": NaN}', False), (b"[]", False), (b"\x80", False), (b"{}", True), (b"\xc1", True)]
)
def test_a_message_in_another_encoding_is_seen(payload: bytes, msgpack: bool) -> None:
    with pytest.raises(BrokenError):
        decode(payload, msgpack=msgpack)


def test_an_exchange_takes_whatever_comes() -> None:
    strange = [b"", b"\xff", b"[" * 100_000, b'{"tokens": "many", "finish_reason": {}}', b'{"tokens": [1e999]}']
    exchange = Exchange("inbox", msgpack=False)
    for number, payload in enumerate(strange):
        exchange.take(Received(number, 0.0, "", payload, {}))
    assert (exchange.num_tokens, exchange.is_ended) == (0, True)
    with pytest.raises(BrokenError):
        assert exchange.messages


async def test_a_slow_stream_is_waited_for_until_it_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s[0])
    exchange = Exchange("inbox", msgpack=False, wait_s=20.0)
    waiting = asyncio.create_task(exchange.terminal())
    for offset in range(3):
        await asyncio.sleep(0)
        now_s[0] += 15.0
        exchange.take(Received(offset, 0.0, "", json.dumps(chunk(offset, offset, "a")).encode(), {}))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
    now_s[0] += 21.0
    with pytest.raises(BrokenError, match="within 20 s of silence, only 3 messages"):
        await waiting


async def test_of_several_requests_whichever_speaks_first_is_enough() -> None:
    """Routers decide in which order a worker gets requests, and so which of them run."""
    first, second, third = exchanges = [Exchange("inbox", msgpack=False) for _ in range(3)]
    waiting = asyncio.create_task(any_tokens(exchanges, 2))
    for exchange, offsets in ((first, []), (second, [0]), (third, [0, 1])):
        assert not waiting.done()
        for offset in offsets:
            exchange.take(Received(offset, 0.0, "", json.dumps(chunk(offset, offset, "a")).encode(), {}))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await waiting


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (field_types.COUNT, [0, 5, 5.0, 10**400], [-1, True, 0.5, "1", None, float("nan"), float("inf")]),
        (field_types.POSITIVE, [1], [0, None]),
        (field_types.DURATION, [0, 0.5], [-0.1, False, None, float("nan")]),
        (field_types.NAME, ["a"], ["", None, b"a"]),
        (field_types.optional(field_types.FLAG), [None, False], [0, "no"]),
        (field_types.list_of(field_types.TEXT), [[], ["", "a"]], [None, "a", [1], ("a",)]),
        (field_types.map_of({"a": field_types.COUNT}), [{"a": 1, "b": 2}], [{}, None, {"a": "1"}]),
        (field_types.matching("[0-9]+-.+"), ["1-a"], ["a-1", 1, None, "1-"]),
    ],
)
def test_a_kind_holds_what_it_names_and_nothing_else(
    kind: field_types.FieldType, good: list[object], bad: list[object]
) -> None:
    assert [value for value in good if not kind.holds(value)] == []
    assert [value for value in bad if kind.holds(value)] == []


def test_every_rule_has_a_sentence_of_its_own() -> None:
    names = [rule.name for rule in all_rules()]
    assert len(set(names)) == len(names) > 60
    assert all("\n" not in name and not name.endswith(".") for name in names)


def test_every_range_is_tried_at_its_limit_and_beyond() -> None:
    for limits in fields.LIMITS:
        assert limits.accepted, limits
        assert limits.rejected, limits
    longest = [value for limits in fields.LIMITS if limits.field == "id" for value in limits.accepted][-1]
    assert len(str(longest)) == 128


def test_an_outcome_is_one_line_or_one_object() -> None:
    outcomes = [
        Outcome("A holds", RuleVerdict.OK, "", 1.0),
        Outcome("B holds", RuleVerdict.BROKEN, "it was C", 2.04),
        Outcome("D holds", RuleVerdict.SKIPPED, "no E", 3.0),
    ]
    assert [line(outcome) for outcome in outcomes] == [
        "ok       A holds",
        "BROKEN   B holds: it was C",
        "skipped  D holds: no E",
    ]
    assert json_line(outcomes[1]) == '{"rule": "B holds", "verdict": "broken", "reason": "it was C", "took_ms": 2.0}'
    assert summary(outcomes) == "1 rules hold, 1 broken, 1 skipped"
