"""The events of a streamed response, and what OpenAI's own library makes of them."""

import json
from collections.abc import Callable
from typing import Any, cast

import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.gateway.http import http_errors
from tokenbus.gateway.http.http_errors import ErrorResponse
from tokenbus.gateway.openai import error_bodies
from tokenbus.gateway.openai.responses.endpoints import ENDPOINT
from tokenbus.gateway.openai.responses.events import ResponseEncoder
from tokenbus.gateway.serving.answer_events import AnswerEventReader
from tokenbus.gateway.serving.dialect import ParsedGeneration, ResponseHead
from tokenbus.protocol.wire import errors, messages

HEAD = ResponseHead("r", 1_700_000_000, "demo")
USAGE = messages.Usage(prompt_tokens=5, completion_tokens=3, total_tokens=8, cached_tokens=4, reasoning_tokens=1)
STOP, LENGTH, CALLS = messages.FinishReason.STOP, messages.FinishReason.LENGTH, messages.FinishReason.TOOL_CALLS
FIRST = ["response.created", "response.in_progress"]
SUMMARY = {"summary": "auto"}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "crm", "description": "d", "tools": [{"type": "function", "name": "g"}]},
]


def chunk(reason: messages.FinishReason | None = None, **fields: Any) -> messages.Chunk:
    return messages.Chunk(id="r", tokens=1, finish_reason=reason, **fields)


def call(index: int, arguments: str, name: str = "") -> messages.ToolCallDelta:
    if name:
        function = messages.FunctionDelta(name=name, arguments=arguments)
        return messages.ToolCallDelta(index=index, id=f"c{index}", type="function", function=function)
    return messages.ToolCallDelta(index=index, function=messages.FunctionDelta(arguments=arguments))


def parsed(**fields: object) -> ParsedGeneration:
    body = {"model": "demo", "input": "hi", "tools": TOOLS, **fields}
    return ENDPOINT.parse(json.dumps(body).encode(), {}, "r")


def encoded(*chunks: messages.Chunk, encoder: ResponseEncoder | None = None, **fields: object) -> bytes:
    """The events of chunks of a stream, as they are sent."""
    encoder = encoder or parsed(stream=True, **fields).encoder(HEAD)
    reader = AnswerEventReader()
    sent: list[bytes] = []
    for one in chunks:
        events = reader.read(one)
        sent += encoder.encode(0, events) if events else []
        if one.finish_reason is not None:
            failure = http_errors.from_terminal(one)
            sent += encoder.fail(failure) if failure else encoder.end()
    return b"".join(sent)


def test_a_response_shows_the_sampling_that_the_worker_has_chosen() -> None:
    own = messages.SamplingReport(
        temperature=0.25,
        top_p=0.5,
        top_k=1,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.125,
        frequency_penalty=-0.5,
        seed=7,
        max_tokens=9,
    )
    shown = {"temperature": 0.25, "top_p": 0.5, "presence_penalty": 0.125, "frequency_penalty": -0.5}
    head, end = messages.Chunk(id="r", sampling=own), chunk(messages.FinishReason.STOP, text="a")
    events = decoded(encoded(head, end))
    for event in (events[0], events[-1]):
        assert {name: event["response"][name] for name in shown} == shown
    reader = AnswerEventReader()
    for one in (head, end):
        reader.read(one)
    whole = json.loads(parsed().encoder(HEAD).whole([reader]))
    assert {name: whole[name] for name in shown} == shown


def test_a_worker_is_asked_for_its_sampling_only_if_the_client_left_some_open() -> None:
    assert parsed(temperature=0.5).requests[0].return_sampling is True
    assert parsed(temperature=0.5, top_p=0.9).requests[0].return_sampling is None


def decoded(sent: bytes) -> list[dict[str, Any]]:
    """The data of events, whose names and numbers are right."""
    *lines, rest = sent.decode().split("\n\n")
    assert rest == ""
    events = []
    for number, line in enumerate(lines):
        name, _, data = line.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert (name, number) == (f"event: {event['type']}", event.pop("sequence_number"))
        events.append(event)
    return events


def events_of(*chunks: messages.Chunk, **fields: object) -> list[dict[str, Any]]:
    return decoded(encoded(*chunks, **fields))


def failed(code: errors.Code, message: str | None = None, **fields: Any) -> messages.Chunk:
    return chunk(messages.FinishReason.ERROR, error=errors.make_error(code, message, **fields))


ANSWER = (
    chunk(reasoning="h"),
    chunk(reasoning="m"),
    chunk(text="I"),
    chunk(text=" look"),
    chunk(tool_calls=[call(0, '{"a"', "f")]),
    chunk(tool_calls=[call(0, ": 1}")]),
    chunk(tool_calls=[call(1, '{"input": "a', "patch")]),
    chunk(tool_calls=[call(1, '\\nb"')]),
    chunk(tool_calls=[call(1, "}"), call(2, "{}", "crm__g")]),
    chunk(CALLS, usage=USAGE),
)
"""An answer with a part of each kind."""


def test_each_item_is_added_grows_and_is_done() -> None:
    *events, completed = events_of(*ANSWER, include=["reasoning.encrypted_content"])
    assert [event["type"] for event in events[:2]] == FIRST
    rs, msg, fc, ctc, last = (
        {"output_index": n, "item_id": f"{kind}_r_{n}"} for n, kind in enumerate(("rs", "msg", "fc", "ctc", "fc"))
    )
    reasoning = {"id": "rs_r_0", "type": "reasoning", "summary": []}
    message = {"id": "msg_r_1", "type": "message", "role": "assistant"}
    function = {"id": "fc_r_2", "type": "function_call", "call_id": "c0", "name": "f"}
    custom = {"id": "ctc_r_3", "type": "custom_tool_call", "call_id": "c1", "name": "patch"}
    spaced = {"id": "fc_r_4", "type": "function_call", "call_id": "c2", "name": "g", "namespace": "crm"}
    begun, done = {"status": "in_progress"}, {"status": "completed"}
    thought, text = {"type": "reasoning_text", "text": "hm"}, {"type": "output_text", "text": "I look"}
    empty = {"annotations": [], "logprobs": []}
    whole = [
        reasoning | done | {"content": [thought], "encrypted_content": "tokenbus.1.aG0="},
        message | done | {"content": [text | empty]},
        function | done | {"arguments": '{"a": 1}'},
        custom | done | {"input": "a\nb"},
        spaced | done | {"arguments": "{}"},
    ]
    added, item_done = "response.output_item.added", "response.output_item.done"
    assert events[2:] == [
        {"type": added, "output_index": 0, "item": reasoning | begun | {"content": []}},
        {"type": "response.content_part.added", **rs, "content_index": 0, "part": thought | {"text": ""}},
        {"type": "response.reasoning_text.delta", **rs, "content_index": 0, "delta": "h"},
        {"type": "response.reasoning_text.delta", **rs, "content_index": 0, "delta": "m"},
        {"type": "response.reasoning_text.done", **rs, "content_index": 0, "text": "hm"},
        {"type": "response.content_part.done", **rs, "content_index": 0, "part": thought},
        {"type": item_done, "output_index": 0, "item": whole[0]},
        {"type": added, "output_index": 1, "item": message | begun | {"content": []}},
        {"type": "response.content_part.added", **msg, "content_index": 0, "part": text | empty | {"text": ""}},
        {"type": "response.output_text.delta", **msg, "content_index": 0, "delta": "I", "logprobs": []},
        {"type": "response.output_text.delta", **msg, "content_index": 0, "delta": " look", "logprobs": []},
        {"type": "response.output_text.done", **msg, "content_index": 0, "text": "I look", "logprobs": []},
        {"type": "response.content_part.done", **msg, "content_index": 0, "part": text | empty},
        {"type": item_done, "output_index": 1, "item": whole[1]},
        {"type": added, "output_index": 2, "item": function | begun | {"arguments": ""}},
        {"type": "response.function_call_arguments.delta", **fc, "delta": '{"a"'},
        {"type": "response.function_call_arguments.delta", **fc, "delta": ": 1}"},
        {"type": "response.function_call_arguments.done", **fc, "name": "f", "arguments": '{"a": 1}'},
        {"type": item_done, "output_index": 2, "item": whole[2]},
        {"type": added, "output_index": 3, "item": custom | begun | {"input": ""}},
        {"type": "response.custom_tool_call_input.delta", **ctc, "delta": "a"},
        {"type": "response.custom_tool_call_input.delta", **ctc, "delta": "\nb"},
        {"type": "response.custom_tool_call_input.done", **ctc, "input": "a\nb"},
        {"type": item_done, "output_index": 3, "item": whole[3]},
        {"type": added, "output_index": 4, "item": spaced | begun | {"arguments": ""}},
        {"type": "response.function_call_arguments.delta", **last, "delta": "{}"},
        {"type": "response.function_call_arguments.done", **last, "name": "g", "arguments": "{}"},
        {"type": item_done, "output_index": 4, "item": whole[4]},
    ]
    assert completed["type"] == "response.completed"
    assert (completed["response"]["status"], completed["response"]["output"]) == ("completed", whole)


def test_a_summary_that_was_asked_for_is_the_reasoning_itself() -> None:
    events = events_of(chunk(reasoning="h"), chunk(reasoning="m"), chunk(STOP, usage=USAGE), reasoning=SUMMARY)
    shown = [event for event in events if "summary_index" in event]
    place = {"output_index": 0, "item_id": "rs_r_0", "summary_index": 0}
    name = "response.reasoning_summary"
    assert [{key: value for key, value in one.items() if key != "sequence_number"} for one in shown] == [
        {"type": f"{name}_part.added", **place, "part": {"type": "summary_text", "text": ""}},
        {"type": f"{name}_text.delta", **place, "delta": "h"},
        {"type": f"{name}_text.delta", **place, "delta": "m"},
        {"type": f"{name}_text.done", **place, "text": "hm"},
        {"type": f"{name}_part.done", **place, "part": {"type": "summary_text", "text": "hm"}},
    ]
    (item,) = events[-1]["response"]["output"]
    assert (item["summary"], item["content"]) == (
        [{"type": "summary_text", "text": "hm"}],
        [{"type": "reasoning_text", "text": "hm"}],
    )


@pytest.mark.parametrize("text", ["", "a"])
def test_a_response_that_failed_says_that_it_is_not_stored(text: str) -> None:
    encoder = cast(Any, ENDPOINT.parse(b'{"model": "demo", "input": "hi"}', {}, "r", "", None, 1_000)).encoder(HEAD)
    sent = [*encoder.encode(0, AnswerEventReader().read(chunk(text=text)))]
    *first, failed = [
        json.loads(one.partition(b"data: ")[2]) for one in [*sent, *encoder.fail(ErrorResponse(500, "x", "y"))]
    ]
    assert first[0]["response"]["store"]
    assert not failed["response"]["store"]


def test_a_response_begins_with_nothing_and_ends_with_its_usage() -> None:
    created, in_progress, *_, completed = events_of(chunk(text="a"), chunk(STOP, usage=USAGE))
    for first in (created, in_progress):
        assert (first["response"]["status"], first["response"]["output"], first["response"]["usage"]) == (
            "in_progress",
            [],
            None,
        )
    assert created["response"]["id"] == completed["response"]["id"] == "resp_r"
    assert completed["response"]["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 8,
    }


def test_an_empty_answer_is_complete_without_an_item() -> None:
    *first, completed = events_of(chunk(STOP, usage=USAGE))
    assert [event["type"] for event in first] == FIRST
    assert (completed["response"]["status"], completed["response"]["output"]) == ("completed", [])


def test_chunks_without_events_are_none() -> None:
    assert encoded(chunk()) == b""


def test_a_text_that_is_cut_off_is_done_and_incomplete() -> None:
    *_, item, incomplete = events_of(chunk(text="a"), chunk(LENGTH, usage=USAGE))
    assert (item["type"], item["item"]["status"]) == ("response.output_item.done", "incomplete")
    assert incomplete["type"] == "response.incomplete"
    response = incomplete["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"] == [item["item"]]


def test_only_the_last_item_of_an_answer_that_is_cut_off_is_incomplete() -> None:
    *_, incomplete = events_of(chunk(reasoning="a"), chunk(text="b"), chunk(LENGTH))
    assert [item["status"] for item in incomplete["response"]["output"]] == ["completed", "incomplete"]


@pytest.mark.parametrize("name", ["f", "patch"])
@pytest.mark.parametrize("end", [chunk(LENGTH), failed(errors.Code.WORKER_LOST)])
def test_a_call_that_is_cut_off_is_never_done_so_that_no_agent_carries_it_out(name: str, end: messages.Chunk) -> None:
    events = events_of(chunk(tool_calls=[call(0, "{}", "f")]), chunk(tool_calls=[call(1, '{"input": "rm ', name)]), end)
    assert [event["item"]["call_id"] for event in events if event["type"] == "response.output_item.done"] == ["c0"]
    assert len([event for event in events if event["type"].endswith(("arguments.done", "input.done"))]) == 1
    first, cut = events[-1]["response"]["output"]
    assert (first["status"], cut["status"]) == ("completed", "incomplete")
    assert cut.get("input", cut.get("arguments")) == ("rm " if name == "patch" else '{"input": "rm ')


def test_a_failure_is_the_last_event_and_keeps_the_items_so_far() -> None:
    *_, last = events_of(chunk(reasoning="a"), chunk(text="b"), failed(errors.Code.WORKER_LOST, "it is gone"))
    assert last["type"] == "response.failed"
    response = last["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "it is gone", "param": None}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


def test_a_failure_alone_begins_and_ends_the_response() -> None:
    events = events_of(failed(errors.Code.NO_WORKER))
    assert [event["type"] for event in events] == [*FIRST, "response.failed"]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            errors.prompt_too_long(5_000, 4_096).error,
            "context_length_exceeded",
            "This model's maximum context length is 4096 tokens. However, your messages resulted in 5000 tokens. "
            "Please reduce the length of the messages.",
        ),
        (
            errors.make_error(errors.Code.OVERLOADED, "all queues are full", retry_after_ms=1_200),
            "rate_limit_exceeded",
            "all queues are full. Please try again in 2s.",
        ),
        (errors.make_error(errors.Code.OVERLOADED, "it is full"), "rate_limit_exceeded", "it is full"),
        (errors.make_error(errors.Code.INTERNAL, "a bug"), "server_error", "a bug"),
        (errors.make_error(errors.Code.REQUEST_CRASHES_ENGINE, "it crashes"), "invalid_prompt", "it crashes"),
    ],
)
def test_a_failure_has_the_codes_and_words_by_which_agents_act(error: errors.Error, code: str, message: str) -> None:
    *_, last = events_of(chunk(messages.FinishReason.ERROR, error=error))
    assert (last["response"]["error"]["code"], last["response"]["error"]["message"]) == (code, message)


def test_a_failure_names_its_field_as_the_client_called_it() -> None:
    *_, last = events_of(failed(errors.Code.INVALID_REQUEST, "max_tokens: too many", param="max_tokens"))
    assert last["response"]["error"]["param"] == "max_output_tokens"
    assert last["response"]["error"]["message"] == "max_output_tokens: too many"


def test_a_response_is_kept_alive_by_events() -> None:
    encoder = parsed(stream=True).encoder(HEAD)
    sent = encoder.keep_alive(None) + encoder.keep_alive(None) + encoded(chunk(STOP), encoder=encoder)
    assert [event["type"] for event in decoded(sent)] == [*FIRST, "response.in_progress", "response.completed"]


def test_logprobs_are_those_of_the_text() -> None:
    def token(text: str) -> list[messages.TokenLogprob]:
        top = [messages.TokenAlternative(id=1, text=text, bytes=[97], logprob=-0.5)]
        return [messages.TokenLogprob(id=1, text=text, bytes=[97], logprob=-0.5, top=top)]

    def shown(text: str) -> dict[str, Any]:
        one = {"token": text, "logprob": -0.5, "bytes": [97]}
        return one | {"top_logprobs": [one]}

    events = events_of(
        chunk(reasoning="hm", logprobs=token("hm")),
        chunk(text="a", logprobs=token("a")),
        chunk(logprobs=token("\\xc3")),
        chunk(text="ü", logprobs=token("\\xbc")),
        chunk(STOP, logprobs=token("<end>")),
    )
    found = [event["logprobs"] for event in events if "logprobs" in event]
    assert found == [
        [shown("a")],
        [shown("\\xc3"), shown("\\xbc")],
        [shown("a"), shown("\\xc3"), shown("\\xbc")],
    ]
    assert events[-1]["response"]["output"][1]["content"][0]["logprobs"] == found[-1]


def client_of(answer: Callable[[], bytes], media_type: str) -> openai.OpenAI:
    """OpenAI's client, which checks every field and gets this answer to whatever it asks."""
    headers = {"content-type": media_type}
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=headers, content=answer()))
    http_client = httpx2.Client(transport=transport)
    return openai.OpenAI(api_key="none", http_client=http_client, _strict_response_validation=True)


@pytest.mark.parametrize("last", ["completed", "incomplete", "failed"])
def test_every_event_is_of_the_librarys_types(last: str) -> None:
    ends = {"completed": chunk(CALLS, usage=USAGE), "incomplete": chunk(LENGTH), "failed": failed(errors.Code.INTERNAL)}
    sent = encoded(*ANSWER[:-1], ends[last], include=["reasoning.encrypted_content"], metadata={"a": "b"})
    with client_of(lambda: sent, "text/event-stream") as client:
        events = list(client.responses.create(model="demo", input="hi", stream=True))
    assert [event.type for event in events] == [event["type"] for event in decoded(sent)]
    assert events[-1].type == f"response.{last}"


def test_the_librarys_own_helper_puts_a_stream_together() -> None:
    sent = encoded(*ANSWER)
    tools: Any = TOOLS
    with (
        client_of(lambda: sent, "text/event-stream") as client,
        client.responses.stream(model="demo", input="hi", tools=tools) as stream,
    ):
        final = stream.get_final_response()
    reasoning, message, function, custom, spaced = final.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert (reasoning.content[0].text, final.output_text) == ("hm", "I look")
    assert message.type == "message"
    assert function.type == spaced.type == "function_call"
    assert (function.call_id, function.parsed_arguments) == ("c0", {"a": 1})
    assert (spaced.name, spaced.namespace) == ("g", "crm")
    assert custom.type == "custom_tool_call"
    assert custom.input == "a\nb"


parts = st.one_of(
    st.builds(lambda text: {"text": text}, st.text(min_size=1, max_size=3)),
    st.builds(lambda text: {"reasoning": text}, st.text(min_size=1, max_size=3)),
    st.builds(lambda text: {"text": text, "reasoning": text}, st.text(min_size=1, max_size=3)),
)


@given(st.lists(parts, max_size=6), st.sampled_from([STOP, LENGTH]))
def test_a_stream_and_a_whole_response_have_the_same_end(
    given: list[dict[str, str]], reason: messages.FinishReason
) -> None:
    chunks = [*(chunk(**one) for one in given), chunk(reason, usage=USAGE)]
    reader = AnswerEventReader()
    for one in chunks:
        reader.read(one)
    events = events_of(*chunks)
    assert events[-1]["response"] == json.loads(parsed().encoder(HEAD).whole([reader]))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done


def test_a_body_of_an_error_has_the_form_of_the_other_endpoints() -> None:
    error = json.loads(error_bodies.encode(parsed().named(ErrorResponse(503, "overloaded", "full"))))
    assert error == {"error": {"message": "full", "type": "server_error", "param": None, "code": "overloaded"}}
