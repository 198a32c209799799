"""The input of a custom tool is read out of the arguments of a call while these grow."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.gateway.openai.responses.tools import CustomInput, arguments_of, input_of

INPUTS = ["", "a", 'line\n\t"quoted" \\ back/slash', "Grüße 😀", "\x00\x1f", "}", '"}']


def fed(*pieces: str) -> list[str]:
    """Returns the text that each piece adds, and that the end adds."""
    read = CustomInput()
    added = [*(read.feed(piece) for piece in pieces), read.end()]
    assert "".join(added) == read.text
    return added


@pytest.mark.parametrize("text", INPUTS)
@pytest.mark.parametrize("ensure_ascii", [False, True])
def test_an_input_comes_back_however_its_arguments_are_cut(text: str, ensure_ascii: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ensure_ascii)
    assert input_of(arguments) == text
    assert "".join(fed(*arguments)) == text
    for cut in range(len(arguments)):
        assert "".join(fed(arguments[:cut], arguments[cut:])) == text


@given(st.text(max_size=20))
def test_arguments_that_we_write_give_their_input(text: str) -> None:
    assert input_of(arguments_of(text)) == text
    assert json.loads(arguments_of(text)) == {"input": text}


def test_text_is_given_as_it_comes_and_an_escape_when_it_is_whole() -> None:
    assert fed('{ "input" :', ' "ab', "c\\", "n\\ud83d", "\\ude00", "d\\u00", 'fc"', "}") == [
        "",
        "ab",
        "c",
        "\n",
        "😀",
        "d",
        "ü",
        "",
        "",
    ]


def test_half_a_surrogate_pair_is_a_replacement_character() -> None:
    for lone in ('\\ud83d"}', '\\ude00"}', '\\ud83d"}'):
        assert input_of('{"input": "' + lone) == "\ufffd"
    assert input_of('{"input": "\\ud83dx"}') == "\ufffdx"
    assert input_of('{"input": "\\ud83d\\n"}') == "\ufffd\n"
    assert input_of('{"input": "\\ud83d\\u0041"}') == "\ufffdA"
    assert input_of('{"input": "\\ud83d\\ud83d\\ude00"}') == "\ufffd😀"


def test_an_input_that_is_cut_off_ends_where_it_was() -> None:
    assert fed('{"input": "*** Begin', " Patch\\") == ["*** Begin", " Patch", ""]


def test_arguments_of_another_form_are_the_input() -> None:
    assert fed('{"patch": ', '"a"}') == ["", "", '{"patch": "a"}']
