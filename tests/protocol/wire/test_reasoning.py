"""The wishes for the reasoning of an answer become variables of the template and a limit."""

import pytest

from tests.protocol.wire.checks.test_validation import USER, make, refusal
from tokenbus.protocol.wire import limits
from tokenbus.protocol.wire.checks import validation
from tokenbus.protocol.wire.params import ReasoningOptions
from tokenbus.protocol.wire.reasoning import template_arguments, token_limit


@pytest.mark.parametrize(
    ("effort", "given", "expected"),
    [
        (None, None, None),
        (None, {"a": 1}, {"a": 1}),
        ("none", None, {"enable_thinking": False}),
        ("minimal", {}, {"enable_thinking": False}),
        ("high", None, {"enable_thinking": True, "reasoning_effort": "high"}),
        ("low", {"enable_thinking": False}, {"enable_thinking": False, "reasoning_effort": "low"}),
    ],
)
def test_an_effort_sets_variables_that_are_not_given(effort: str | None, given: object, expected: object) -> None:
    assert template_arguments(effort, given) == expected  # type: ignore[arg-type]


def test_a_limit_on_reasoning_tokens_is_a_variable_too_unless_it_is_given() -> None:
    assert template_arguments(None, None, 0) == {"thinking_budget": 0}
    assert template_arguments("low", {"thinking_budget": -1}, 7) == {
        "thinking_budget": -1,
        "enable_thinking": True,
        "reasoning_effort": "low",
    }


@pytest.mark.parametrize(
    ("asked", "takes_effort", "most"),
    [
        (None, False, None),
        (ReasoningOptions(), False, None),
        (ReasoningOptions(max_tokens=0), False, 0),
        (ReasoningOptions(max_tokens=500, effort="low"), False, 500),
        (ReasoningOptions(max_tokens=500, effort="low"), True, 500),
        (ReasoningOptions(effort="none"), False, 0),
        (ReasoningOptions(effort="minimal"), False, 10),
        (ReasoningOptions(effort="low"), False, 20),
        (ReasoningOptions(effort="medium"), False, 50),
        (ReasoningOptions(effort="high"), False, 80),
        (ReasoningOptions(effort="xhigh"), False, 95),
        (ReasoningOptions(effort="low"), True, None),
        (ReasoningOptions(effort="whatever a template knows"), False, None),
    ],
)
def test_a_budget_comes_before_the_share_that_an_effort_means(
    asked: ReasoningOptions | None, takes_effort: bool, most: int | None
) -> None:
    assert token_limit(asked, 100, takes_effort=takes_effort) == most


def test_a_budget_may_be_nothing_and_larger_than_the_answer_but_not_negative() -> None:
    for budget in (0, 1, 2**31 - 1):
        validation.check_request(make(messages=USER, max_tokens=5, reasoning=ReasoningOptions(max_tokens=budget)))
    for budget in (-1, 2**31):
        assert (
            refusal(make(messages=USER, reasoning=ReasoningOptions(max_tokens=budget))).param == "reasoning.max_tokens"
        )


def test_an_effort_is_short() -> None:
    longest = "e" * limits.MAX_EFFORT_BYTES
    validation.check_request(make(messages=USER, reasoning=ReasoningOptions(effort=longest)))
    assert refusal(make(messages=USER, reasoning=ReasoningOptions(effort=f"{longest}e"))).param == "reasoning.effort"


def test_only_the_answer_to_a_conversation_has_reasoning() -> None:
    for fields in ({"prompt": "x"}, {"token_ids": [1]}):
        assert refusal(make(**fields, reasoning=ReasoningOptions(effort="low"))).param == "reasoning"


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
def test_a_constrained_answer_has_no_reasoning_if_the_templates_switch_is_off(switch: str) -> None:
    def effort(**fields: object) -> str | None:
        asked = validation.to_params(make(messages=USER, **fields)).reasoning
        return None if asked is None else asked.effort

    off = {"chat_template_kwargs": {switch: False}}
    assert effort(regex="a", **off) == "none"
    assert effort(regex="a", chat_template_kwargs={switch: True}) is None
    assert effort(**off) is None
    assert effort(regex="a", reasoning=ReasoningOptions(effort="low"), **off) == "low"
    assert effort(regex="a", reasoning=ReasoningOptions(max_tokens=9), **off) is None
