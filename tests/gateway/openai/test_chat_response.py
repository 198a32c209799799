"""The answers that OpenAI's clients receive, made of chunks."""

import json
from typing import Any

import msgspec

from tokenbus.gateway.http import http_errors
from tokenbus.gateway.openai import chat
from tokenbus.gateway.openai.choices import StreamForm
from tokenbus.gateway.serving.answer_events import AnswerEventReader
from tokenbus.gateway.serving.dialect import ResponseHead
from tokenbus.protocol.wire import errors, messages

HEADING = ResponseHead("r", 1_700_000_000, "demo")
HEAD = messages.Chunk(id="r", worker_id="w", model="demo", created=1)
USAGE = messages.Usage(prompt_tokens=5, completion_tokens=3, total_tokens=8, cached_tokens=4)
UNREASONED = {"reasoning_content": None, "reasoning": None}
STOP, LENGTH, CANCELLED, ERROR = (
    messages.FinishReason.STOP,
    messages.FinishReason.LENGTH,
    messages.FinishReason.CANCELLED,
    messages.FinishReason.ERROR,
)


def chunk(text: str = "", reason: messages.FinishReason | None = None, **fields: Any) -> messages.Chunk:
    return messages.Chunk(id="r", tokens=1, text=text, finish_reason=reason, **fields)


def events_of(*chunks: messages.Chunk, include_usage: bool = False) -> list[Any]:
    """The data of all events, as a client reads them."""
    encoder = chat.ChunkEncoder(HEADING, form=StreamForm(include_usage=include_usage))
    reader = AnswerEventReader()
    encoded: list[bytes] = []
    for one in chunks:
        encoded += encoder.encode(0, reader.read(one))
        if one.finish_reason is not None:
            failed = http_errors.from_terminal(one)
            encoded += encoder.fail(failed) if failed else encoder.end()
    lines = b"".join(encoded).decode().split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    return [line if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")) for line in lines]


def whole_of(*chunks: messages.Chunk) -> Any:
    reader = AnswerEventReader()
    for one in chunks:
        reader.read(one)
    return json.loads(chat.ChunkEncoder(HEADING).whole([reader]))


def test_a_stream_opens_with_the_role_goes_on_with_text_and_ends_with_the_reason_and_done() -> None:
    *events, done = events_of(HEAD, chunk("a"), chunk("b"), chunk(reason=STOP, usage=USAGE))
    assert done == "data: [DONE]"
    choices = [event["choices"][0] for event in events]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert {(event["id"], event["object"], event["created"], event["model"]) for event in events} == {
        ("chatcmpl-r", "chat.completion.chunk", 1_700_000_000, "demo")
    }
    assert not any("usage" in event for event in events)


def test_a_chunk_that_says_nothing_is_no_event() -> None:
    assert events_of(HEAD, chunk(), HEAD) == []


def test_a_terminal_alone_opens_and_ends_the_stream() -> None:
    first, text, last, done = events_of(chunk("a", LENGTH))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text["choices"][0] == {"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None}
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert done == "data: [DONE]"


def test_usage_that_was_asked_for_is_null_until_an_event_of_its_own_before_done() -> None:
    *events, usage, _ = events_of(chunk("a"), chunk(reason=STOP, usage=USAGE), include_usage=True)
    assert [event["usage"] for event in events] == [None, None, None]
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_a_stream_that_fails_ends_with_the_error_and_done() -> None:
    failed = chunk(reason=ERROR, error=errors.make_error(errors.Code.WORKER_LOST, "it is gone"))
    *_, error, done = events_of(chunk("a"), failed, include_usage=True)
    assert error == {"error": {"message": "it is gone", "type": "server_error", "param": None, "code": "worker_lost"}}
    assert done == "data: [DONE]"


def test_a_stream_that_somebody_cancelled_ends_with_what_was_held_back_and_an_error() -> None:
    *_, text, error, _ = events_of(chunk("a"), chunk("b", CANCELLED))
    assert (text["choices"][0]["delta"], text["choices"][0]["finish_reason"]) == ({"content": "b"}, None)
    assert error["error"]["code"] == "cancelled"


def logprob(text: str) -> messages.TokenLogprob:
    data = list(text.encode())
    other = messages.TokenAlternative(id=2, text="z", bytes=[122], logprob=-3.0)
    return messages.TokenLogprob(id=1, text=text, bytes=data, logprob=-0.5, top=[other])


LOGPROB = {
    "token": "a",
    "logprob": -0.5,
    "bytes": [97],
    "top_logprobs": [{"token": "z", "logprob": -3.0, "bytes": [122]}],
}


def test_logprobs_come_with_their_tokens_also_where_the_text_is_held_back() -> None:
    _, event, *_ = events_of(chunk("", logprobs=[logprob("a")]))
    assert event["choices"][0]["logprobs"] == {"content": [LOGPROB], "refusal": None}
    whole = whole_of(chunk("", logprobs=[logprob("a")]), chunk("ab", STOP, logprobs=[logprob("b")], usage=USAGE))
    assert [one["token"] for one in whole["choices"][0]["logprobs"]["content"]] == ["a", "b"]


def test_a_whole_answer_has_all_text_the_reason_and_the_usage() -> None:
    whole = whole_of(HEAD, chunk("a"), chunk("b"), chunk("c", LENGTH, usage=USAGE))
    assert whole["object"] == "chat.completion"
    assert whole["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "abc", "refusal": None} | UNREASONED,
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert whole["usage"]["total_tokens"] == 8


def test_calls_of_tools_are_passed_on_as_they_come() -> None:
    opening = messages.ToolCallDelta(
        index=0, id="c", type="function", function=messages.FunctionDelta(name="f", arguments="{")
    )
    more = messages.ToolCallDelta(index=0, arguments_offset=1, function=messages.FunctionDelta(arguments="}"))
    terminal = chunk(reason=messages.FinishReason.TOOL_CALLS, usage=USAGE)
    _, first, *pieces, last, _ = events_of(chunk(tool_calls=[opening]), chunk(tool_calls=[more]), terminal)
    begun = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert first["choices"][0]["delta"] == {"tool_calls": [begun]}
    assert [one["choices"][0]["delta"] for one in pieces] == [
        {"tool_calls": [{"index": 0, "function": {"arguments": added}}]} for added in "{}"
    ]
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    message = whole_of(chunk(tool_calls=[opening]), chunk(tool_calls=[more]), terminal)["choices"][0]["message"]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert message == {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]} | UNREASONED


def test_reasoning_is_apart_from_content() -> None:
    usage = msgspec.structs.replace(USAGE, reasoning_tokens=2)
    terminal = chunk("so", reason=messages.FinishReason.STOP, usage=usage)
    _, event, text, last, _ = events_of(chunk(reasoning="hm", reasoning_offset=0), terminal)
    assert event["choices"][0]["delta"] == {"reasoning_content": "hm", "reasoning": "hm"}
    assert text["choices"][0]["delta"] == {"content": "so"}
    assert last["choices"][0]["delta"] == {}
    whole = whole_of(chunk(reasoning="hm", reasoning_offset=0), terminal)
    said = whole["choices"][0]["message"]
    shown = {"reasoning_content": "hm", "reasoning": "hm"}
    assert said == {"role": "assistant", "content": "so", "refusal": None, **shown}
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_several_answers_interleave_with_their_indices_and_their_usage_is_one() -> None:
    encoder = chat.ChunkEncoder(HEADING, form=StreamForm(include_usage=True))
    readers = [AnswerEventReader(), AnswerEventReader()]
    copy = msgspec.structs.replace(USAGE, prompt_tokens=0, cached_tokens=0, completion_tokens=7, total_tokens=7)
    encoded: list[bytes] = []
    for number, one in (
        (0, chunk("a")),
        (1, chunk("b")),
        (1, chunk(reason=STOP, usage=copy)),
        (0, chunk("c", LENGTH, usage=USAGE)),
    ):
        encoded += encoder.encode(number, readers[number].read(one))
    events = [json.loads(one.removeprefix(b"data: ")) for one in [*encoded, *encoder.end()[:-1]]]
    *told, usage = events
    seen = [(one["choices"][0]["index"], one["choices"][0]["delta"].get("content")) for one in told]
    assert seen == [(0, ""), (0, "a"), (1, ""), (1, "b"), (1, None), (0, "c"), (0, None)]
    assert [usage["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")] == [5, 10, 15]
    whole = json.loads(chat.ChunkEncoder(HEADING).whole(readers))
    assert [(one["index"], one["message"]["content"]) for one in whole["choices"]] == [(0, "ac"), (1, "b")]


def test_every_event_has_the_usage_so_far_if_that_was_asked_for() -> None:
    form = StreamForm(include_usage=True, continuous_usage=True)
    encoder, reader = chat.ChunkEncoder(HEADING, form=form), AnswerEventReader(counts_tokens=True)
    progress = messages.Progress(prompt_tokens=9, processed_tokens=9, cached_tokens=4)
    pieces = [
        messages.Chunk(id="r", progress=progress),
        messages.Chunk(id="r", offset=0, tokens=2, text="a"),
        messages.Chunk(id="r", offset=2, tokens=1, text="b"),
    ]
    sent = [
        json.loads(one.removeprefix(b"data: ")) for piece in pieces for one in encoder.encode(0, reader.read(piece))
    ]
    assert [one["choices"][0]["delta"].get("content") for one in sent] == ["", "a", "b"]
    assert [one["usage"]["completion_tokens"] for one in sent] == [2, 2, 3]
    assert sent[0]["usage"]["prompt_tokens"] == 9
    assert sent[0]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def test_a_stream_of_several_answers_has_the_prompts_log_probabilities_once() -> None:
    encoder, readers = chat.ChunkEncoder(HEADING, prompt_logprobs=0), [AnswerEventReader(), AnswerEventReader()]
    unknown = messages.PromptLogprob(id=1, text="x", bytes=[], logprob=None, rank=None, top=[])
    for number, reader in enumerate(readers):
        events = reader.read(messages.Chunk(id="r", prompt_logprobs=[unknown]))
        sent = [json.loads(one.removeprefix(b"data: ")) for one in encoder.encode(number, events)]
        shown = [(one["choices"][0]["delta"].get("role"), one.get("prompt_logprobs")) for one in sent]
        assert shown == ([] if number else [("assistant", [None]), (None, None)])


def test_the_prompts_progress_is_shown_if_that_was_asked_for() -> None:
    progress = messages.Progress(prompt_tokens=9, processed_tokens=6, cached_tokens=4)
    events = AnswerEventReader().read(messages.Chunk(id="r", progress=progress))
    (sent,) = chat.ChunkEncoder(HEADING, form=StreamForm(shows_progress=True)).encode(0, events)
    shown = json.loads(sent.removeprefix(b"data: "))
    assert shown["prompt_progress"] == {"total": 9, "cache": 4, "processed": 6, "time_ms": 0}
    assert shown["choices"][0]["delta"] == {}
    assert chat.ChunkEncoder(HEADING).encode(0, events) == []
