"""What docs/ shows that commands print."""

import re
import shlex
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^```(sh|bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_OPERATORS = "();<>|&"
_BEFORE = re.compile(r"\w+=.*|\$|exec|do|then")
"""Words that may come before the name of a program: assignments, a prompt, and words of the shell."""


def sample(page: str, command: str) -> list[str]:
    """Returns the lines that a page shows after a command."""
    _, found, text = (DOCS / page).read_text().partition(f"```console\n$ {command}\n")
    assert found, f"{page} does not show {command}"
    return text.partition("```")[0].splitlines()


def commands(text: str) -> Iterator[list[str]]:
    """Yields the arguments of each `tokenbus` in a page's blocks for the shell."""
    for kind, block in _BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if kind != "console" or line.startswith("$ "):
                yield from _of_line(line)


def _of_line(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # a quotation that ends on another line
        return
    for is_between, group in groupby(words, lambda word: set(word) <= set(_OPERATORS)):
        program = list(group)
        while program and _BEFORE.fullmatch(program[0]):
            del program[0]
        if not is_between and program and program[0].rpartition("/")[2] == "tokenbus":
            yield program[1:]


def skeleton(line: str) -> str:
    """Returns a line with all numbers, sizes and times the same."""
    return re.sub(r"(?:\d+[dhm] )?\d[\d.,]*[KMGTdhms]?\b", "N", line).strip()
