"""Special tokens are meant where the template writes them, and never where a user did."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenbus.protocol.prompt.special_tokens import Marks, SpecialTokens
from tokenbus.protocol.prompt.template import ChatTemplate
from tokenbus.protocol.wire import errors, limits
from tokenbus.protocol.wire.messages import ChatMessage, ContentPart

IDS = {"<|im_start|>": 1, "<|im_end|>": 2, "<s>": 3, "</s>": 4, "<think>": 5, "<|im_end|>x": 6}
TEXT_OF = {token_id: text for text, token_id in IDS.items()}
SPECIAL = SpecialTokens(IDS)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}\n<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIEROGLYPHS = [chr(code) for code in range(0x13000, 0x13400)]
"""Where the marks are taken from."""
MARKS = Marks(HIEROGLYPHS[0], HIEROGLYPHS[1])
FRAGMENTS = st.lists(
    st.sampled_from(
        [*IDS, "<", "<|", "|>", ">", "<|im_", "im_", "end|>", "start|>", "s>", "<s", "/", "x", " ", "\n", "é", "think>"]
        + ["\U00013000", "\U00013001", "\U000133ff", "\U0001f600"]
    ),
    max_size=6,
).map("".join)


def render(
    source: str, content: str = "hi", role: str = "user", arguments: dict[str, Any] | None = None
) -> list[str | int]:
    template = ChatTemplate(source, SPECIAL, "<s>", "</s>")
    return template.render([ChatMessage(role=role, content=content)], arguments)


def text_of(pieces: list[str | int]) -> str:
    """Returns the prompt with its special tokens written out."""
    return "".join(TEXT_OF[piece] if isinstance(piece, int) else piece for piece in pieces)


def ids_in(pieces: list[str | int]) -> list[int]:
    return [piece for piece in pieces if isinstance(piece, int)]


def refusal(source: str, content: str = "hi", arguments: dict[str, Any] | None = None) -> errors.Error:
    template = ChatTemplate(source, SPECIAL, "<s>", "</s>")
    with pytest.raises(errors.RequestError) as caught:
        template.render([ChatMessage(role="user", content=content)], arguments)
    error = caught.value.error
    assert (error.code, error.param) == (errors.Code.INVALID_REQUEST, "messages")
    return error


# Special tokens


def test_the_special_tokens_of_the_template_are_tokens_and_the_rest_is_text() -> None:
    assert render(CHATML) == [1, "user\nhi\n", 2, "\n", 1, "assistant\n"]


@pytest.mark.parametrize("token", IDS)
def test_a_special_token_in_user_text_is_text(token: str) -> None:
    pieces = render(CHATML, content=f"a{token}b{token}{token}")
    assert pieces == [1, f"user\na{token}b{token}{token}\n", 2, "\n", 1, "assistant\n"]


@given(st.lists(st.tuples(FRAGMENTS, FRAGMENTS), min_size=1, max_size=3))
@settings(max_examples=200)
def test_role_and_content_add_no_token_and_come_out_unchanged(turns: list[tuple[str, str]]) -> None:
    conversation = [ChatMessage(role=role, content=content) for role, content in turns]
    pieces = ChatTemplate(CHATML, SPECIAL, "<s>", "</s>").render(conversation)
    assert ids_in(pieces) == [1, 2] * len(turns) + [1]
    written = "".join(f"<|im_start|>{role}\n{content}\n<|im_end|>\n" for role, content in turns)
    assert text_of(pieces) == written + "<|im_start|>assistant\n"


@given(FRAGMENTS, FRAGMENTS, FRAGMENTS)
@settings(max_examples=200)
def test_texts_put_together_by_the_template_make_no_token(one: str, two: str, three: str) -> None:
    pieces = render("{{ one }}{{ two }}{{ three }}", arguments={"one": one, "two": two, "three": three})
    assert ids_in(pieces) == []
    assert text_of(pieces) == one + two + three


@pytest.mark.parametrize("token", IDS)
def test_a_special_token_split_anywhere_over_two_texts_makes_no_token(token: str) -> None:
    for place in range(len(token) + 1):
        pieces = render("{{ one }}{{ two }}", arguments={"one": token[:place], "two": token[place:]})
        assert pieces == [token]


@pytest.mark.parametrize("token", IDS)
def test_a_special_token_that_a_user_began_is_not_completed_by_the_template(token: str) -> None:
    for place in range(1, len(token)):
        pieces = render("{{ messages[0].content }}" + token[place:], content=token[:place])
        assert text_of(pieces) == token
        assert ids_in(pieces) == []


@given(FRAGMENTS)
@settings(max_examples=200)
def test_arguments_add_no_token_wherever_they_nest(text: str) -> None:
    arguments = {"flat": text, "deep": {"list": [text, {"text": text}], "number": 7, "none": None, "true": True}}
    source = "{{ flat }}<s>{{ deep.list[0] }}<s>{{ deep.list[1].text }}<s>{{ deep.number }}"
    pieces = render("\n" + source.replace("<s>", "\n<s>"), arguments=arguments)
    assert ids_in(pieces) == [3, 3, 3]
    assert text_of(pieces) == f"\n{text}\n<s>{text}\n<s>{text}\n<s>7"


@given(FRAGMENTS)
@settings(max_examples=100)
def test_values_in_json_add_no_token(text: str) -> None:
    conversation = [
        ChatMessage(role="assistant", tool_calls=[{"function": {"name": text or "f", "arguments": {"a": [text]}}}])
    ]
    call = "{{ call.function.name }}\n{{ call.function | tojson }}\n"
    source = "{% for call in messages[0].tool_calls %}" + call + "{% endfor %}<s>"
    pieces = ChatTemplate(source, SPECIAL, "", "").render(conversation)
    assert ids_in(pieces) == [3]
    quoted, name = text.replace("\n", "\\n"), (text or "f").replace("\n", "\\n")
    assert text_of(pieces) == f'{text or "f"}\n{{"name": "{name}", "arguments": {{"a": ["{quoted}"]}}}}\n<s>'


@given(FRAGMENTS)
@settings(max_examples=200)
def test_what_a_user_wrote_last_does_not_take_the_next_token_away_from_the_template(content: str) -> None:
    pieces = render("{{ messages[0].content }}</s>", content=content)
    assert ids_in(pieces) == [4]
    assert text_of(pieces) == content + "</s>"


def test_a_message_that_ends_in_a_less_than_sign_ends_like_any_other() -> None:
    assert render("{{ messages[0].content }}<|im_end|>\n", content="is 1 <") == ["is 1 <", 2]


@pytest.mark.parametrize("source", ["{{ extra | tojson }}", "{% for key in extra %}{{ key }}{% endfor %}"])
@pytest.mark.parametrize("token", IDS)
def test_keys_add_no_token(source: str, token: str) -> None:
    pieces = render(source, arguments={"extra": {token: 1}})
    assert ids_in(pieces) == []
    assert token in text_of(pieces)


@pytest.mark.parametrize("source", ["{{ extra }}", "{{ extra | string }}", "{{ extra | list }}"])
def test_lists_and_maps_printed_as_they_are_add_no_token(source: str) -> None:
    pieces = render(source, arguments={"extra": ["<|im_end|>"]})
    assert pieces == ["['<|im_end|>']"]


def test_a_message_keeps_its_fields_also_if_a_special_token_begins_like_their_names_end() -> None:
    special = SpecialTokens({"eop": 8, "tools": 9})  # ChatGLM has such tokens
    template = ChatTemplate("{{ messages[0].role }}: {{ messages[0].content }} {{ extra.type }}", special, "", "")
    pieces = template.render([ChatMessage(role="user", content="hi")], {"extra": {"type": "function"}})
    assert pieces == ["user: hi function"]


def test_a_text_cut_before_a_special_token_does_not_take_the_next_token_away_from_the_template() -> None:
    source = "{{ messages[0].content.split('<think>')[0] }}<think>"
    assert render(source, content="why<think>x") == ["why", 5]


def test_the_template_s_own_text_may_make_a_token_of_pieces() -> None:
    assert render("{{ '<|im_' ~ 'end|>' }}") == [2]


def test_the_longest_special_token_at_a_place_is_the_one() -> None:
    assert render("<|im_end|>x<|im_end|>") == [6, 2]


def test_bos_and_eos_are_tokens_and_can_not_be_replaced_by_arguments() -> None:
    arguments = {"bos_token": "<think>", "eos_token": "evil"}
    assert render("{{ bos_token }}a{{ eos_token }}", arguments=arguments) == [3, "a", 4]


def test_a_model_without_special_tokens_has_only_text() -> None:
    template = ChatTemplate("<s>{{ messages[0].content }}", SpecialTokens({}), "", "")
    assert template.render([ChatMessage(role="user", content="<|im_end|>")]) == ["<s><|im_end|>"]


def test_an_empty_special_token_is_no_special_token() -> None:
    assert SpecialTokens({"": 1, "<s>": 3}).ids == {"<s>": 3}
    assert SpecialTokens({"": 1, "<s>": 3}).split("a<s>", MARKS) == ["a", 3]


# Marks


@pytest.mark.parametrize("character", [HIEROGLYPHS[0], HIEROGLYPHS[1], HIEROGLYPHS[-1]])
def test_marks_in_user_text_come_out_as_they_went_in(character: str) -> None:
    content = f"{character}<|im_end|>{character}"
    assert render(CHATML, content=content) == [1, f"user\n{content}\n", 2, "\n", 1, "assistant\n"]


def test_three_hieroglyphs_must_be_left_to_mark_with() -> None:
    content = "<s>".join(HIEROGLYPHS[:-3])
    assert render("{{ messages[0].content }}", content=content) == [content]
    more = "".join(HIEROGLYPHS[:-2])
    assert "hieroglyph" in refusal("{{ messages[0].content }}", content=more).message
    refusal("{{ messages[0].content }}", content=content, arguments={"extra": [{HIEROGLYPHS[-1]: 1}]})


def test_marks_in_keys_come_out_as_they_went_in() -> None:
    pieces = render("{{ extra | tojson }}", arguments={"extra": {"a\U00013000b": 1}})
    assert pieces == ['{"a\U00013000b": 1}']


# The template language


@pytest.mark.parametrize("content", ["hi", "  hi \n", "\n<|im_end|>  ", " <| ", "  <"])
def test_trim_works_as_if_nothing_were_guarded(content: str) -> None:
    assert render("[{{ messages[0].content | trim }}]", content=content) == [f"[{content.strip()}]"]
    assert render("[{{ messages[0].content.strip() }}]", content=content) == [f"[{content.strip()}]"]


def test_lines_that_hold_only_a_block_leave_nothing_behind() -> None:
    assert render("  {% if true %}\na\n  {% endif %}\nb") == ["a\nb"]


def test_loops_may_be_left_and_continued() -> None:
    skip, leave = "{% if i == 1 %}{% continue %}{% endif %}", "{% if i == 3 %}{% break %}{% endif %}"
    source = "{% for i in range(9) %}" + skip + leave + "{{ i }}{% endfor %}"
    assert render(source) == ["02"]


def test_json_is_not_escaped_for_html_and_keeps_its_letters() -> None:
    source = "{{ extra | tojson }} {{ extra | tojson(indent=1) }}"
    assert render(source, arguments={"extra": {"a": "<é&'>"}}) == ['{"a": "<é&\'>"} {\n "a": "<é&\'>"\n}']


def test_nothing_is_escaped_for_html() -> None:
    assert render("{{ messages[0].content }}", content="<b>&amp;\"'") == ["<b>&amp;\"'"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (None, "assistant"),
        ({}, "assistant"),
        ({"add_generation_prompt": False}, ""),
        ({"thinking": True}, "assistant!"),
    ],
)
def test_arguments_are_variables_of_the_template(arguments: dict[str, Any] | None, expected: str) -> None:
    source = "{% if add_generation_prompt %}assistant{% endif %}{% if thinking %}!{% endif %}"
    assert text_of(render(source, arguments=arguments)) == expected


def test_the_parts_of_a_content_are_one_text_to_the_template_and_make_no_token() -> None:
    parts = [
        ContentPart(type="text", text="<|im_"),
        ContentPart(type="text", text="end|>"),
        ContentPart(type="text", text=""),
    ]
    template = ChatTemplate("{{ messages[0].content }}\n<s>", SPECIAL, "", "")
    assert template.render([ChatMessage(role="user", content=parts)]) == ["<|im_end|>\n", 3]


def test_a_message_has_only_the_fields_it_was_given_and_always_a_content() -> None:
    source = "{% for message in messages %}{{ message | list | sort | join(',') }};{% endfor %}{# tool_calls #}"
    conversation = [
        ChatMessage(role="assistant", tool_calls=[{"id": "1", "function": {"name": "f"}}]),
        ChatMessage(role="tool", content="42", name="f", tool_call_id="1"),
    ]
    pieces = ChatTemplate(source, SPECIAL, "", "").render(conversation)
    assert pieces == ["content,role,tool_calls;content,name,role,tool_call_id;"]


def test_what_the_template_raises_is_told_to_the_client() -> None:
    error = refusal("{{ raise_exception('roles must alternate') }}")
    assert error.message.endswith("roles must alternate")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.datetime }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ '{0.__class__}'.format_map({'0': 1}) }}",
        "{{ [1] | map(attribute='__class__.__mro__') | list }}",
        "{{ ([1] | map('attr', '__class__') | list | first).__mro__ }}",
        "{% set own = [messages] %}{{ own.sort(key='{0.__class__.__mro__}'.format) }}{{ own[0].__class__.__name__ }}",
        "{{ messages.append.__self__.append }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ joiner.mro() }}",
        "{{ lipsum.__globals__.os }}",
        "{% set cycler.next = 1 %}",
        "{% set messages.extra = 1 %}",
        "{% set own = [] %}{{ own.append(own) }}{{ own | tojson }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% include 'other' %}",
    ],
)
def test_a_template_can_not_leave_its_sandbox(source: str) -> None:
    refusal(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ nothing.at.all }}",
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{{ [1, 'a'] | sort }}",
        "{{ 'a' + 1 }}",
        "{{ range | tojson }}",
        "{{ 'a'.encode('no such encoding') }}",
        "{{ messages() }}",
        "{{ strftime_now(1) }}",
    ],
)
def test_a_template_that_fails_is_the_fault_of_the_request(source: str) -> None:
    refusal(source)


@pytest.mark.parametrize("source", ["{{ cycler() }}", "{{ 'a' | truncate(0) }}", "{{ 'a' * times }}"])
def test_a_template_that_fails_in_another_way_is_the_fault_of_the_request_too(source: str) -> None:
    refusal(source, arguments={"times": 10**15})


@pytest.mark.parametrize(
    "source", ["{{ x }", "{% for %}", "{% endif %}", "{{ 1 | no_such_filter }}", "{% no_such_tag %}"]
)
def test_a_malformed_template_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="malformed"):
        ChatTemplate(source, SPECIAL, "", "")


@pytest.mark.parametrize(
    "source",
    ["{{" + "(" * 2_000 + "1" + ")" * 2_000 + "}}", "{% break %}", "{% if x %}" * 150 + "{% endif %}" * 150],
    ids=["parentheses", "break", "ifs"],
)
def test_a_template_that_python_can_not_compile_is_refused_like_a_malformed_one(source: str) -> None:
    with pytest.raises(ValueError, match="malformed"):
        ChatTemplate(source, SPECIAL, "", "")


def test_a_template_may_be_as_large_as_the_limit_and_not_one_byte_larger() -> None:
    largest = "é" * (limits.MAX_TEMPLATE_BYTES // 2)
    assert render(largest) == [largest]
    with pytest.raises(ValueError, match=str(limits.MAX_TEMPLATE_BYTES)):
        ChatTemplate(largest + "x", SPECIAL, "", "")


def test_the_same_template_renders_one_conversation_after_another() -> None:
    template = ChatTemplate(CHATML, SPECIAL, "<s>", "</s>")
    for content in itertools.islice(itertools.cycle(["a", "<|im_end|>", "\U00013000"]), 6):
        pieces = template.render([ChatMessage(role="user", content=content)])
        assert pieces == [1, f"user\n{content}\n", 2, "\n", 1, "assistant\n"]


# What one rendering leaves to the next

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}


@pytest.mark.parametrize(
    "change",
    [
        "{{ messages.append(messages[0]) }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0].pop('role') }}",
        "{{ tools.append(1) }}",
        "{{ tools[0].function.parameters.properties.clear() }}",
        "{{ extra.deep.append(1) }}",
        "{{ extra.update(new=1) }}",
        "{{ dict.update(extra, new=1) }}",
        "{{ constant.append(1) }}",
        "{% set range = 1 %}{% set dict = 2 %}{% set strftime_now = 3 %}{% set raise_exception = 4 %}",
        "{% set messages = [] %}{% set tools = [] %}{% set extra = {} %}{% set bos_token = 'x' %}",
        "{% macro defaults(own=[]) %}{{ own.append(1) }}{% endmacro %}{{ defaults() }}",
    ],
)
def test_what_a_template_changes_is_not_seen_by_the_next_request_nor_by_its_sender(change: str) -> None:
    show = (
        "{% macro with_default(own=[]) %}{{ own.append(1) }}{{ own }}{% endmacro %}"
        "{{ messages }}{{ tools }}{{ extra }}{{ constant }}{{ bos_token }}{{ range(2) | list }}{{ dict(a=1) }}"
        "{{ with_default() }}{{ range }}{{ cycler(1).next() }}{{ joiner(1)() }}{{ namespace(a=1).a }}"
    )
    source = (
        "{% set constant = [0, {'a': [1]}] %}{% if change %}"
        + change
        + "{% endif %}{% if show %}"
        + show
        + "{% endif %}"
    )
    template = ChatTemplate(source, SPECIAL, "<s>", "</s>")
    conversation, extra, tools = [ChatMessage(role="user", content="hi")], {"deep": [1]}, [TOOL]

    def rendered(**switches: bool) -> list[str | int]:
        return template.render(conversation, {"extra": extra} | switches, tools)

    before = rendered(show=True)
    rendered(change=True)
    assert rendered(show=True) == before
    assert (extra, tools) == ({"deep": [1]}, [TOOL])


# Tools


@given(FRAGMENTS)
@settings(max_examples=100)
def test_the_texts_of_tools_add_no_token(text: str) -> None:
    properties = {text: {"type": "string", "description": text, "enum": [text]}}
    tool = {
        "type": "function",
        "function": {"name": "f", "description": text, "parameters": {"properties": properties}},
    }
    for tojson in ("tojson", "tojson(ensure_ascii=true)", "tojson(indent=2, sort_keys=true)"):
        template = ChatTemplate(
            "{{ tools[0].function.description }}\n{{ tools | " + tojson + " }}\n<s>", SPECIAL, "", ""
        )
        assert ids_in(template.render([ChatMessage(role="user", content="hi")], None, [tool])) == [3]


def test_tools_are_a_variable_of_the_template_that_is_absent_without_them() -> None:
    source = (
        "{% if tools is defined %}{{ tools | map(attribute='function') | map(attribute='name') | list }}{% endif %}."
    )
    template = ChatTemplate(source, SPECIAL, "", "")
    conversation = [ChatMessage(role="user", content="hi")]
    assert template.render(conversation, None, [TOOL]) == ["['f']."]
    assert template.render(conversation, None, []) == ["."]
    assert template.render(conversation) == ["."]


def test_a_tool_has_a_description_and_parameters_also_if_it_was_given_none() -> None:
    template = ChatTemplate("{{ tools | tojson }}", SPECIAL, "", "")
    tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": None}}]
    assert template.render([ChatMessage(role="user", content="hi")], None, tools) == [
        '[{"type": "function", "function": {"name": "f", "description": "", '
        '"parameters": {"type": "object", "properties": {}}}}]'
    ]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{{ extra | tojson }}", '{"b": "é", "a": [1, 2]}'),
        ("{{ extra | tojson(ensure_ascii=true) }}", '{"b": "\\u00e9", "a": [1, 2]}'),
        ("{{ extra | tojson(ensure_ascii=False) }}", '{"b": "é", "a": [1, 2]}'),
        ("{{ extra | tojson(sort_keys=true) }}", '{"a": [1, 2], "b": "é"}'),
        ("{{ extra | tojson(separators=(',', ':')) }}", '{"b":"é","a":[1,2]}'),
        ("{{ extra | tojson(separators=[',', ':'], indent=0) }}", '{\n"b":"é",\n"a":[\n1,\n2\n]\n}'),
        ("{{ extra.a | map('string') | tojson }}", '["1", "2"]'),
    ],
)
def test_json_is_written_as_the_template_asks(written: str, expected: str) -> None:
    assert render(written, arguments={"extra": {"b": "é", "a": [1, 2]}}) == [expected]


def test_what_is_marked_as_generated_is_written_like_the_rest_and_has_its_own_variables() -> None:
    source = (
        "{% set a = 1 %}[{% generation %}{% set a = 2 %}{{ a }}{{ messages[0].content }}{% endgeneration %}]{{ a }}"
    )
    assert render(source) == ["[2hi]1"]


def test_a_template_may_ask_for_tools_and_time_by_firefunction_s_names() -> None:
    template = ChatTemplate("{{ functions }} {{ datetime[:2] }}", SPECIAL, "", "")
    (text,) = template.render([ChatMessage(role="user", content="hi")], None, [TOOL])
    assert str(text).startswith('[\n    {\n        "name": "f"')
    assert str(text).endswith("] 20")


# Messages that are continued


def continued(source: str, content: str | list[ContentPart], **fields: Any) -> list[str | int]:
    said = [ChatMessage(role="user", content="hi"), ChatMessage(role="assistant", content=content, **fields)]
    return ChatTemplate(source, SPECIAL, "<s>", "</s>").render(said, continues=True)


TRIMMING = CHATML.replace("message.content", "message.content | trim")


@pytest.mark.parametrize("source", [CHATML, TRIMMING], ids=["as it is", "trimmed"])
@pytest.mark.parametrize("text", ["The", "The ", "a\n\n", "<|im_end|>", "ends like <|im", "\U00013000 \U00013002"])
def test_a_prompt_that_is_continued_ends_with_the_text_of_the_last_message(source: str, text: str) -> None:
    pieces = continued(source, text)
    assert ids_in(pieces) == [1, 2, 1]
    assert text_of(pieces).endswith(f"assistant\n{text}")


def test_text_parts_are_continued_like_their_text() -> None:
    parts = [ContentPart(type="text", text="The "), ContentPart(type="text", text="end")]
    assert continued(CHATML, parts) == continued(CHATML, "The end")


@pytest.mark.parametrize(
    "source",
    [
        "{% for message in messages[:-1] %}{{ message.content }}{% endfor %}",
        "{% for message in messages + messages %}{{ message.content }}{% endfor %}",
        "{% for message in messages %}{{ message.content[-3:] }}{% endfor %}",
        "{% for message in messages %}{{ message.content | upper }}{% endfor %}",
    ],
    ids=["left out", "twice", "truncated", "changed"],
)
def test_a_template_that_does_not_write_the_last_message_as_it_is_cant_continue_it(source: str) -> None:
    with pytest.raises(errors.RequestError) as caught:
        continued(source, "some text")
    assert (caught.value.error.code, caught.value.error.param) == (errors.Code.UNSUPPORTED, "continue_final_message")
