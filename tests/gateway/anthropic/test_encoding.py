"""Events of an answer become Anthropic's events, and a whole answer one message."""

import json
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import (
    Message,
    RawContentBlockDeltaEvent,
    RawContentBlockStartEvent,
    RawContentBlockStopEvent,
    RawMessageDeltaEvent,
    RawMessageStartEvent,
    RawMessageStopEvent,
)

from tokenbus.gateway.anthropic.encoding import SIGNATURE, MessageEncoder
from tokenbus.gateway.http import http_errors
from tokenbus.gateway.serving.answer_events import AnswerEventReader
from tokenbus.gateway.serving.dialect import ResponseHead
from tokenbus.protocol.wire import errors, messages

HEAD = ResponseHead("r", 1_700_000_000, "demo")
USAGE = messages.Usage(prompt_tokens=9, completion_tokens=4, total_tokens=13, cached_tokens=6, reasoning_tokens=2)
USAGE_SHOWN = {
    "input_tokens": 3,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 6,
    "output_tokens": 4,
    "output_tokens_details": {"thinking_tokens": 2},
}
SEEN = messages.Chunk(id="r", progress=messages.Progress(prompt_tokens=9, processed_tokens=6, cached_tokens=5))
EVENT_TYPES = {
    "message_start": RawMessageStartEvent,
    "content_block_start": RawContentBlockStartEvent,
    "content_block_delta": RawContentBlockDeltaEvent,
    "content_block_stop": RawContentBlockStopEvent,
    "message_delta": RawMessageDeltaEvent,
    "message_stop": RawMessageStopEvent,
}


def call(index: int, arguments: str, name: str = "") -> messages.ToolCallDelta:
    function = (
        messages.FunctionDelta(name=name, arguments=arguments) if name else messages.FunctionDelta(arguments=arguments)
    )
    return messages.ToolCallDelta(index=index, id=f"c{index}", type="function", function=function)


ANSWER = [
    SEEN,
    messages.Chunk(id="r", reasoning="h"),
    messages.Chunk(id="r", reasoning="m", text="so"),
    messages.Chunk(id="r", text=" it", tool_calls=[call(0, '{"a"', "f")]),
    messages.Chunk(id="r", tool_calls=[call(0, ": 1}"), call(1, "{}", "g")]),
    messages.Chunk(id="r", finish_reason=messages.FinishReason.TOOL_CALLS, usage=USAGE),
]


def streamed(*chunks: messages.Chunk) -> list[tuple[str, dict[str, Any]]]:
    encoder, reader = MessageEncoder(HEAD), AnswerEventReader()
    events = [event for chunk in chunks for event in encoder.encode(0, reader.read(chunk))]
    return [parsed(event) for event in [*events, *encoder.end()]]


def parsed(event: bytes) -> tuple[str, dict[str, Any]]:
    name, data, *rest = event.decode().split("\n")
    assert rest == ["", ""]
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def whole(*chunks: messages.Chunk) -> dict[str, Any]:
    reader = AnswerEventReader()
    for chunk in chunks:
        reader.read(chunk)
    message: dict[str, Any] = json.loads(MessageEncoder(HEAD).whole([reader]))
    return message


def test_each_part_is_a_block_that_starts_grows_and_stops() -> None:
    events = streamed(*ANSWER)
    assert all(name == data["type"] for name, data in events)
    start, *middle, delta, stop = [data for _, data in events]
    assert start == {
        "type": "message_start",
        "message": {
            "id": "msg_r",
            "type": "message",
            "role": "assistant",
            "model": "demo",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": 4,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 5,
                "output_tokens": 0,
            },
        },
    }
    shown = [(one["index"], one.get("content_block") or one.get("delta")) for one in middle]
    assert shown == [
        (0, {"type": "thinking", "thinking": "", "signature": ""}),
        (0, {"type": "thinking_delta", "thinking": "h"}),
        (0, {"type": "thinking_delta", "thinking": "m"}),
        (0, {"type": "signature_delta", "signature": SIGNATURE}),
        (0, None),
        (1, {"type": "text", "text": ""}),
        (1, {"type": "text_delta", "text": "so"}),
        (1, {"type": "text_delta", "text": " it"}),
        (1, None),
        (2, {"type": "tool_use", "id": "c0", "name": "f", "input": {}}),
        (2, {"type": "input_json_delta", "partial_json": '{"a"'}),
        (2, {"type": "input_json_delta", "partial_json": ": 1}"}),
        (2, None),
        (3, {"type": "tool_use", "id": "c1", "name": "g", "input": {}}),
        (3, {"type": "input_json_delta", "partial_json": "{}"}),
        (3, None),
    ]
    assert delta == {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": USAGE_SHOWN,
    }
    assert stop == {"type": "message_stop"}


def test_a_stream_put_together_by_anthropics_library_is_the_whole_message() -> None:
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for name, data in streamed(*ANSWER):
        event: Any = EVENT_TYPES[name].model_validate(data, strict=True)
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    expected = Message.model_validate(whole(*ANSWER), strict=True)
    assert snapshot.to_dict(exclude_unset=False) == expected.to_dict(exclude_unset=False)
    assert [block.type for block in expected.content] == ["thinking", "text", "tool_use", "tool_use"]


def test_a_prompt_of_which_nothing_was_heard_has_its_true_numbers_at_the_end() -> None:
    events = streamed(*ANSWER[1:])
    assert events[0][1]["message"]["usage"]["input_tokens"] == 0
    assert events[-2][1]["usage"] == USAGE_SHOWN


def end(reason: messages.FinishReason, **fields: Any) -> messages.Chunk:
    return messages.Chunk(id="r", finish_reason=reason, usage=USAGE, **fields)


def test_stop_reasons() -> None:
    stop, length = messages.FinishReason.STOP, messages.FinishReason.LENGTH
    for chunk, reason, sequence in (
        (end(stop), "end_turn", None),
        (end(stop, stop_match=7), "end_turn", None),
        (end(stop, stop_match="END"), "stop_sequence", "END"),
        (end(length), "max_tokens", None),
        (end(messages.FinishReason.TOOL_CALLS), "tool_use", None),
    ):
        message = whole(chunk)
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
        assert streamed(chunk)[-2][1]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


@pytest.mark.parametrize("arguments", ['{"a": "b', '{"a": ' + "[" * 5_000 + "]" * 5_000 + "}"], ids=["cut", "deep"])
def test_a_call_that_can_not_be_read_is_left_out_of_a_whole_message(arguments: str) -> None:
    cut = messages.Chunk(id="r", tool_calls=[call(0, "", "f"), call(1, arguments, "g")])
    message = whole(cut, end(messages.FinishReason.LENGTH))
    assert message["content"] == [{"type": "tool_use", "id": "c0", "name": "f", "input": {}}]


def test_while_nothing_comes_the_message_begins_once_and_is_kept_alive() -> None:
    encoder, reader = MessageEncoder(HEAD), AnswerEventReader()
    assert encoder.encode(0, reader.read(SEEN)) == []
    start, ping, empty = encoder.keep_alive(None).split(b"\n\n")
    assert (parsed(start + b"\n\n")[0], ping, empty) == ("message_start", b'event: ping\ndata: {"type":"ping"}', b"")
    assert encoder.keep_alive(None) == ping + b"\n\n"
    assert [parsed(one)[0] for one in encoder.encode(0, reader.read(messages.Chunk(id="r", text="a")))] == [
        "content_block_start",
        "content_block_delta",
    ]


def test_a_stream_that_fails_ends_with_an_error() -> None:
    response = http_errors.from_error(errors.make_error(errors.Code.WORKER_LOST))._replace(request_id="q")
    (event,) = MessageEncoder(HEAD).fail(response)
    assert parsed(event) == (
        "error",
        {"type": "error", "error": {"type": "api_error", "message": response.message}, "request_id": "q"},
    )
