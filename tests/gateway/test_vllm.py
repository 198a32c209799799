"""vLLM's `/tokenize` and `/detokenize`, as requests of the wire."""

import json
from typing import Any

import pytest

from tokenbus.gateway import vllm
from tokenbus.gateway.http import http_errors
from tokenbus.protocol.wire import errors, messages

BEGUN: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def parse(**fields: Any) -> messages.TokenizeRequest:
    return vllm.TOKENIZE.parse(json.dumps({"model": "m", **fields}).encode(), {}, "r").request


def test_a_prompt_and_a_conversation_become_requests_of_the_wire() -> None:
    assert parse(prompt="x", add_special_tokens=False) == messages.TokenizeRequest(
        id="r", prompt="x", add_special_tokens=False
    )
    tool = {"type": "function", "function": {"name": "f"}}
    said = [{"role": "developer", "content": "a"}, {"role": "assistant", "content": "b", "reasoning": "c"}]
    asked = parse(messages=said, tools=[tool], chat_template_kwargs={"enable_thinking": False}, only_count=True)
    assert asked.messages == [
        messages.ChatMessage(role="system", content="a"),
        messages.ChatMessage(role="assistant", content="b", reasoning_content="c"),
    ]
    assert (asked.tools, asked.chat_template_kwargs, asked.only_count) == ([tool], {"enable_thinking": False}, True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": []}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": "x", "model": "m" * 129}, "model"),
        ({"prompt": "x", "content": "x"}, "content"),
        ({"prompt": "x", "continue_final_message": True}, "continue_final_message"),
        ({"prompt": "x", "chat_template": ""}, "chat_template"),
        ({"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": BEGUN[:1], "continue_final_message": True}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "a", "prefix": True}]}, "messages[0].role"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(errors.RequestError) as refused:
        parse(**fields)
    assert refused.value.error.param == param


def test_what_asks_for_the_usual_is_no_reason_to_refuse() -> None:
    parse(prompt="x", return_token_strs=False, add_generation_prompt=True, continue_final_message=False)


def test_a_conversation_may_end_without_the_beginning_of_an_answer_and_a_text_has_none() -> None:
    said = [{"role": "user", "content": "a"}]
    asked = parse(messages=said, add_generation_prompt=False, chat_template_kwargs={"a": 1})
    assert asked.chat_template_kwargs == {"a": 1, "add_generation_prompt": False}
    assert parse(prompt="x", add_generation_prompt=False).chat_template_kwargs is None


@pytest.mark.parametrize(
    "asked",
    [
        {"messages": BEGUN, "continue_final_message": True},
        {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False},
        {"messages": [BEGUN[0], BEGUN[1] | {"prefix": True}]},
    ],
)
def test_a_conversation_may_end_in_the_middle_of_its_last_message(asked: dict[str, Any]) -> None:
    request = parse(**asked)
    assert (request.continue_final_message, request.chat_template_kwargs) == (True, None)
    assert parse(messages=BEGUN).continue_final_message is None


def test_llama_servers_names_add_bos_only_if_asked_to() -> None:
    assert parse(content="x") == messages.TokenizeRequest(id="r", prompt="x", add_special_tokens=False)
    assert parse(content="x", add_special=True) == messages.TokenizeRequest(id="r", prompt="x", add_special_tokens=True)


def test_replies_become_vllms() -> None:
    call = vllm.TOKENIZE.parse(b'{"model": "m", "prompt": "x"}', {}, "r")
    reply = messages.TokenizeReply(id="r", model="m", count=2, token_ids=[5, 6], context_length=512)
    assert json.loads(call.encode(vllm.TokenizedPrompt(reply))) == {
        "count": 2,
        "max_model_len": 512,
        "tokens": [5, 6],
        "token_strs": None,
    }
    back = vllm.DETOKENIZE.parse(b'{"model": "m", "tokens": [5, 6]}', {}, "r")
    assert back.request == messages.DetokenizeRequest(id="r", token_ids=[5, 6])
    reply = messages.DetokenizeReply(id="r", model="m", text="x")
    assert json.loads(back.encode(reply)) == {"prompt": "x", "content": "x"}


def test_a_message_at_fault_has_its_place_in_the_clients_list() -> None:
    system = [{"role": "system", "content": "be brief"}] * 2
    with pytest.raises(errors.RequestError) as refused:
        parse(messages=[*system, {"role": "user"}])
    assert refused.value.error.param == "messages[2].content"
    body = json.dumps({"model": "m", "messages": [*system, {"role": "user", "content": "hello"}]}).encode()
    call = vllm.TOKENIZE.parse(body, {}, "r")
    shown = call.named(http_errors.from_error(errors.invalid_field("messages[1].content", "no").error))
    assert (shown.param, shown.message) == ("messages[2].content", "messages[2].content: no")


def test_tokens_at_fault_have_vllms_name() -> None:
    with pytest.raises(errors.RequestError) as refused:
        vllm.DETOKENIZE.parse(b'{"model": "m", "tokens": [-1]}', {}, "r")
    assert refused.value.error.param == "tokens[0]"
    call = vllm.DETOKENIZE.parse(b'{"model": "m", "tokens": [5]}', {}, "r")
    shown = call.named(http_errors.from_error(errors.invalid_field("token_ids[0]", "no").error))
    assert (shown.param, shown.message) == ("tokens[0]", "tokens[0]: no")
