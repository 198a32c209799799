"""Checks a chat format: the template's rendering of known answers must be read back exactly."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from tokenbus.worker.chat_format.parsing import deltas
from tokenbus.worker.chat_format.parsing.markers import Rules
from tokenbus.worker.chat_format.parsing.parser import AnswerParser
from tokenbus.worker.chat_format.probe import FUNCTIONS, KEYS, PARAMETERS, VALUE_KEYS, TemplateProbe, call
from tokenbus.worker.contract.chat_format import ChatFormat, Values

_A, _B = KEYS
_NUMBER, _OBJECT, _FLAG = (VALUE_KEYS[kind] for kind in ("number", "object", "boolean"))
_NESTED = {"deep": [1, {"a b": None, "c": [True, -2.5e3]}], "empty": {}}


class _Answer(NamedTuple):
    content: str
    reasoning: str
    calls: list[tuple[str, Any]]


_ANSWERS = (
    _Answer("", "", [(FUNCTIONS[1], {_A: "naïve “日本語” \"quoted\" \\ 'text'", _B: "two\n  lines"})]),
    _Answer("some words", "", [(FUNCTIONS[0], {_OBJECT: _NESTED, _NUMBER: 42, _FLAG: False})]),
    _Answer("", "", [(FUNCTIONS[2], {})]),
    _Answer("", "a thought", [(FUNCTIONS[0], {_B: "x"}), (FUNCTIONS[2], {_NUMBER: 0.5, _OBJECT: {}})]),
    _Answer("words", "", [(FUNCTIONS[1], {_A: "1"}), (FUNCTIONS[1], {_A: "2"}), (FUNCTIONS[0], {})]),
)
"""Functions, notations and numbers of calls that differ from those used to infer a format."""


_WORDS = (_Answer("some words", "", []), _Answer("some words", "a thought", []))


def reads_back(probe: TemplateProbe, form: ChatFormat, opening: str, ending: str) -> bool:
    """Returns whether a format reads back all answers that its template can write.

    `opening` and `ending` are what the template writes before and after an answer."""
    rules = Rules(form)
    answers = _WORDS if form.calls is None else _WORDS + _ANSWERS
    return all(_reads(probe, rules, answer, opening, ending) for answer in answers)


def _reads(probe: TemplateProbe, rules: Rules, answer: _Answer, opening: str, ending: str) -> bool:
    form = rules.form.calls
    if form is not None and form.values is Values.PYTHON:
        answer = answer._replace(calls=[(name, _without_quotes(arguments)) for name, arguments in answer.calls])
    if form is not None and len(answer.calls) > 1 and not form.parallel:
        return True
    calls = [call(place, arguments, name) for place, (name, arguments) in enumerate(answer.calls)]
    text = probe.answer(*calls, content=answer.content or None, reasoning=answer.reasoning or None)
    if text is not None and answer.content and answer.calls and _are_apart(rules.form, text, answer):
        text = probe.answer(*calls, reasoning=answer.reasoning or None)
    if text is None:
        return False
    if answer.calls and answer.calls[-1][0] not in text:
        return len(answer.calls) > 1  # it writes only the first call
    # Some templates omit content next to calls, or past reasoning.
    expected = _Answer(
        answer.content if answer.content and answer.content in text else "",
        answer.reasoning if answer.reasoning and answer.reasoning in text else "",
        answer.calls,
    )
    text = text[len(probe.common_prefix(text, opening)) :]
    texts = {text.removesuffix(probe.common_suffix(text, ending))}
    texts |= {text.rpartition(close)[0] for close in rules.form.turn_close if close in text}
    # A past answer may begin with the text that a prompt adds, or after it, or after an empty reasoning.
    prompts = {"", rules.form.generation_prompt}
    if rules.form.reasoning is not None:
        prompts.add(rules.form.reasoning.close.strip())
    return any(
        _same(_read(probe, rules, prompt, one.removeprefix(prompt)), expected, text)
        for prompt in prompts
        for one in texts
    )


def _are_apart(form: ChatFormat, text: str, answer: _Answer) -> bool:
    """Returns whether a template writes words and calls in separate turns, or calls only where there are no words."""
    places = sorted((text.find(answer.content), text.find(answer.calls[0][0])))
    between = text[max(places[0], 0) : places[1]]
    return answer.calls[0][0] not in text or any(close in between for close in form.turn_close)


def _without_quotes(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments whose texts need no escapes: templates that write Python literals do not escape."""
    return {
        key: re.sub(r"[\"'\\\n]", "", value) if isinstance(value, str) else value for key, value in arguments.items()
    }


def _same(seen: _Answer, expected: _Answer, text: str) -> bool:
    # A turn may begin with a space that is not part of its marker, and words beside a call may be written as reasoning.
    said = (seen.content.strip(), seen.reasoning)
    if said not in (expected[:2], (expected.reasoning, expected.content)) or len(seen.calls) != len(expected.calls):
        return False
    return all(
        name == wanted
        and isinstance(one, dict)
        and one.keys() == arguments.keys()
        # Some templates write values as Python prints them, although their models do not.
        and all(
            one[key] == value or (one[key] == str(value) and str(value) in text) for key, value in arguments.items()
        )
        for (name, one), (wanted, arguments) in zip(seen.calls, expected.calls, strict=True)
    )


def _read(probe: TemplateProbe, rules: Rules, prompt: str, text: str) -> _Answer:
    tools = dict.fromkeys(FUNCTIONS, PARAMETERS)
    parser = AnswerParser(rules, tools=tools, key="", generation_prompt=prompt)
    said = parser.feed_tokens(probe.tokens(text)) + parser.finish(cut_off=False)
    content = "".join(one.text for one in said if isinstance(one, deltas.Content))
    reasoning = "".join(one.text for one in said if isinstance(one, deltas.ReasoningDelta))
    begun = [one for one in said if isinstance(one, deltas.CallBegin)]
    return _Answer(content, reasoning, [(one.name, _arguments(said, one.index)) for one in begun])


def _arguments(said: list[deltas.Delta], index: int) -> Any:
    fragments = [one.fragment for one in said if isinstance(one, deltas.CallArguments) and one.index == index]
    try:
        return msgspec.json.decode("".join(fragments))
    except msgspec.DecodeError:
        return None
