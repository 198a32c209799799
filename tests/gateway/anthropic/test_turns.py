"""Conversations of content blocks become messages of the wire, in an order that templates know."""

from typing import Any

import msgspec
import pytest

from tokenbus.gateway.anthropic.turns import Content, InputMessage, to_turns
from tokenbus.protocol.wire import errors
from tokenbus.protocol.wire.messages import ChatMessage, ContentPart

BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=00001;"


def turns(*conversation: dict[str, Any], system: Any = None) -> list[ChatMessage]:
    return [turn.message for turn in placed(*conversation, system=system)]


def placed(*conversation: dict[str, Any], system: Any = None) -> Any:
    given = msgspec.convert(list(conversation), list[InputMessage])
    return to_turns(None if system is None else msgspec.convert(system, Content), given)


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}


def user(*blocks: dict[str, Any] | str) -> dict[str, Any]:
    return {"role": "user", "content": [text(one) if isinstance(one, str) else one for one in blocks]}


def assistant(*blocks: dict[str, Any] | str) -> dict[str, Any]:
    return user(*blocks) | {"role": "assistant"}


def call(call_id: str, **given: object) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "f", "input": given}


def result(call_id: str, content: Any, **fields: object) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def test_text_is_a_string_or_blocks() -> None:
    assert turns({"role": "user", "content": "hello"}) == [ChatMessage(role="user", content="hello")]
    assert turns(user("a", "", "b")) == [ChatMessage(role="user", content="a\n\nb")]


@pytest.mark.parametrize(
    "system",
    ["one\n\ntwo", [text("one"), text("two")], [text(BILLING), text("one"), text("two")], f"{BILLING}\none\n\ntwo"],
    ids=["text", "blocks", "a billing block", "a billing line"],
)
def test_a_system_prompt_is_one_message_without_what_changes_in_each_request(system: Any) -> None:
    assert turns(user("hi"), system=system)[0] == ChatMessage(role="system", content="one\n\ntwo")


def test_only_lines_that_begin_with_the_billing_header_are_left_out() -> None:
    prompt = f"say {BILLING}\n  {BILLING}\nend"
    assert turns(user("hi"), system=prompt)[0].content == f"say {BILLING}\nend"
    assert [one.role for one in turns(user("hi"), system=BILLING)] == ["user"]


def test_system_messages_at_the_beginning_belong_to_the_system_prompt_and_later_ones_to_the_user() -> None:
    early, late = {"role": "system", "content": "two"}, {"role": "system", "content": [text(BILLING), text("three")]}
    assert turns(early, user("hi"), late, assistant("yes"), system="one") == [
        ChatMessage(role="system", content="one\n\ntwo"),
        ChatMessage(role="user", content="hi\n\n<system-reminder>\nthree\n</system-reminder>"),
        ChatMessage(role="assistant", content="yes"),
    ]


def test_results_of_tools_are_messages_of_their_own_before_what_the_user_says() -> None:
    calls = assistant("let me see", call("c1", a=None), call("c2"))
    results = user(result("c1", "one"), result("c2", [text("two"), text("lines")], is_error=True), "and now?")
    functions = [{"name": "f", "arguments": {"a": None}}, {"name": "f", "arguments": {}}]
    assert turns(user("go"), calls, results)[1:] == [
        ChatMessage(
            role="assistant",
            content="let me see",
            tool_calls=[
                {"id": f"c{number}", "type": "function", "function": one} for number, one in enumerate(functions, 1)
            ],
        ),
        ChatMessage(role="tool", tool_call_id="c1", content="one"),
        ChatMessage(role="tool", tool_call_id="c2", content="Error: two\n\nlines"),
        ChatMessage(role="user", content="and now?"),
    ]


def test_a_result_alone_is_no_turn_of_the_user_and_may_be_empty() -> None:
    assert turns(user(result("c1", None)))[0] == ChatMessage(role="tool", tool_call_id="c1", content="")
    assert len(turns(user(result("c1", "x")))) == 1


def test_reasoning_comes_back_whatever_its_signature_unless_it_is_redacted() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "of somebody else"}
    redacted = {"type": "redacted_thinking", "data": "?"}
    assert turns(assistant(thought, redacted, "so")) == [
        ChatMessage(role="assistant", content="so", reasoning_content="hm")
    ]
    (calls,) = turns(assistant(thought, call("c1")))
    assert (calls.content, calls.reasoning_content, len(calls.tool_calls or [])) == (None, "hm", 1)


def test_neighbours_of_one_role_are_one_turn() -> None:
    assert turns(user("a"), user("b"), assistant("c"), assistant("d"), user("e")) == [
        ChatMessage(role="user", content="a\n\nb"),
        ChatMessage(role="assistant", content="c\n\nd"),
        ChatMessage(role="user", content="e"),
    ]


def test_other_blocks_are_parts_that_validation_finds_by_their_place() -> None:
    image = {"type": "image", "source": {"type": "base64", "data": ""}}
    (turn,) = placed(user("a"), user("b", image))
    assert turn.message.content == [
        ContentPart(type="text", text="a"),
        ContentPart(type="text", text="b"),
        ContentPart(type="image"),
    ]
    assert turn.part_paths == ["messages.0.content.0", "messages.1.content.0", "messages.1.content.1"]
    (turn,) = placed(user(result("c1", [image])))
    assert turn.part_paths == ["messages.0.content.0.content.0"]


@pytest.mark.parametrize("block", [{"type": "image"}, {"type": "text"}])
def test_a_system_prompt_is_text(block: dict[str, Any]) -> None:
    with pytest.raises(errors.RequestError) as raised:
        placed(user("hi"), system=[text("a"), block])
    assert raised.value.error.param in ("system.1.type", "system.1.text")
