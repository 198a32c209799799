"""Renders conversations whose every word is known, so that the rest of the rendered text is the template's own, and
checks a chat format: the template's rendering of known answers must be read back exactly."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from tokenbus.protocol.wire.messages import ChatMessage
from tokenbus.worker.chat_format.parsing import deltas
from tokenbus.worker.chat_format.parsing.markers import Rules
from tokenbus.worker.chat_format.parsing.parser import AnswerParser
from tokenbus.worker.contract.chat_format import ChatFormat, Values

Render = Callable[[list[ChatMessage], list[dict[str, Any]] | None, dict[str, Any]], list[str | int]]
"""Renders a conversation with tools and variables to special token ids and texts. Raises if the template refuses it."""

QUESTION = "probe question"
CONTENT = "probe content"
REASONING = "probe reasoning"
KEYS = ("probe_key_a", "probe_key_b")
TEXTS = {KEYS[0]: "probe text a", KEYS[1]: "probe text b"}
VALUE_KEYS = {"string": KEYS[0], "number": "probe_number", "object": "probe_object", "boolean": "probe_flag"}
"""An argument for each type of value."""
FUNCTIONS = ("probe_function_a", "probe_function_b", "probe_function_c")
IDS = ("probeid01", "probeid02", "probeid03")
"""Nine letters and digits, since some templates accept nothing else."""

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        KEYS[1]: {"type": "string", "description": "a value"},
        **{key: {"type": kind, "description": "a value"} for kind, key in VALUE_KEYS.items()},
        VALUE_KEYS["object"]: {
            "type": "object",
            "description": "a value",
            "additionalProperties": {"type": "string"},  # some templates look for this
        },
    },
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "a function", "parameters": PARAMETERS}}
    for name in FUNCTIONS
]
_MAX_TURN = 16_384
"""Characters. Answers to the probes have a few hundred, and instructions that templates add after them a few more."""
_TAG = r"</?[A-Za-z_|｜][^<>\s=\"']{0,60}>|<[|｜][^<>\n]{1,60}[|｜]>|\[/?[A-Z_]+\]"
"""Texts that are units even if they are not special tokens."""


class TemplateProbe:
    """One model's template, probed with known conversations."""

    def __init__(self, render: Render, special_tokens: Mapping[str, int]) -> None:
        self._render = render
        self._texts = {token: text for text, token in special_tokens.items()}
        self.seen: dict[str, int] = {}
        """The special tokens that the template has written."""

    def turn(
        self,
        *answer: ChatMessage,
        tools: list[dict[str, Any]] | None = TOOLS,
        **variables: Any,
    ) -> str | None:
        """Returns what a template writes after the user's words, or None if it refuses or writes too much."""
        conversation = [ChatMessage(role="user", content=QUESTION), *answer]
        try:
            pieces = self._render(conversation, tools, variables)
        except Exception:  # a template is third-party code
            return None
        self.seen |= {self._texts[piece]: piece for piece in pieces if isinstance(piece, int) and piece in self._texts}
        text = "".join(piece if isinstance(piece, str) else self._texts.get(piece, "") for piece in pieces)
        turn = text.rpartition(QUESTION)[2]
        return turn if QUESTION in text and len(turn) <= _MAX_TURN else None

    def answer(
        self, *calls: dict[str, Any], content: str | None = None, reasoning: str | None = None, **variables: Any
    ) -> str | None:
        """Returns what a template writes for an assistant's answer."""
        message = ChatMessage(
            role="assistant", content=content, reasoning_content=reasoning, tool_calls=list(calls) or None
        )
        return self.turn(message, add_generation_prompt=False, **variables)

    def atoms(self, text: str) -> list[str]:
        """Splits a text into special tokens, tags and single characters."""
        special = "|".join(re.escape(one) for one in sorted(self.seen, key=len, reverse=True))
        return re.findall(f"{special}|{_TAG}|." if special else f"{_TAG}|.", text, re.DOTALL)

    def tokens(self, text: str) -> list[tuple[int, str]]:
        """Returns a rendered text as tokens with their texts. The ids of ordinary tokens are unknown, and are -1."""
        return [(self.seen.get(atom, -1), atom) for atom in self.atoms(text)]

    def common_prefix(self, one: str, other: str) -> str:
        return "".join(_common(self.atoms(one), self.atoms(other)))

    def common_suffix(self, one: str, other: str) -> str:
        return "".join(reversed(_common(self.atoms(one)[::-1], self.atoms(other)[::-1])))


def call(place: int, arguments: dict[str, Any], name: str | None = None) -> dict[str, Any]:
    return {
        "id": IDS[place],
        "type": "function",
        "function": {"name": name or FUNCTIONS[place], "arguments": arguments},
    }


def _common(one: list[str], other: list[str]) -> list[str]:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return one[:count]


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
