"""Ollama's chat and completions become requests of the wire, and their answers lines of JSON."""

import functools
import json
from typing import Any

import pytest

from tests.support.refusals import refusal_of
from tokenbus.gateway.ollama import generation
from tokenbus.gateway.serving.answer_events import AnswerEventReader
from tokenbus.gateway.serving.dialect import ParsedGeneration, ResponseHead
from tokenbus.protocol.wire import errors, limits, messages

HELLO = [{"role": "user", "content": "hello"}]
HEAD = ResponseHead("r-1", 1_700_000_000, "demo", lambda: 0.5)
USAGE = messages.Usage(prompt_tokens=5, completion_tokens=3, total_tokens=8, cached_tokens=2)
TIMINGS = messages.Timings(queue_ms=1, prefill_ms=2, ttft_ms=3, decode_ms=4, total_ms=7)


def chat(**fields: Any) -> ParsedGeneration:
    return generation.CHAT.parse(json.dumps({"model": "demo", "messages": HELLO} | fields).encode(), {}, "r-1")


def complete(**fields: Any) -> ParsedGeneration:
    return generation.GENERATE.parse(json.dumps({"model": "demo"} | fields).encode(), {}, "r-1")


def request_of(parsed: ParsedGeneration) -> messages.GenerateRequest:
    (request,) = parsed.requests
    return request


def chunk(**fields: Any) -> messages.Chunk:
    return messages.Chunk(id="r-1", **fields)


def terminal(reason: messages.FinishReason = messages.FinishReason.STOP, **fields: Any) -> messages.Chunk:
    return chunk(finish_reason=reason, usage=USAGE, timings=TIMINGS, **fields)


def lines_of(parsed: ParsedGeneration, *chunks: messages.Chunk) -> list[dict[str, Any]]:
    reader, encoder = AnswerEventReader(), parsed.encoder(HEAD)
    sent = [line for one in chunks for line in encoder.encode(0, reader.read(one))] + encoder.end()
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in sent)
    return [json.loads(line) for line in sent]


def whole(parsed: ParsedGeneration, *chunks: messages.Chunk) -> dict[str, Any]:
    reader = AnswerEventReader()
    for one in chunks:
        reader.read(one)
    found: dict[str, Any] = json.loads(parsed.encoder(HEAD).whole([reader]))
    return found


def call_of(arguments: str) -> messages.ToolCallDelta:
    function = messages.FunctionDelta(name="f", arguments=arguments)
    return messages.ToolCallDelta(index=0, id="call-1", type="function", function=function)


def test_options_become_fields_of_the_wire() -> None:
    options = {
        "seed": 7,
        "num_predict": 9,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.25,
        "min_p": 0.1,
        "repeat_last_n": 5,
        "repeat_penalty": 1.5,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "stop": ["a"],
    }
    assert request_of(chat(options=options)) == messages.GenerateRequest(
        id="r-1",
        messages=[messages.ChatMessage(role="user", content="hello")],
        seed=7,
        max_tokens=9,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.1,
        repetition_last_n=5,
        repetition_penalty=1.5,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        stop=["a"],
    )


def test_negative_numbers_mean_what_they_mean_in_ollama() -> None:
    request = request_of(chat(options={"num_predict": -1, "repeat_last_n": -1, "seed": -1, "top_k": -1}))
    assert (request.max_tokens, request.repetition_last_n) == (limits.MAX_TOKENS, limits.MAX_TOKENS)
    assert (request.seed, request.top_k) == (None, 0)


def test_settings_of_loading_and_samplers_that_are_off_have_no_effect() -> None:
    options = {"num_ctx": 4_096, "num_thread": 8, "num_keep": 4, "mirostat": 0, "mirostat_tau": 5.0, "typical_p": 1.0}
    assert request_of(chat(options=options, keep_alive="5m", truncate=True)) == request_of(chat())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"num_predict": 2**40}}, "options.num_predict"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"typical_p": 0.5}}, "options.typical_p"),
        ({"options": {"tempratur": 0}}, "options.tempratur"),
        ({"options": 5}, "options"),
        ({"format": "xml"}, "format"),
        ({"think": "x" * 65}, "think"),
        ({"think": 5}, "think"),
        ({"think": "foo"}, "think"),
        ({"options": {"reasoning_effort": "foo"}}, "options.reasoning_effort"),
        ({"options": {"seed": 2**63}}, "options.seed"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"keep_alive": []}, "keep_alive"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "a", "images": ["aa"]}]}, "messages[0].images"),
        ({"messages": [{"role": "system", "content": "a"}] * 2 + [{"role": "", "content": "a"}]}, "messages[2].role"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": [], "keep_alive": 0}, "keep_alive"),
        ({"messages": [], "keep_alive": "-0.0h0ms"}, "keep_alive"),
    ],
)
def test_a_field_of_a_chat_that_is_wrong_or_not_served_is_named(fields: dict[str, Any], param: str) -> None:
    error = refusal_of(lambda: chat(**fields))
    assert error.param == param, error
    assert error.message.startswith(param), error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a", "images": ["aa"]}, "images"),
        ({"prompt": "a", "template": "{{ .Prompt }}"}, "template"),
        ({"prompt": "a", "context": [1]}, "context"),
        ({"prompt": "a", "width": 64}, "width"),
        ({"prompt": "a", "options": {"stop": [""]}}, "options.stop"),
        ({"prompt": "a", "raw": True, "system": "b"}, "system"),
        ({"prompt": "a", "suffix": "c", "system": "b"}, "system"),
    ],
)
def test_a_field_of_a_completion_that_is_not_served_is_named(fields: dict[str, Any], param: str) -> None:
    assert refusal_of(lambda: complete(**fields)).param.startswith(param)  # type: ignore[union-attr]


def test_a_format_is_json_or_a_schema() -> None:
    assert request_of(chat(format="json")).response_format == messages.ResponseFormat(type="json_object")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    made = request_of(chat(format=schema)).response_format
    assert made is not None
    assert (made.type, made.json_schema and made.json_schema.schema) == ("json_schema", schema)
    assert request_of(chat(format="")).response_format is None
    deep: dict[str, Any] = functools.reduce(lambda inner, _: {"items": inner}, range(70), {})
    assert refusal_of(lambda: chat(format=deep)).param == "format"


def test_thinking_is_turned_on_off_or_given_an_effort() -> None:
    assert request_of(chat()).chat_template_kwargs is None
    assert request_of(chat(think=True)).chat_template_kwargs == {"enable_thinking": True}
    off = request_of(chat(think=False))
    assert (off.chat_template_kwargs, off.reasoning) == (
        {"enable_thinking": False},
        messages.ReasoningOptions(effort="none"),
    )
    for fields in ({"think": "low"}, {"options": {"reasoning_effort": "low"}}):
        low = request_of(complete(prompt="a", **fields))
        assert low.chat_template_kwargs == {"enable_thinking": True, "reasoning_effort": "low"}
    assert request_of(chat(think=False, options={"reasoning_effort": "low"})).reasoning == off.reasoning
    assert low.reasoning == messages.ReasoningOptions(effort="low")


def test_a_prompt_is_a_conversation_unless_it_is_raw_or_has_a_gap() -> None:
    asked = request_of(complete(prompt="a", system="b"))
    assert asked.messages == [
        messages.ChatMessage(role="system", content="b"),
        messages.ChatMessage(role="user", content="a"),
    ]
    assert (request_of(complete(prompt="a", raw=True)).prompt, request_of(complete(prompt="a")).prompt) == ("a", None)
    gap = request_of(complete(prompt="a", suffix="c"))
    assert (gap.prompt, gap.suffix) == ("a", "c")


def test_past_calls_and_results_become_the_wires() -> None:
    said = [
        *HELLO,
        {"role": "assistant", "thinking": "t", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "7", "tool_name": "f"},
    ]
    asked = request_of(chat(messages=said)).messages
    assert asked is not None
    assert asked[1:] == [
        messages.ChatMessage(
            role="assistant",
            reasoning_content="t",
            tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        ),
        messages.ChatMessage(role="tool", content="7", name="f"),
    ]


def test_a_tag_alone_is_a_name() -> None:
    assert chat(model=":latest").model == ":latest"


def test_a_tag_that_clients_add_is_not_part_of_the_models_name_and_is_repeated() -> None:
    parsed = chat(model="demo:latest")
    assert parsed.model == "demo"
    assert lines_of(parsed, terminal())[0]["model"] == "demo:latest"


def test_answers_are_streamed_unless_the_client_asks_for_one_object() -> None:
    assert (chat().stream, chat(stream=None).stream, chat(stream=False).stream) == (True, True, False)


def test_each_piece_of_an_answer_is_a_line_and_the_last_one_has_the_counts() -> None:
    thinks, text, last = lines_of(chat(), chunk(reasoning="hm"), chunk(text="He"), terminal())
    assert thinks["message"] == {"role": "assistant", "content": "", "thinking": "hm"}
    assert (text["message"], text["done"]) == ({"role": "assistant", "content": "He"}, False)
    assert (last["message"]["content"], last["done"], last["done_reason"]) == ("", True, "stop")
    assert (last["prompt_eval_count"], last["eval_count"]) == (5, 3)
    assert (last["prompt_eval_duration"], last["eval_duration"]) == (2_000_000, 4_000_000)
    assert (last["total_duration"], last["load_duration"]) == (500_000_000, 493_000_000)
    assert last["created_at"] == "2023-11-14T22:13:20.500000Z"


def test_a_completions_lines_have_the_text_as_a_response() -> None:
    thinks, text, last = lines_of(complete(prompt="a"), chunk(reasoning="hm"), chunk(text="He"), terminal())
    assert (thinks["response"], thinks["thinking"]) == ("", "hm")
    assert (text["response"], last["response"], last["done"]) == ("He", "", True)


def test_an_answer_that_is_cut_says_so() -> None:
    (last,) = lines_of(chat(), terminal(messages.FinishReason.LENGTH))
    assert last["done_reason"] == "length"


def test_a_call_is_sent_once_it_is_complete_with_its_arguments_as_an_object() -> None:
    pieces = [chunk(tool_calls=[call_of('{"a"')]), chunk(tool_calls=[call_of(": 1}")])]
    *called, last = lines_of(chat(), *pieces, terminal(messages.FinishReason.TOOL_CALLS))
    wanted = [{"id": "call-1", "function": {"index": 0, "name": "f", "arguments": {"a": 1}}}]
    assert [one["message"]["tool_calls"] for one in called] == [wanted]
    assert last["done_reason"] == "stop"
    assert whole(chat(), *pieces, terminal())["message"]["tool_calls"] == wanted


@pytest.mark.parametrize("arguments", ['{"a"', '{"a": ' + "[" * 5_000 + "]" * 5_000 + "}"], ids=["cut", "deep"])
def test_a_call_that_was_cut_off_or_can_not_be_read_is_left_out(arguments: str) -> None:
    cut = (chunk(tool_calls=[call_of(arguments)]), terminal(messages.FinishReason.LENGTH))
    (last,) = lines_of(chat(), *cut)
    assert "tool_calls" not in last["message"]
    assert "tool_calls" not in whole(chat(), *cut)["message"]


def test_a_whole_answer_is_one_object() -> None:
    found = whole(chat(), chunk(reasoning="hm"), chunk(text="He"), chunk(text="llo"), terminal())
    assert found["message"] == {"role": "assistant", "content": "Hello", "thinking": "hm"}
    assert (found["done"], found["eval_count"]) == (True, 3)
    assert whole(complete(prompt="a"), chunk(text="He"), terminal())["response"] == "He"


def test_log_probabilities_come_with_the_tokens_of_a_line() -> None:
    top = messages.TokenAlternative(id=1, text="H", bytes=[72], logprob=-0.5)
    token = messages.TokenLogprob(id=1, text="H", bytes=[72], logprob=-0.5, top=[top])
    parsed = chat(logprobs=True, top_logprobs=1)
    assert request_of(parsed).logprobs == 1
    line, last = lines_of(parsed, chunk(text="H", logprobs=[token]), terminal())
    shown = {"token": "H", "logprob": -0.5, "bytes": [72]}
    assert line["logprobs"] == [shown | {"top_logprobs": [shown]}]
    assert "logprobs" not in last
    line, last = lines_of(parsed, chunk(logprobs=[token]), chunk(text="HH", logprobs=[token]), terminal())
    assert [one["token"] for one in line["logprobs"]] == ["H", "H"], "one of them had no text of its own"
    _, last = lines_of(parsed, chunk(text="H"), chunk(logprobs=[token]), terminal())
    assert len(last["logprobs"]) == 1


def test_a_duration_of_any_form_is_read_in_no_time() -> None:
    """Patterns that backtrack would take days, in the event loop."""
    assert request_of(chat(messages=[], keep_alive="0ms" * 200 + "1s")).max_tokens == 1
    assert refusal_of(lambda: chat(messages=[], keep_alive="1ms" * 200 + "x")).param == "keep_alive"


@pytest.mark.parametrize("parsed", [chat(messages=[]), complete(), complete(prompt="", keep_alive=-1)])
def test_an_empty_prompt_loads_the_model_and_shows_no_token(parsed: ParsedGeneration) -> None:
    assert request_of(parsed).max_tokens == 1
    (last,) = lines_of(parsed, chunk(text="x", tokens=1), terminal(messages.FinishReason.LENGTH))
    assert (last["done"], last["done_reason"]) == (True, "load")
    assert last.get("response", "") == last.get("message", {}).get("content", "") == ""
    assert "eval_count" not in last
    assert whole(parsed, chunk(text="x"), terminal())["done_reason"] == "load"


def test_silence_is_a_line_without_text_and_an_error_is_a_line_too() -> None:
    encoder = chat().encoder(HEAD)
    assert json.loads(encoder.keep_alive(0.5))["message"]["content"] == ""
    error = errors.make_error(errors.Code.WORKER_LOST)
    (line,) = encoder.fail(generation.http_errors.from_error(error))
    assert json.loads(line) == {"error": error.message}


@pytest.mark.parametrize(
    ("last", "continues"),
    [
        ({"role": "assistant", "content": "The"}, True),
        ({"role": "assistant", "content": ""}, None),
        ({"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, None),
        ({"role": "user", "content": "and?"}, None),
    ],
)
def test_an_assistants_text_at_the_end_is_continued(last: dict[str, Any], continues: bool | None) -> None:
    assert request_of(chat(messages=[*HELLO, last])).continue_final_message is continues
