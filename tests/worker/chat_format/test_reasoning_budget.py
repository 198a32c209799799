"""The rules of closing reasoning: when, with which tokens, and what is impossible afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.reasoning_vocabulary import KNOWN, ReasoningVocabulary
from tokenbus.worker.chat_format.reasoning_budget import MAX_WAIT, ReasoningBudget, ReasoningCloser, closing_marker

HERMES = ReasoningVocabulary(KNOWN["hermes"])
THINK, CLOSE = HERMES.form.tokens["<think>"], HERMES.form.tokens["</think>"]
GPT_OSS = ReasoningVocabulary(KNOWN["gpt-oss"])


class Written(NamedTuple):
    """The tokens of an answer, and how many of them were forced."""

    tokens: list[int]
    forced: list[int]


def write(budget: ReasoningBudget, model: Sequence[int]) -> Written:
    """Lets a model write these tokens, as far as a budget lets it."""
    written, forced = [], []
    for token_id in model:
        while (must := budget.forced) is not None:
            forced.append(must)
            written.append(must)
            budget.accept(must)
        if token_id not in budget.forbidden:
            written.append(token_id)
            budget.accept(token_id)
    rest = budget.accept_forced(10_000)
    return Written(written + rest, forced + rest)


def write_text(vocabulary: ReasoningVocabulary, budget: ReasoningBudget, text: str) -> str:
    return vocabulary.text(write(budget, vocabulary.tokens(text)).tokens)


def test_reasoning_that_the_prompt_has_opened_is_closed_after_its_tokens() -> None:
    budget = HERMES.budget(5, prompt="<think>\n")
    assert write_text(HERMES, budget, "abcdefg") == "abcde\n</think>\n\nfg"


def test_reasoning_that_the_model_opens_is_closed_after_its_tokens() -> None:
    assert write_text(HERMES, HERMES.budget(4), "<think>\nabcdefg") == "<think>\nabc\n</think>\n\ndefg"


def test_a_budget_of_nothing_closes_reasoning_as_soon_as_it_is_open() -> None:
    assert write_text(HERMES, HERMES.budget(0, prompt="<think>\n"), "ab") == "\n</think>\n\nab"
    assert write_text(HERMES, HERMES.budget(0), "<think>ab") == "<think>\n</think>\n\nab"


def test_an_answer_without_reasoning_is_left_alone() -> None:
    written = write(HERMES.budget(0), HERMES.tokens("no reasoning at all"))
    assert (HERMES.text(written.tokens), written.forced) == ("no reasoning at all", [])


def test_reasoning_that_ends_by_itself_is_left_alone() -> None:
    whole = "abc\n</think>\n\ndefg<think>"
    written = write(HERMES.budget(20, prompt="<think>\n"), HERMES.tokens(whole))
    assert (HERMES.text(written.tokens), written.forced) == (whole, [])


def test_the_tokens_of_reasoning_that_begins_again_are_counted_together() -> None:
    budget = HERMES.budget(6, prompt="<think>\n")
    assert write_text(HERMES, budget, "abc</think>d<think>efgh") == "abc</think>d<think>ef\n</think>\n\ngh"


def test_once_it_was_closed_a_model_can_neither_reason_again_nor_close_it_again() -> None:
    budget = HERMES.budget(2, prompt="<think>\n")
    assert write_text(HERMES, budget, "abc</think>d<think>e") == "ab\n</think>\n\ncde"
    assert sorted(budget.forbidden) == sorted((THINK, CLOSE))


def test_a_marker_that_is_one_token_but_not_a_special_one_is_impossible_then_too() -> None:
    vocabulary = ReasoningVocabulary(KNOWN["hermes"], has_special=False)
    whole = {text: vocabulary.token(text.encode()) for text in ("<think>", "</think>")}

    def encode(text: str) -> list[int]:
        return [whole[text]] if text in whole else list(text.encode())

    vocabulary.closer = ReasoningCloser(vocabulary.rules, encode)
    budget = vocabulary.budget(0, prompt="<think>\n")
    budget.accept_forced(99)
    assert sorted(budget.forbidden) == sorted(whole.values())


def test_whitespace_of_the_marker_that_is_there_is_not_written_again() -> None:
    assert write_text(HERMES, HERMES.budget(3, prompt="<think>\n"), "ab\ncd") == "ab\n</think>\n\ncd"


def test_a_character_is_written_to_its_end() -> None:
    budget = HERMES.budget(2, prompt="<think>\n")
    assert write_text(HERMES, budget, "a€bc") == "a€\n</think>\n\nbc"


def test_a_marker_that_has_begun_is_written_to_its_end() -> None:
    plain = ReasoningVocabulary(KNOWN["hermes"], has_special=False)
    budget = plain.budget(3, prompt="<think>\n")
    assert write_text(plain, budget, "a\n</think>\n\nbc") == "a\n</think>\n\nbc"
    other = plain.budget(3, prompt="<think>\n")
    assert write_text(plain, other, "a\n</thanks>") == "a\n</tha\n</think>\n\nnks>"


def test_a_model_that_completes_no_character_is_not_waited_for_for_ever() -> None:
    vocabulary = ReasoningVocabulary(KNOWN["hermes"])
    first, more = vocabulary.token("é".encode()[:1]), vocabulary.token("é".encode()[1:] + "é".encode()[:1])
    written = write(vocabulary.budget(1, prompt="<think>\n"), [first, *[more] * 100])
    assert written.tokens.index(CLOSE) == 1 + MAX_WAIT + len("\n")


def test_a_message_is_a_paragraph_before_the_marker_unless_there_was_no_reasoning() -> None:
    budget = HERMES.budget(3, prompt="<think>\n", message="Time is up.")
    assert write_text(HERMES, budget, "ab\ncd") == "ab\n\n\nTime is up.\n</think>\n\ncd"
    assert write_text(HERMES, HERMES.budget(0, prompt="<think>\n", message="Time is up."), "a") == "\n</think>\n\na"


def test_a_message_that_has_the_marker_too_closes_reasoning_once() -> None:
    for message in ("Time is up.\n</think>\n\n", " Time is up.</think>"):
        budget = HERMES.budget(2, prompt="<think>\n", message=message)
        assert write_text(HERMES, budget, "abc") == "ab\n\nTime is up.\n</think>\n\nc"
    inside = write(HERMES.budget(2, prompt="<think>\n", message="No </think> here."), HERMES.tokens("abc"))
    assert inside.tokens.count(CLOSE) == 1


def test_a_call_that_ends_the_reasoning_is_not_interrupted() -> None:
    vocabulary = ReasoningVocabulary(KNOWN["qwen-tags"])
    call = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    written = write(vocabulary.budget(6, prompt="<think>\n"), vocabulary.tokens(f"abc\n\n{call}"))
    assert (vocabulary.text(written.tokens), written.forced) == (f"abc\n\n{call}", [])


def test_messages_of_reasoning_are_ended_and_no_other_is_begun() -> None:
    budget = GPT_OSS.budget(3)
    analysis = "<|channel|>analysis<|message|>abcdef"
    expected = "<|channel|>analysis<|message|>abc<|end|><|start|>assistant"
    assert write_text(GPT_OSS, budget, analysis[:-3]) == expected
    budget.accept(GPT_OSS.form.tokens["<|channel|>"])
    assert budget.forbidden == (ord("a"),)
    for token_id in GPT_OSS.tokens("final<|message|>An answer, and again "):
        assert (budget.forced, token_id in budget.forbidden) == (None, False)
        budget.accept(token_id)


def test_messages_that_are_no_reasoning_count_for_nothing() -> None:
    text = "<|channel|>commentary<|message|>abcdef<|end|><|start|>assistant<|channel|>final<|message|>abc"
    assert write_text(GPT_OSS, GPT_OSS.budget(2), text) == text


def test_a_token_that_a_constraint_forces_instead_is_taken_and_reasoning_closed_behind_it() -> None:
    budget = HERMES.budget(1, prompt="<think>\n")
    for token_id in HERMES.tokens("a\n"):
        budget.accept(token_id)
    assert budget.forced == CLOSE
    budget.accept(ord("x"))
    assert write_text(HERMES, budget, "y") == "\n</think>\n\ny"


@pytest.mark.parametrize("name", KNOWN)
def test_every_known_format_that_reasons_can_be_closed(name: str) -> None:
    for has_special in (False, True):
        vocabulary = ReasoningVocabulary(KNOWN[name], has_special=has_special)
        assert vocabulary.closer.can_close(frozenset())


def test_a_marker_that_would_end_the_answer_closes_nothing() -> None:
    assert not GPT_OSS.closer.can_close(frozenset({GPT_OSS.form.tokens["<|end|>"]}))
    assert GPT_OSS.closer.can_close(frozenset({GPT_OSS.form.tokens["<|return|>"]}))


def test_a_vocabulary_that_cannot_write_the_marker_closes_nothing() -> None:
    rules = ReasoningVocabulary(KNOWN["hermes"], has_special=False).rules
    assert not ReasoningCloser(rules, lambda text: [ord("x")]).can_close(frozenset())


@st.composite
def outputs(draw: st.DrawFn) -> tuple[ReasoningVocabulary, str | None, list[int]]:
    """Draws a format, whose special tokens are known or not, what the prompt says, and tokens that a model writes: its
    markers, and texts of any characters, cut anywhere."""
    vocabulary = ReasoningVocabulary(KNOWN[draw(st.sampled_from(sorted(KNOWN)))], has_special=draw(st.booleans()))
    form = vocabulary.form
    marks = [closing_marker(form), form.generation_prompt]
    if form.reasoning is not None:
        marks += [form.reasoning.open, form.reasoning.close]
    if form.channels is not None:
        marks += [f"{form.channels.channel}{name}{form.channels.body}" for name in ("analysis", "final")]
    tokens: list[int] = []
    for piece in draw(st.lists(st.one_of(st.sampled_from(marks), st.text(max_size=12)), max_size=12)):
        if piece in marks and draw(st.integers(0, 4)):
            tokens += vocabulary.tokens(piece)
            continue
        data = piece.encode(errors="replace")
        while data:
            size = draw(st.integers(1, 5))
            tokens.append(vocabulary.token(data[:size]))
            data = data[size:]
    prompt = draw(st.sampled_from([None, "", *marks]))
    return vocabulary, prompt, tokens


@settings(max_examples=300, deadline=None)
@given(outputs(), st.integers(0, 40), st.sampled_from(["", "Enough."]))
def test_whatever_a_model_writes_its_reasoning_is_bounded_and_closed_with_the_marker(
    drawn: tuple[ReasoningVocabulary, str | None, list[int]], max_tokens: int, message: str
) -> None:
    vocabulary, prompt, model = drawn
    budget = vocabulary.budget(max_tokens, prompt=prompt, message=message)
    tokens, forced = write(budget, model)
    assert budget.forced is None
    times, rest = 0, forced
    while rest:  # whole markers, and nothing else
        whole = [vocabulary.closer.tokens(text, behind=end) for text in (message, "") for end in ("", "\n")]
        marker = next(one for one in whole if rest[: len(one)] == one)
        times, rest = times + 1, rest[len(marker) :]
    longest = len(vocabulary.closer.tokens(message))
    assert vocabulary.counted(tokens, prompt) <= max_tokens + max(1, times) * (MAX_WAIT + longest)
    if not forced and not budget.is_reasoning and vocabulary.counted(model, prompt) < max_tokens:
        assert tokens == model


@settings(max_examples=300, deadline=None)
@given(outputs(), st.integers(0, 40), st.data())
def test_what_is_forced_and_forbidden_follows_from_the_tokens_alone(
    drawn: tuple[ReasoningVocabulary, str | None, list[int]], max_tokens: int, data: st.DataObject
) -> None:
    vocabulary, prompt, model = drawn
    whole = write(vocabulary.budget(max_tokens, prompt=prompt), model).tokens
    cut = data.draw(st.integers(0, len(whole)))
    one, other = (vocabulary.budget(max_tokens, prompt=prompt) for _ in range(2))
    for place, token_id in enumerate(whole[:cut]):
        assert one.forced in (None, token_id), place
        one.accept(token_id)
        other.accept(token_id)
    assert (one.forced, one.forbidden, one.is_reasoning) == (other.forced, other.forbidden, other.is_reasoning)
    for token_id in whole[cut:]:
        assert other.forced in (None, token_id)
        assert token_id not in other.forbidden
        other.accept(token_id)


@settings(max_examples=300, deadline=None)
@given(st.text(min_size=1), st.lists(st.integers(1, 6), min_size=1), st.integers(0, 60))
def test_no_character_is_cut(text: str, sizes: list[int], max_tokens: int) -> None:
    vocabulary, data, model = ReasoningVocabulary(KNOWN["hermes"]), text.encode(errors="replace"), []
    while data:
        size = sizes[len(model) % len(sizes)]
        model.append(vocabulary.token(data[:size]))
        data = data[size:]
    tokens, forced = write(vocabulary.budget(max_tokens, prompt="<think>\n"), model)
    if forced:
        before = tokens[: tokens.index(CLOSE)]
        if len(before) < max_tokens + MAX_WAIT:
            b"".join(vocabulary.token_bytes[one] for one in before).decode()  # raises UnicodeDecodeError if one is cut
