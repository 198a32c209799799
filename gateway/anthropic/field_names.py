"""Translates the wire's field names into those of Anthropic's API."""

import re
from collections.abc import Sequence

from tokenbus.gateway.anthropic.turns import Turn

_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^stop(?=\[|$)", "stop_sequences"),
        (r"^response_format\.json_schema\.schema", "output_config.format.schema"),
        (r"^response_format(\.json_schema)?", "output_config.format"),
        (r"^reasoning\.max_tokens$", "thinking.budget_tokens"),
        (r"^reasoning\.effort$", "output_config.effort"),
        (r"^parallel_tool_calls$", "tool_choice.disable_parallel_tool_use"),
        (r"^tool_choice\.function", "tool_choice"),
        (r"^(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
        (r"^(tools\[\d+\])\.function", r"\1"),
        (r"\[(\d+)\]", r".\1"),
    )
]
_OF_MESSAGE = re.compile(r"^messages\[(\d+)\](?:\.(content|tool_calls)\[(\d+)\])?(.*)$")
_OF_TOOL = re.compile(r"^tools\[(\d+)\]")
_IN_MESSAGE = {
    ".function.arguments": ".input",
    ".function.name": ".name",
    ".function": "",
    ".tool_call_id": ".tool_use_id",
    ".tool_calls": "",
}


class AnthropicFieldNames:
    """The field names of one request."""

    def __init__(self, turns: Sequence[Turn] = (), tool_numbers: Sequence[int] = ()) -> None:
        """`tool_numbers` are the positions of the wire's tools in the request, which may also have others."""
        self._turns = turns
        self._tool_numbers = tool_numbers

    def __repr__(self) -> str:
        return f"<AnthropicFieldNames of {len(self._turns)} turns>"

    def of(self, param: str) -> str:
        """Returns the name of a field, unchanged if it is already Anthropic's."""
        match = _OF_MESSAGE.match(param)
        if match and int(match[1]) < len(self._turns):
            return self._in_turn(self._turns[int(match[1])], match)
        tool = _OF_TOOL.match(param)
        if tool and int(tool[1]) < len(self._tool_numbers):
            param = f"tools[{self._tool_numbers[int(tool[1])]}]{param[tool.end() :]}"
        for pattern, replacement in _RULES:
            param = pattern.sub(replacement, param)
        return param

    def _in_turn(self, turn: Turn, match: "re.Match[str]") -> str:
        rest = _IN_MESSAGE.get(match[4], match[4])
        if match[2] is None:
            return turn.path + rest
        places = turn.part_paths if match[2] == "content" else turn.call_paths
        return places[int(match[3])] + rest


def with_name_first(message: str, param: str, theirs: str) -> str:
    """Returns an error's message with the name of the field before the problem."""
    for begin in (f"{param}: ", f"{param} "):
        if message.startswith(begin):
            return f"{theirs}: {message.removeprefix(begin)}"
    return message
