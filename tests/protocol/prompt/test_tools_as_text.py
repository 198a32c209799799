"""A template that has no place for tools gets them, calls and results as text, each once and in its place."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.protocol.prompt.special_tokens import SpecialTokens
from tokenbus.protocol.prompt.template import ChatTemplate, to_json
from tokenbus.protocol.prompt.tools_as_text import as_text
from tokenbus.protocol.wire.messages import ChatMessage

PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "description": "of a city"}}
USER = ChatMessage(role="user", content="Oslo?")


def call(number: int) -> dict[str, Any]:
    return {"id": f"c{number}", "function": {"name": "weather", "arguments": json.dumps({"city": f"C{number}"})}}


def written(number: int) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "C{number}"}}}}\n</tool_call>'


def result(number: int) -> ChatMessage:
    return ChatMessage(role="tool", content=f"sun {number}", tool_call_id=f"c{number}")


def rendered(source: str, conversation: list[ChatMessage], tools: list[dict[str, Any]] | None = None) -> str:
    (text,) = ChatTemplate(source, SpecialTokens({}), "", "").render(conversation, None, tools)
    assert isinstance(text, str)
    return text


def test_tools_are_described_in_the_system_message() -> None:
    alone = rendered(PLAIN, [USER], [TOOL])
    assert alone.startswith("[system]These functions can be called")
    assert '{"name": "weather", "description": "of a city", "parameters": ' in alone
    assert alone.endswith("</tool_call>[user]Oslo?[assistant]")
    with_system = rendered(PLAIN, [ChatMessage(role="system", content="Be kind."), USER], [TOOL])
    assert with_system.startswith("[system]Be kind.\n\nThese functions")
    assert with_system.count("[system]") == 1


def test_a_template_without_system_messages_has_them_in_the_first_of_the_user() -> None:
    text = rendered(ALTERNATING, [USER], [TOOL])
    assert text.startswith("[user]These functions can be called")
    assert text.endswith("\n\nOslo?")


def test_calls_and_results_are_text_of_the_assistant_and_of_the_user() -> None:
    two = ChatMessage(role="assistant", content="I look.", tool_calls=[call(1), call(2)])
    text = rendered(PLAIN, [USER, two, result(1), result(2)])
    assert text == (
        f"[user]Oslo?[assistant]I look.\n{written(1)}\n{written(2)}"
        "[user]<tool_response>\nsun 1\n</tool_response>\n<tool_response>\nsun 2\n</tool_response>[assistant]"
    )


def test_roles_alternate_still_if_the_user_speaks_after_a_result() -> None:
    asked = ChatMessage(role="assistant", tool_calls=[call(1)])
    text = rendered(ALTERNATING, [USER, asked, result(1), ChatMessage(role="user", content="And?")], [TOOL])
    assert text.endswith(f"[assistant]{written(1)}[user]<tool_response>\nsun 1\n</tool_response>\n\nAnd?")


@pytest.mark.parametrize(
    "source", [PLAIN + "{{ tools }}", PLAIN + "{{ messages[0].tool_calls }}", PLAIN + "{{ functions }}"]
)
def test_a_template_that_reads_tools_or_calls_is_left_to_write_them_itself(source: str) -> None:
    assert "These functions can be called" not in rendered(source, [USER], [TOOL])


def test_a_conversation_without_tools_is_as_it_was() -> None:
    assert rendered(PLAIN, [USER]) == "[user]Oslo?[assistant]"


ROLES = st.lists(st.sampled_from(["user", "assistant", "call", "tool"]), max_size=8)


@given(ROLES, st.booleans(), st.booleans())
def test_nothing_that_was_said_is_lost_or_said_twice(roles: list[str], takes_system: bool, has_tools: bool) -> None:
    conversation = [
        {
            "role": "assistant",
            "content": f"<{number}>",
            "tool_calls": [{"function": {"name": f"f{number}", "arguments": {}}}],
        }
        if role == "call"
        else {"role": role, "content": f"<{number}>"}
        for number, role in enumerate(roles)
    ]
    tools = [TOOL] if has_tools else []
    plain = as_text(conversation, tools, to_json, takes_system=takes_system)
    text = "".join(message["content"] for message in plain)
    assert [text.count(f"<{number}>") for number in range(len(roles))] == [1] * len(roles)
    assert all(text.count(f'"f{number}"') == 1 for number, role in enumerate(roles) if role == "call")
    assert text.count('"weather"') == has_tools
    assert not any(message["role"] == "tool" or "tool_calls" in message for message in plain)
