"""A chat format is read out of a template, and offered only if the template's own answers are read back with it."""

from typing import Any

import pytest

from tokenbus.protocol.prompt.rendering import PromptPieces
from tokenbus.protocol.prompt.special_tokens import SpecialTokens
from tokenbus.protocol.prompt.template import ChatTemplate
from tokenbus.protocol.wire.messages import ChatMessage
from tokenbus.worker.chat_format import infer as infer_module
from tokenbus.worker.chat_format.infer import infer_format
from tokenbus.worker.chat_format.probe import Render
from tokenbus.worker.contract.chat_format import Calls, ChatFormat, Kind, Reasoning, Values

SPECIAL = {"<|user|>": 1, "<|assistant|>": 2, "<|end|>": 3, "<|call|>": 4, "<|never|>": 5}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}<|end|>{% elif m.role == 'assistant' %}"
    "<|assistant|>{REASONING}{{ m.content }}{% for call in m.tool_calls or [] %}{% set f = call.function %}{CALL}"
    "{% endfor %}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{PROMPT}{% endif %}"
)
THINKING = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
JSON = '<call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</call>'
NAMED = "<|call|>{{ f.name }}#{{ call.id }}:{{ f.arguments | tojson }};"
TAGGED = (
    "<call {{ f.name }}>{% for key, value in f.arguments.items() %}<arg {{ key }}>"
    "{{ value if value is string else value | tojson }}</arg>{% endfor %}</call>"
)


def template(call: str = "", reasoning: str = "", prompt: str = "") -> str:
    return TEMPLATE.replace("{CALL}", call).replace("{REASONING}", reasoning).replace("{PROMPT}", prompt)


def renderer(source: str, special: dict[str, int] = SPECIAL) -> Render:
    made = ChatTemplate(source, SpecialTokens(special), "", "")

    def render(
        conversation: list[ChatMessage], tools: list[dict[str, Any]] | None, variables: dict[str, Any]
    ) -> PromptPieces:
        return made.render(conversation, variables, tools)

    return render


def infer(source: str, known: ChatFormat | None = None) -> ChatFormat | None:
    return infer_format(renderer(source), source, SPECIAL, known)


def calls_of(source: str) -> Calls:
    found = infer(source)
    assert found is not None
    assert found.calls is not None
    return found.calls


# Calls


def test_an_object_with_name_and_arguments() -> None:
    assert calls_of(template(JSON)) == Calls(kind=Kind.JSON, call_open="<call>", call_close="</call>")


def test_a_name_and_then_an_object() -> None:
    assert calls_of(template(NAMED)) == Calls(
        kind=Kind.NAMED, call_open="<|call|>", header="{name}#{id}", name_close=":", call_close=";"
    )


def test_markers_around_each_argument() -> None:
    assert calls_of(template(TAGGED)) == Calls(
        kind=Kind.TAGGED,
        values=Values.TEXT,
        call_open="<call ",
        name_close=">",
        argument_open="<arg ",
        key_close=">",
        value_close="</arg>",
        call_close="</call>",
    )


def test_types_of_arguments() -> None:
    typed = TAGGED.replace("<arg {{ key }}>", '<arg {{ key }} text="{{ value is string }}">')
    found = calls_of(template(typed))
    assert (found.key_close, found.string_type, found.type_close) == (' text="', "True", '">')


def test_python_s_notation() -> None:
    written = (
        "<py>{{ f.name }}({% for key, value in f.arguments.items() %}{{ key }}="
        "{{ \"'\" ~ value ~ \"'\" if value is string else value }}{{ ', ' if not loop.last }}{% endfor %})</py>"
    )
    found = calls_of(template(written))
    assert (found.values, found.name_close, found.key_close) == (Values.PYTHON, "(", "=")


def test_other_names_of_keys_and_an_id() -> None:
    written = (
        '<call>{"function": "{{ f.name }}", "call_id": "{{ call.id }}", "args": {{ f.arguments | tojson }}}</call>'
    )
    found = calls_of(template(written))
    assert (found.name_key, found.arguments_key, found.id_key) == ("function", "args", "call_id")


def test_a_number_that_counts_the_calls() -> None:
    found = calls_of(template(NAMED.replace("#{{ call.id }}", ":{{ loop.index0 }}@")))
    assert (found.header, found.name_close) == ("{name}:{index}", "@:")


def test_a_section_around_all_calls() -> None:
    source = template(
        "{{ '<calls>[' if loop.first }}"
        + JSON.removeprefix("<call>").removesuffix("</call>")
        + "{{ ']</calls>' if loop.last else ', ' }}"
    )
    found = calls_of(source)
    assert (found.section_open, found.separator, found.section_close) == ("<calls>[", ", ", "]</calls>")
    assert (found.call_open, found.call_close) == ("", "")


def test_a_template_that_takes_one_call_has_one_in_an_answer() -> None:
    refusing = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
    assert calls_of(template(refusing + JSON)).parallel is False
    assert calls_of(template(JSON)).parallel is True


def test_ids_of_nine_letters_where_no_others_are_taken() -> None:
    refusing = "{% if call.id | length != 9 %}{{ raise_exception('nine!') }}{% endif %}"
    assert calls_of(template(refusing + JSON)).id_length == 9
    assert calls_of(template(JSON)).id_length == 0


def test_the_markers_that_are_tokens_have_their_ids_and_no_other_token_has() -> None:
    found = infer(template(NAMED))
    assert found is not None
    assert found.tokens == {text: SPECIAL[text] for text in ("<|assistant|>", "<|call|>", "<|end|>")}


def test_the_ends_of_a_turn() -> None:
    found = infer(template(JSON))
    assert found is not None
    assert (found.turn_open, found.turn_close, found.generation_prompt) == ("<|assistant|>", ("<|end|>",), "")


# Reasoning

SWITCH = "{{ '<think>\\n' if enable_thinking | default(true) else '<think>\\n\\n</think>\\n\\n' }}"


def test_reasoning_without_tools() -> None:
    found = infer(template(reasoning=THINKING))
    assert found is not None
    assert found.reasoning == Reasoning(open="<think>\n", close="\n</think>\n\n")
    assert found.calls is None


def test_an_answer_that_begins_inside_the_reasoning_and_the_switch() -> None:
    found = infer(template(JSON, THINKING, SWITCH))
    assert found is not None
    assert found.generation_prompt == "<think>\n"
    assert found.reasoning == Reasoning(open="<think>\n", close="\n</think>\n\n", switch="enable_thinking")
    assert found.calls == Calls(kind=Kind.JSON, call_open="<call>", call_close="</call>")


def test_reasoning_that_the_template_only_removes() -> None:
    source = template(JSON).replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    found = infer(source)
    assert found is not None
    assert found.reasoning == Reasoning(open="<think>", close="</think>")


# What is not offered


@pytest.mark.parametrize(
    "call",
    [
        '<call>{"name": "{{ f.name }}"}</call>',
        '<call>{"arguments": {{ f.arguments | tojson }}}</call>',
        "<call>{{ f.arguments | tojson }} {{ f.name }}</call>",
        '<call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson | tojson }}}</call>',
        "{% if f.arguments %}" + JSON + "{% endif %}",
        "{% if 'probe_function_b' != f.name %}" + JSON + "{% else %}nothing{% endif %}",
        TAGGED.replace("{{ value if", "{{ value | upper if"),
        TAGGED.replace("{{ value if", "{{ value | trim | replace('\n', ' ') if"),
    ],
)
def test_calls_that_are_not_read_back_exactly_are_not_offered(call: str) -> None:
    assert infer(template(call)) is None


def test_a_known_format_is_offered_only_if_it_reads_back() -> None:
    shown = Calls(kind=Kind.JSON, call_open="<call>", call_close="</call>")
    more = Calls(kind=Kind.JSON, call_open="<call>", call_close="</call>", announce="<maybe>")
    other = Calls(kind=Kind.JSON, call_open="<other>", call_close="</other>")
    for known, expected in ((more, more), (other, shown)):
        found = infer(template(JSON), ChatFormat(calls=known))
        assert found is not None
        assert found.calls == expected
        assert found.turn_open == "<|assistant|>"


def test_a_template_that_shows_nothing_has_no_format() -> None:
    assert infer(template()) is None
    assert infer("{{ messages[-1].content }}") is None


def test_a_template_that_has_no_place_for_tools_has_the_calls_that_are_written_for_it() -> None:
    found = infer("{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}[assistant]")
    assert found is not None
    assert found.calls is not None
    assert (found.calls.kind, found.calls.call_open.strip()) == (Kind.JSON, "<tool_call>")
    assert found.calls.call_close.strip() == "</tool_call>"
    assert found.calls.parallel


# Hostile templates


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "",
        "{{ messages }}{{ tools }}",
        "{% for m in messages %}{{ m.content }}{% endfor %}" + "<|call|>" * 5_000,
        template(JSON).replace("<call>", "<|call|>" * 5_000),
        "{{ '{' * 100000 }}{{ messages | tojson }}",
        "{{ '[{' * 5000 }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ '{\"a\":' * 5000 }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c }}{% endfor %}"
        "{% endfor %}",
        "{% if messages | length > 1 %}{{ 1 / 0 }}{% endif %}{{ messages[0].content }}",
        "{{ messages[0].content }}{% for m in messages[1:] %}{{ m.content | reverse }}{% endfor %}",
        "{% for m in messages %}\\d(?P<a>{{ m.content }}[(*{% for c in m.tool_calls or [] %}+{{ c.function.name }}"
        "{{ c.function.arguments | tojson }}){% endfor %}{% endfor %}",
    ],
)
def test_a_hostile_template_has_no_format_and_does_no_harm(source: str) -> None:
    found = infer(source)
    assert found is None or found.calls is None or found.calls.kind is Kind.NAMED


@pytest.mark.parametrize("answer", [[], [7, -1], ["\ud800"], [""], ["probe question" * 9]])
def test_nothing_that_a_renderer_gives_is_an_error(answer: PromptPieces) -> None:
    assert infer_format(lambda *_: answer, "", {}, None) is None


def test_an_exception_leaves_no_format_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise IndexError("a text of no known form")

    monkeypatch.setattr(infer_module, "find_frame", fail)
    told: list[Exception] = []
    assert infer_format(lambda *_: [], "", {}, None, told.append) is None
    assert [repr(error) for error in told] == ["IndexError('a text of no known form')"]


@pytest.mark.parametrize("error", [TimeoutError, RecursionError, MemoryError, ValueError])
def test_a_renderer_that_stops_answering_leaves_no_format(error: type[Exception]) -> None:
    source = template(JSON, prompt=SWITCH)
    asked: list[int] = []

    def limited(most: int) -> Render:
        render = renderer(source)
        asked.clear()

        def answer(
            conversation: list[ChatMessage], tools: list[dict[str, Any]] | None, variables: dict[str, Any]
        ) -> PromptPieces:
            asked.append(1)
            if len(asked) > most:
                raise error
            return render(conversation, tools, variables)

        return answer

    assert infer_format(limited(1_000), source, SPECIAL, None) is not None
    needed = len(asked)
    assert needed <= 40
    for most in range(0, needed, 3):
        assert infer_format(limited(most), source, SPECIAL, None) is None
