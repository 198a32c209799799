"""Renders conversations whose every word is known, so that the rest of the rendered text is the template's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tokenbus.protocol.wire.messages import ChatMessage

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
