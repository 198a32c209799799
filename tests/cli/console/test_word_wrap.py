"""Answers on a terminal are broken between words, however they arrive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tokenbus.cli.console.word_wrap import WordWrap

_WORDS = st.text("ab漢。e\u0301🙂", min_size=1, max_size=6)
_TEXTS = st.lists(st.one_of(_WORDS, st.sampled_from([" ", "  ", "\n", "\t", "```", "|", "x" * 30]))).map("".join)


def wrapped(text: str, width: int) -> str:
    wrap = WordWrap()
    return wrap.add(text, width) + wrap.end()


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("one two three", "one two\nthree"),
        ("one two to", "one two to"),  # exactly as long as the line
        ("one two ten four", "one two\nten four"),
        ("one  two  \nthree", "one  two  \nthree"),
        ("one\n\n  two three", "one\n\n  two\nthree"),
        ("a tab\ta word", "a tab\ta\nword"),
    ],
)
def test_a_word_that_the_line_has_no_room_for_begins_the_next_one(text: str, seen: str) -> None:
    assert wrapped(text, 10) == seen


def test_a_word_longer_than_a_line_begins_one_and_is_left_to_the_terminal() -> None:
    assert wrapped("see https://example.org/a/b now okay", 10) == "see\nhttps://example.org/a/b now\nokay"


def test_languages_without_spaces_are_broken_between_characters_but_not_before_a_full_stop() -> None:
    assert wrapped("日本語の文です。", 10) == "日本語の文\nです。"
    assert wrapped("日本語の文。", 10) == "日本語の\n文。"
    assert wrapped("a 👩\u200d💻👩\u200d💻", 9) == "a 👩\u200d💻\n👩\u200d💻"


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint('a long line of code')\n```\n",
        "    an indented line of code",
        "\tan indented line of code",
        "| a | table | of | columns |",
    ],
)
def test_code_and_tables_are_left_as_they_are(text: str) -> None:
    assert wrapped(text, 10) == text


def test_words_are_wrapped_again_behind_code() -> None:
    assert wrapped("```\na long line of code\n```\none two three", 10).endswith("\none two\nthree")


def test_a_terminal_that_has_become_wider_or_narrower_has_the_room_that_it_has() -> None:
    wrap = WordWrap()
    written = wrap.add("one two three four ", 20)
    written += wrap.add("five six ", 40)
    written += wrap.add("seven eight ", 10)
    assert written + wrap.end() == "one two three four five six\nseven\neight "


@given(_TEXTS, st.integers(4, 20), st.data())
def test_how_a_text_arrives_changes_nothing(text: str, width: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(text)))
    wrap = WordWrap()
    assert wrap.add(text[:cut], width) + wrap.add(text[cut:], 0) + wrap.end() == wrapped(text, width)


@given(_TEXTS, st.integers(4, 20))
def test_nothing_but_spaces_is_replaced_by_the_end_of_a_line(text: str, width: int) -> None:
    seen = wrapped(text, width)
    assert "".join(seen.split()) == "".join(text.split())
    if cell_len(max(text.expandtabs(8).split("\n"), key=cell_len)) <= width:
        assert seen == text


@given(st.lists(st.text("ab漢。", min_size=1, max_size=6)), st.integers(12, 30))
def test_no_line_is_longer_than_the_terminal(words: list[str], width: int) -> None:
    assert all(cell_len(line.rstrip(" ")) <= width for line in wrapped(" ".join(words), width).split("\n"))
