"""A stored response is continued by requests that its client could have sent whole, and shown as it was."""

import json
import threading
import time
import zlib
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import pytest
from openai.types.responses import Response
from openai.types.responses.response_item_list import ResponseItemList

from tests.support.refusals import refusal_of
from tokenbus.gateway.admission.metrics import GatewayMetrics
from tokenbus.gateway.http.body import LargeBodyParser
from tokenbus.gateway.http.http_errors import ApiError
from tokenbus.gateway.openai.responses import stored
from tokenbus.gateway.openai.responses.endpoints import ENDPOINT, INPUT_TOKENS
from tokenbus.gateway.openai.responses.events import ResponseEncoder
from tokenbus.gateway.serving.answer_events import AnswerEventReader
from tokenbus.gateway.serving.dialect import (
    ParsedCall,
    ParsedGeneration,
    RecordResource,
    ResponseHead,
    UnreadRecordsError,
)
from tokenbus.gateway.storage.record_store import MemoryStore, StorageLimits
from tokenbus.gateway.storage.records import Records
from tokenbus.protocol.wire import errors, messages

LIMIT = 1_000_000
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
SHOW, DELETE, LIST = stored.RESOURCES
USAGE = messages.Usage(prompt_tokens=5, completion_tokens=3, total_tokens=8, cached_tokens=4)


def parse(records: Mapping[str, bytes], limit: int = LIMIT, **fields: object) -> ParsedGeneration:
    """Parses a body as the gateway does: it reads the records that the body asks for."""
    payload = json.dumps({"model": "demo", **fields}).encode()
    try:
        found = ENDPOINT.parse(payload, {}, "r", "", None, limit)
    except UnreadRecordsError as unread:
        found = ENDPOINT.parse(payload, {}, "r", "", {name: records.get(name) for name in unread.names}, limit)
    return cast(ParsedGeneration, found)


def answered(parsed: ParsedGeneration, *, is_stored: bool = True) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Returns the records of an answer with reasoning, a text and a call, and the response."""
    call = messages.ToolCallDelta(
        index=0, id="c1", type="function", function=messages.FunctionDelta(name="f", arguments='{"a": 1}')
    )
    reader = AnswerEventReader()
    reader.read(messages.Chunk(id="r", reasoning="hm"))
    reader.read(messages.Chunk(id="r", text="I look"))
    reader.read(messages.Chunk(id="r", tool_calls=[call], finish_reason=messages.FinishReason.STOP, usage=USAGE))
    encoder = cast(ResponseEncoder, parsed.encoder(ResponseHead("r", 1_700_000_000, "demo")))
    records = dict(encoder.records([reader]))
    encoder.stored(is_stored)
    return records, json.loads(encoder.whole([reader]))


async def asked(resource: RecordResource, records: Mapping[str, bytes], name: str, **query: str) -> Any:
    limits = StorageLimits(100.0, 16 * LIMIT)
    kept = Records(MemoryStore(limits), limits, GatewayMetrics()).of("acme")
    assert await kept.keep(records)
    return json.loads(await resource.answer(kept, name, query, LargeBodyParser()))


FIRST: dict[str, Any] = {
    "instructions": "be brief",
    "input": [{"role": "user", "content": "hi"}, {"type": "additional_tools", "tools": [TOOL]}],
    "tools": [TOOL | {"name": "g"}],
}
NEXT: dict[str, Any] = {"type": "function_call_output", "call_id": "c1", "output": "7 degrees"}


@pytest.mark.parametrize(("reason", "continues"), [("length", True), ("stop", None)])
def test_an_incomplete_response_is_continued_by_an_empty_input(reason: str, continues: bool | None) -> None:
    parsed, reader = parse({}, input="hi"), AnswerEventReader()
    reader.read(messages.Chunk(id="r", text="I", finish_reason=messages.FinishReason(reason), usage=USAGE))
    encoder = cast(ResponseEncoder, parsed.encoder(ResponseHead("r", 1_700_000_000, "demo")))
    records = dict(encoder.records([reader]))
    said = json.loads(encoder.whole([reader]))
    request = parse(records, previous_response_id=said["id"], input=[]).requests[0]
    assert request.continue_final_message is continues
    assert parse(records, previous_response_id=said["id"]).requests[0].continue_final_message is None


def test_a_continued_response_asks_for_what_a_client_without_storage_would_send() -> None:
    records, said = answered(parse({}, **FIRST))
    continued = parse(records, previous_response_id=said["id"], input=[NEXT], instructions="now rhyme")
    whole = parse({}, input=[*FIRST["input"], *said["output"], NEXT], instructions="now rhyme", store=False)
    assert continued.requests == whole.requests
    assert [one.role for one in continued.requests[0].messages or ()] == ["system", "user", "assistant", "tool"]
    assert (continued.requests[0].messages or [])[2].reasoning_content == "hm"
    more, third = answered(continued)
    assert third["previous_response_id"] == said["id"]
    fourth = parse(more, previous_response_id=third["id"], input="thanks")  # its earlier ones may be gone
    items = [*FIRST["input"], *said["output"], NEXT, *third["output"], {"role": "user", "content": "thanks"}]
    assert fourth.requests == parse({}, input=items).requests


def test_the_tokens_of_a_continued_response_are_counted() -> None:
    records, said = answered(parse({}, **FIRST))
    payload = json.dumps({"model": "demo", "previous_response_id": said["id"], "input": [NEXT]}).encode()
    counted = cast(ParsedCall[Any, Any], INPUT_TOKENS.parse(payload, {}, "r", "", records, LIMIT))
    assert (
        counted.request.messages == parse(records, previous_response_id=said["id"], input=[NEXT]).requests[0].messages
    )


def test_references_stand_for_the_items_that_they_name() -> None:
    records, said = answered(parse({}, input="hi"))
    references = [{"type": "item_reference", "id": item["id"]} for item in said["output"]]
    referring = parse(records, input=[{"role": "user", "content": "hi"}, *references, NEXT])
    assert referring.requests == parse({}, input=[{"role": "user", "content": "hi"}, *said["output"], NEXT]).requests
    lost = refusal_of(lambda: parse({}, input=[references[0]]))
    assert (lost.code, lost.param) == (errors.Code.INVALID_REQUEST, "input[0].id")
    assert refusal_of(lambda: parse({}, input=[{"id": "msg_of_another_server"}])).param == "input[0].id"


@pytest.mark.parametrize("name", ["resp_" + "0" * 48, "resp_1", "", "resp_*", "input_" + "0" * 48])
def test_a_response_that_is_not_stored_can_not_be_continued(name: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse({}, previous_response_id=name, input="hi")
    found = raised.value.response
    assert (found.status, found.code, found.param) == (400, "previous_response_not_found", "previous_response_id")


def test_half_a_response_is_none() -> None:
    records, said = answered(parse({}, **FIRST))
    for name in records:
        with pytest.raises(ApiError):
            parse({name: records[name]}, previous_response_id=said["id"], input="hi")


def test_a_response_is_stored_unless_that_is_declined() -> None:
    assert parse({}, input="hi").is_stored
    assert parse({}, input="hi", store=True).is_stored
    assert not parse({}, input="hi", store=False).is_stored


def test_what_can_not_be_stored_is_refused_if_that_was_asked_for_and_else_told() -> None:
    words = " ".join(str(number) for number in range(1_000))
    refused = refusal_of(lambda: parse({}, 500, input=words, store=True))
    assert (refused.code, refused.param) == (errors.Code.INVALID_REQUEST, "store")
    assert not parse({}, 500, input=words).is_stored
    assert refusal_of(lambda: parse({}, 0, input="hi", store=True)).param == "store"
    assert not parse({}, 0, input="hi").is_stored
    for is_stored in (True, False):
        assert answered(parse({}, input="hi"), is_stored=is_stored)[1]["store"] is is_stored


def test_a_conversation_that_only_repeats_itself_is_stored_no_larger_than_it_can_be_read_again() -> None:
    thought = {"type": "reasoning", "encrypted_content": "a" * (stored._MAX_CONVERSATION_BYTES // 2)}
    records, said = answered(parse({}, input=[thought, {"role": "user", "content": "hi"}]))
    again: dict[str, Any] = {"input": [thought], "previous_response_id": said["id"]}
    assert not parse(records, **again).is_stored
    assert refusal_of(lambda: parse(records, **again, store=True)).param == "store"


def test_ids_are_long_random_and_say_nothing() -> None:
    ids = {answered(parse({}, input="hi"))[1]["id"] for _ in range(8)}
    assert len(ids) == 8
    assert all(len(one) == len("resp_") + 48 for one in ids)


async def test_a_stored_response_is_shown_as_it_was() -> None:
    records, said = answered(parse({}, **FIRST))
    assert await asked(SHOW, records, said["id"]) == said
    Response.model_validate(said, strict=True)
    for query in ({"stream": "true"}, {"starting_after": "3"}):
        with pytest.raises(errors.RequestError) as raised:
            await asked(SHOW, records, said["id"], **query)
        assert raised.value.error.code is errors.Code.UNSUPPORTED
        assert raised.value.error.param == next(iter(query))


async def test_the_input_is_listed_in_pages_from_either_end() -> None:
    records, said = answered(parse({}, input=[{"role": "user", "content": f"{number}"} for number in range(25)]))
    newest = await asked(LIST, records, said["id"])
    assert [item["content"][0]["text"] for item in newest["data"]] == [str(number) for number in range(24, 4, -1)]
    assert (newest["has_more"], newest["last_id"]) == (True, newest["data"][-1]["id"])
    rest = await asked(LIST, records, said["id"], after=newest["last_id"])
    assert [item["content"][0]["text"] for item in rest["data"]] == ["4", "3", "2", "1", "0"]
    assert not rest["has_more"]
    oldest = await asked(LIST, records, said["id"], order="asc", limit="2")
    assert [item["content"][0]["text"] for item in oldest["data"]] == ["0", "1"]
    end = await asked(LIST, records, said["id"], order="asc", after=newest["first_id"])
    assert (end["data"], end["first_id"], end["has_more"]) == ([], None, False)
    ResponseItemList.model_validate(newest, strict=True)


async def test_the_input_of_a_continued_response_is_the_whole_conversation_before_it() -> None:
    records, said = answered(parse({}, **FIRST))
    more, second = answered(parse(records, previous_response_id=said["id"], input=[NEXT]))
    listed = await asked(LIST, more, second["id"], order="asc")
    kinds = ["message", "additional_tools", "reasoning", "message", "function_call", "function_call_output"]
    assert [item["type"] for item in listed["data"]] == kinds
    assert [item["id"] for item in listed["data"][2:5]] == [item["id"] for item in said["output"]]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"limit": "-1"}, "limit"),
        ({"limit": "ten"}, "limit"),
        ({"limit": "9" * 5_000}, "limit"),
        ({"order": "up"}, "order"),
    ],
)
async def test_a_page_that_can_not_be_is_refused_by_name(query: dict[str, str], param: str) -> None:
    records, said = answered(parse({}, input="hi"))
    with pytest.raises(errors.RequestError) as raised:
        await asked(LIST, records, said["id"], **query)
    assert raised.value.error.param == param


async def test_a_page_after_an_unknown_item_is_not_found() -> None:
    records, said = answered(parse({}, input="hi"))
    with pytest.raises(ApiError) as raised:
        await asked(LIST, records, said["id"], after="msg_1")
    assert (raised.value.response.status, raised.value.response.param) == (404, "after")


async def test_a_deleted_response_is_gone_with_its_input() -> None:
    records, said = answered(parse({}, input="hi"))
    limits = StorageLimits(100.0, 16 * LIMIT)
    kept = Records(MemoryStore(limits), limits, GatewayMetrics())
    await kept.of("acme").keep(records)
    for resource in stored.RESOURCES:
        with pytest.raises(ApiError) as raised:
            await resource.answer(kept.of("globex"), said["id"], {}, LargeBodyParser())
        assert raised.value.response.status == 404
    gone = json.loads(await DELETE.answer(kept.of("acme"), said["id"], {}, LargeBodyParser()))
    assert gone == {"id": said["id"], "object": "response", "deleted": True}
    assert cast(MemoryStore, kept.store).num_bytes == 0
    for resource in stored.RESOURCES:
        with pytest.raises(ApiError):
            await resource.answer(kept.of("acme"), said["id"], {}, LargeBodyParser())


async def test_a_stored_response_is_expanded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    records, said = answered(parse({}, input="hi"))
    threads: list[int] = []

    def expanded(packed: bytes) -> bytes:
        threads.append(threading.get_ident())
        return zlib.decompress(packed)

    monkeypatch.setattr(stored, "_expanded", expanded)
    await asked(LIST, records, said["id"])
    await asked(SHOW, records, said["id"])
    assert len(threads) == 2
    assert threading.get_ident() not in threads


def test_a_small_request_can_not_refer_to_too_much() -> None:
    records, said = answered(parse({}, input="hi"))
    response = json.loads(stored._expanded(records[said["id"]]))
    response["output"][1]["content"][0]["text"] = "a" * (stored._MAX_EXPANDED_BYTES // 8)
    large = stored.records_of(said["id"], msgspec.json.encode(response), b"")
    reference = {"type": "item_reference", "id": said["output"][1]["id"]}
    assert refusal_of(lambda: parse(large, input=[reference] * 8)).param == "input"


def test_many_references_to_a_long_conversation_are_resolved_at_once() -> None:
    items = [{"role": "user", "content": "hi"}, *[{"role": "assistant", "content": ""}] * 8_000, NEXT | {"output": "7"}]
    items[1] = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    records, said = answered(parse({}, input=items))
    last = f"msg_{said['id'].removeprefix('resp_')}_in8000"
    began_s = time.process_time()
    (request,) = parse(records, input=[{"type": "item_reference", "id": last}] * 8_000).requests
    assert time.process_time() - began_s < 1.0  # one by one it would be 64 million comparisons
    assert [one.role for one in request.messages or []] == ["assistant"]
