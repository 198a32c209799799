"""Past tool calls reach a template complete and in the form that it needs, and mistakes in them are named."""

from typing import Any

import pytest

from tokenbus.protocol.prompt import history
from tokenbus.protocol.prompt.history import AnswerForm, Beside
from tokenbus.protocol.prompt.special_tokens import SpecialTokens
from tokenbus.protocol.prompt.template import ChatTemplate
from tokenbus.protocol.wire import errors, limits
from tokenbus.protocol.wire.messages import ChatMessage, ContentPart

USER = ChatMessage(role="user", content="hi")


def calling(*calls: dict[str, Any], **fields: Any) -> ChatMessage:
    return ChatMessage(role="assistant", tool_calls=list(calls), **fields)


def call(name: str = "f", arguments: object = "{}", **fields: Any) -> dict[str, Any]:
    return fields | {"function": {"name": name, "arguments": arguments}}


def result(content: str = "done", call_id: str | None = None, name: str | None = None) -> ChatMessage:
    return ChatMessage(role="tool", content=content, tool_call_id=call_id, name=name)


def made(*conversation: ChatMessage, **form: Any) -> list[history.MessageDict]:
    return history.message_dicts(list(conversation), AnswerForm(**form))


def refusal(*conversation: ChatMessage) -> errors.Error:
    with pytest.raises(errors.RequestError) as caught:
        made(*conversation)
    assert caught.value.error.code is errors.Code.INVALID_REQUEST
    return caught.value.error


def test_a_call_is_completed_with_id_and_type_and_its_result_with_id_and_name() -> None:
    seen = made(USER, calling(call("f"), call("g")), result("one"), result("two"))
    assert [(one["id"], one["type"], one["function"]["name"]) for one in seen[1]["tool_calls"]] == [
        ("call00000", "function", "f"),
        ("call00001", "function", "g"),
    ]
    assert [(one["tool_call_id"], one["name"]) for one in seen[2:]] == [("call00000", "f"), ("call00001", "g")]


def test_ids_and_names_that_are_given_stay() -> None:
    seen = made(
        USER, calling(call("f", id="x", extra=1), call("g", id="y")), result(call_id="y", name="h"), result(call_id="x")
    )
    assert seen[1]["tool_calls"][0] == {
        "id": "x", "type": "function", "extra": 1, "function": {"name": "f", "arguments": {}},
    }  # fmt: skip
    assert [(one["tool_call_id"], one["name"]) for one in seen[2:]] == [("y", "h"), ("x", "f")]


def test_a_made_id_is_not_one_that_was_given() -> None:
    seen = made(USER, calling(call(id="call00000"), call()))
    assert [one["id"] for one in seen[1]["tool_calls"]] == ["call00000", "call00001"]


def test_a_result_without_an_id_is_for_the_first_call_that_has_none() -> None:
    seen = made(USER, calling(call(id="x"), call(id="y"), call(id="z")), result(call_id="y"), result(), result())
    assert [one["tool_call_id"] for one in seen[2:]] == ["y", "x", "z"]


@pytest.mark.parametrize("arguments", ['{"a": [1, null]}', {"a": [1, None]}])
def test_arguments_become_an_object_or_a_text_as_the_template_needs(arguments: object) -> None:
    def seen(with_objects: bool) -> object:
        return made(calling(call(arguments=arguments)), with_objects=with_objects)[0]["tool_calls"][0]["function"]

    assert seen(True) == {"name": "f", "arguments": {"a": [1, None]}}
    text = arguments if isinstance(arguments, str) else '{"a":[1,null]}'
    assert seen(False) == {"name": "f", "arguments": text}


@pytest.mark.parametrize("arguments", ["", " ", None])
def test_no_arguments_are_an_empty_object(arguments: object) -> None:
    for with_objects, empty in ((True, {}), (False, "{}")):
        seen = made(calling(call(arguments=arguments)), with_objects=with_objects)
        assert seen[0]["tool_calls"][0]["function"]["arguments"] == empty


def test_a_text_of_arguments_may_have_integers_of_any_size() -> None:
    arguments = '{"a": 1000000000000000000000000000000}'
    seen = made(USER, calling(call(arguments=arguments)), with_objects=False)
    assert seen[1]["tool_calls"][0]["function"]["arguments"] == arguments


def test_reasoning_has_all_the_names_that_templates_know() -> None:
    seen = made(calling(call(), reasoning_content="so"))[0]
    assert [seen[name] for name in ("reasoning_content", "reasoning", "thinking")] == ["so"] * 3


@pytest.mark.parametrize("content", [None, "", [], [ContentPart(type="text", text="")]])
@pytest.mark.parametrize("empty_content", ["", None])
def test_calls_without_content_have_the_content_that_the_template_needs(content: Any, empty_content: Any) -> None:
    said = calling(call(), content=content, reasoning_content="so")
    (seen,) = made(said, empty_content=empty_content)
    assert seen["content"] == empty_content
    assert [one["content"] for one in made(ChatMessage(role="assistant", content=content))] == [""]


@pytest.mark.parametrize("reasoning", ["so", "", None])
def test_content_beside_calls_stays_or_ends_the_reasoning_or_goes_before_them(reasoning: str | None) -> None:
    said = calling(call(), content="words", reasoning_content=reasoning)

    def seen(beside: Beside) -> list[tuple[object, object, bool]]:
        found = made(said, beside=beside, empty_content=None)
        return [(one["content"], one.get("thinking"), "tool_calls" in one) for one in found]

    thought = reasoning or None
    assert seen(Beside.SAME_MESSAGE) == [("words", thought, True)]
    assert seen(Beside.REASONING) == [(None, "so\n\nwords" if thought else "words", True)]
    assert seen(Beside.OWN_MESSAGE) == [("words", thought, False), (None, None, True)]


def test_reasoning_is_a_chunk_of_the_content_where_the_template_reads_it_there() -> None:
    thought = {"type": "thinking", "thinking": "so"}
    (seen,) = made(calling(call(), content="words", reasoning_content="so"), thinks_in_content=True)
    assert seen["content"] == [thought, {"type": "text", "text": "words"}]
    (seen,) = made(ChatMessage(role="assistant", reasoning_content="so"), thinks_in_content=True)
    assert seen["content"] == [thought]
    assert "thinking" not in seen


def test_an_empty_reasoning_and_an_empty_list_of_calls_are_none() -> None:
    (seen,) = made(ChatMessage(role="assistant", content="words", reasoning_content="", tool_calls=[]))
    assert seen == {"role": "assistant", "content": "words"}


DEEP = "[" * (limits.MAX_NESTING - 1) + "]" * (limits.MAX_NESTING - 1)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (call(arguments='{"a": 1'), "function.arguments"),
        (call(arguments="[1]"), "function.arguments"),
        (call(arguments="7"), "function.arguments"),
        (call(arguments=[1]), "function.arguments"),
        (call(arguments=7), "function.arguments"),
        (call(arguments='{"a": NaN}'), "function.arguments"),
        (call(arguments='{"a": "\\ud800"}'), "function.arguments"),
        (call(arguments='{"a": ' + "[" * 5_000 + "]" * 5_000 + "}"), "function.arguments"),
        (call(arguments='{"a": [' + DEEP + "]}"), "function.arguments"),
        ({"function": {"arguments": "{}"}}, "function.name"),
        ({"function": {"name": ""}}, "function.name"),
        ({"function": {"name": 7}}, "function.name"),
        ({"function": "f"}, "function"),
        ({}, "function"),
        (call(id=""), "id"),
        (call(id=7), "id"),
    ],
)
def test_a_mistake_in_a_call_is_refused_with_its_message_and_field(bad: dict[str, Any], field: str) -> None:
    error = refusal(USER, calling(call()), result(), calling(call(), bad))
    assert error.param == f"messages[3].tool_calls[1].{field}"
    assert error.message.startswith(f"{error.param}: must be ") or "nested deeper" in error.message


def test_a_result_without_a_call_is_refused() -> None:
    assert refusal(USER, result()).param == "messages[1].tool_call_id"
    assert refusal(USER, calling(call()), result(), result()).param == "messages[3].tool_call_id"
    error = refusal(USER, calling(call(id="x")), result(call_id="y"))
    assert error.message == "messages[2].tool_call_id: no tool call before it has the id 'y'"


# Which form a template needs

SAID = [USER, calling(call(arguments='{"b": "é"}')), result()]
ONE_CALL = "{% for m in messages if m.tool_calls %}{% set f = m.tool_calls[0].function %}{BODY}{% endfor %}"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{{ f.arguments | tojson }}", '{"b": "é"}'),
        ("{% for key in f.arguments %}{{ key }}={{ f.arguments[key] }}{% endfor %}", "b=é"),
        ("{{ f.arguments if f.arguments is string else f.arguments | tojson }}", '{"b": "é"}'),
        ("{{ '<' + f.arguments + '>' }}", '<{"b": "é"}>'),
        ("{{ f.arguments }}", '{"b": "é"}'),
        ("{% if f.arguments is mapping %}{{ raise_exception('a text!') }}{% endif %}{{ f.arguments }}", '{"b": "é"}'),
        ("{{ f.name }}", "f"),
    ],
)
def test_a_template_gets_objects_and_texts_only_where_it_takes_no_objects(body: str, expected: str) -> None:
    template = ChatTemplate(ONE_CALL.replace("{BODY}", body), SpecialTokens({}), "", "")
    for _ in range(2):
        assert template.render(SAID) == [expected]


CALL = "[{{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}]"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param("{{ m.content }}{CALL}", ["{CALL}", "words{CALL}"], id="takes the empty text, prints None"),
        pytest.param("{{ m.content + '' }}{CALL}", ["{CALL}", "words{CALL}"], id="fails without content"),
        pytest.param(
            "{% if m.content is none %}{CALL}{% else %}({{ m.content }}){% endif %}",
            ["{CALL}", "(words){CALL}"],
            id="shows calls only without content",
        ),
        pytest.param(
            "{% if m.tool_calls %}{CALL}{% endif %}{% if m.content is not none %}<|end|>{{ m.content }}{% endif %}",
            ["{CALL}", "{CALL}<|end|>words"],
            id="makes a turn of the empty text",
        ),
        pytest.param(
            "{% if m.content and m.thinking %}{{ raise_exception('one of them!') }}{% endif %}"
            "{{ m.content or m.thinking }}{CALL}",
            ["{CALL}", "so\n\nwords{CALL}"],
            id="takes content or reasoning",
        ),
        pytest.param(
            "{% for one in m.content %}{{ one.thinking or one.text }};{% endfor %}{CALL}",
            ["{CALL}", "so;words;{CALL}"],
            id="takes reasoning as a chunk of the content",
        ),
        pytest.param("{% if not m.content %}{CALL}{% endif %}", ["{CALL}", "{CALL}"], id="never shows both"),
        pytest.param("{{ m.content }}{# m.tool_calls #}", ["", "words"], id="shows no calls"),
    ],
)
def test_a_template_gets_answers_in_the_form_that_it_was_written_for(body: str, expected: list[str]) -> None:
    calls = "{% if m.tool_calls %}" + CALL + "{% endif %}"
    source = "{% for m in messages if m.role == 'assistant' %}" + body.replace("{CALL}", calls) + "{% endfor %}"
    template = ChatTemplate(source, SpecialTokens({"<|end|>": 2}), "", "")
    shown = [
        "".join("<|end|>" if piece == 2 else str(piece) for piece in template.render([USER, answer, result()]))
        for answer in (calling(call()), calling(call(), content="words", reasoning_content="so"))
    ]
    assert shown == [one.replace("{CALL}", "[f {}]") for one in expected]
