"""Items become messages: those of the assistant that follow each other become one."""

from typing import Any

from tokenbus.gateway.openai.responses import items
from tokenbus.gateway.openai.responses.body import InputContentPart, InputItem
from tokenbus.gateway.openai.responses.items import Conversation
from tokenbus.protocol.wire.messages import ChatMessage

SUMMARY = [InputContentPart(type="summary_text", text="hm")]
USER = InputItem(role="user", content="hi")
CALL = InputItem(type="function_call", call_id="c1", name="f", arguments='{"a": 1}')
RESULT = InputItem(type="function_call_output", call_id="c1", output="ok")


def messages_of(*items: InputItem) -> list[ChatMessage]:
    conversation = Conversation()
    for index, item in enumerate(items):
        conversation.add(item, f"input[{index}]")
    conversation.end()
    assert len(conversation.paths) == len(conversation.messages)
    return conversation.messages


def reasoning(text: str, **fields: Any) -> InputItem:
    return InputItem(type="reasoning", content=[InputContentPart(type="reasoning_text", text=text)], **fields)


def said(text: str) -> InputItem:
    return InputItem(type="message", role="assistant", content=[InputContentPart(type="output_text", text=text)])


def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_message_may_be_a_text_or_parts_with_or_without_its_type() -> None:
    parts = [InputContentPart(type="input_text", text="a"), InputContentPart(type="text", text="b")]
    assert messages_of(
        USER,
        InputItem(type="message", role="developer", content=parts),
        InputItem(role="assistant", content=[InputContentPart(type="refusal", refusal="no")]),
    ) == [
        ChatMessage(role="user", content="hi"),
        ChatMessage(role="developer", content="ab"),
        ChatMessage(role="assistant", content="no"),
    ]


def test_reasoning_text_and_calls_of_one_answer_are_one_message() -> None:
    other = InputItem(type="function_call", call_id="c2", name="g", arguments="{}")
    assert messages_of(USER, reasoning("hm"), said("I look."), CALL, other, RESULT) == [
        ChatMessage(role="user", content="hi"),
        ChatMessage(
            role="assistant",
            content="I look.",
            reasoning_content="hm",
            tool_calls=[call("c1", "f", '{"a": 1}'), call("c2", "g", "{}")],
        ),
        ChatMessage(role="tool", content="ok", tool_call_id="c1"),
    ]


def test_calls_alone_have_no_content_and_reasoning_alone_an_empty_one() -> None:
    assert messages_of(CALL, RESULT, reasoning("hm"), USER) == [
        ChatMessage(role="assistant", tool_calls=[call("c1", "f", '{"a": 1}')]),
        ChatMessage(role="tool", content="ok", tool_call_id="c1"),
        ChatMessage(role="assistant", content="", reasoning_content="hm"),
        ChatMessage(role="user", content="hi"),
    ]


def test_several_texts_or_reasonings_in_a_row_are_paragraphs() -> None:
    assert messages_of(reasoning("a"), said("b"), reasoning("c"), said("d")) == [
        ChatMessage(role="assistant", content="b\n\nd", reasoning_content="a\n\nc")
    ]


def test_reasoning_comes_back_by_its_content_or_as_we_have_packed_it_and_that_of_others_is_left_out() -> None:
    packed = items.pack("größer")
    for item, kept in (
        (InputItem(type="reasoning", encrypted_content=packed), "größer"),
        (InputItem(type="reasoning", content=[], encrypted_content=packed), "größer"),
        (reasoning("content", encrypted_content=packed), "content"),
        (InputItem(type="reasoning", encrypted_content="gAAAAABo"), None),
        (InputItem(type="reasoning", encrypted_content="tokenbus.1.*"), None),
        (InputItem(type="reasoning", encrypted_content="tokenbus.1./w=="), None),
    ):
        assert messages_of(item, said("a")) == [ChatMessage(role="assistant", content="a", reasoning_content=kept)]


def test_a_custom_call_is_that_of_its_function_and_a_namespace_is_in_front_of_the_name() -> None:
    custom = InputItem(type="custom_tool_call", call_id="c1", name="patch", input='say "hö"\n')
    output = InputItem(
        type="custom_tool_call_output", call_id="c1", output=[InputContentPart(type="input_text", text="ok")]
    )
    spaced = InputItem(type="function_call", call_id="c2", name="f", namespace="crm", arguments="{}")
    assert messages_of(custom, output, spaced) == [
        ChatMessage(role="assistant", tool_calls=[call("c1", "patch", '{"input": "say \\"hö\\"\\n"}')]),
        ChatMessage(role="tool", content="ok", tool_call_id="c1"),
        ChatMessage(role="assistant", tool_calls=[call("c2", "crm__f", "{}")]),
    ]


def test_an_item_that_only_offers_tools_is_no_message() -> None:
    assert messages_of(InputItem(type="additional_tools", role="developer", tools=[]), USER) == [
        ChatMessage(role="user", content="hi")
    ]


def test_a_summary_is_the_reasoning_if_a_client_has_kept_nothing_else_of_it() -> None:
    (message,) = messages_of(InputItem(type="reasoning", summary=SUMMARY))
    assert message.reasoning_content == "hm"
    (message,) = messages_of(reasoning("all of it", summary=SUMMARY))
    assert message.reasoning_content == "all of it"
