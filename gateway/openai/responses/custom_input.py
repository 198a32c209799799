"""Reads the input of a custom tool from the arguments of the function call that stands for it."""

import json
import re

NAME = "input"
"""The only parameter of a function that stands for a custom tool."""
_OPENING = re.compile(rf'\s*\{{\s*"{NAME}"\s*:\s*"')
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_OTHER = r"\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
_WHOLE_CHARACTERS = re.compile(
    rf'(?:[^"\\]+|\\["\\/bfnrt]|{_OTHER}|{_HIGH}{_LOW}|{_HIGH}(?=[^\\]|\\[^u]|\\u(?![dD][c-fC-F])[0-9a-fA-F]{{4}}))*'
)
"""Leaves alone an incomplete escape, and the first half of a surrogate pair while the second may follow."""


class CustomInput:
    """Decodes `{"input": "..."}` while it is being written. Arguments in any other form are themselves the input."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._pending = ""
        self._is_open = False

    def __repr__(self) -> str:
        return f"<CustomInput, {len(self._pieces)} pieces>"

    @property
    def text(self) -> str:
        """The input so far."""
        return "".join(self._pieces)

    def feed(self, added: str) -> str:
        """Takes more of the arguments, and returns the input that they add."""
        self._pending += added
        if not self._is_open:
            opening = _OPENING.match(self._pending)
            if opening is None:
                return ""
            self._is_open = True
            self._pending = self._pending[opening.end() :]
        whole = _WHOLE_CHARACTERS.match(self._pending)
        assert whole is not None
        self._pending = self._pending[whole.end() :]
        return self._decoded(whole[0])

    def end(self) -> str:
        """Returns the rest of the input, once the arguments are complete or cut off."""
        return "" if self._is_open else self._keep(self._pending)

    def _decoded(self, escaped: str) -> str:
        text: str = json.loads(f'"{escaped}"', strict=False)
        return self._keep(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))

    def _keep(self, text: str) -> str:
        self._pieces += [text] if text else []
        return text


def input_of(arguments: str) -> str:
    """Returns the input in the arguments of a whole call."""
    read = CustomInput()
    read.feed(arguments)
    read.end()
    return read.text


def arguments_of(text: str) -> str:
    """Returns the arguments that stand for an input."""
    return json.dumps({NAME: text}, ensure_ascii=False)
