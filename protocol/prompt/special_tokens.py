"""Keeps users' texts apart from a template's markup (decision 0005).

A special token (such as `<|im_end|>`) counts where the template writes it, and never where a user wrote it. So before
rendering, every special token in a user's text gets a guard character before it and a separator character after it, and
text between the two is not parsed as a special token. A text that ends like the beginning of a special token gets a
separator too, so that the template can't complete it with what it writes next.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

MARKS = [chr(code) for code in range(0x13000, 0x13400)]
"""The characters from which guard, separator and end are chosen: Egyptian hieroglyphs.

They must be printable: a template may print a list as Python does, which would escape other characters."""


class Marks(NamedTuple):
    """Characters that occur neither in the request nor in the template."""

    guard: str
    separator: str
    end: str = ""
    """Marks the end of the text that an answer continues."""

    def remove(self, text: str) -> str:
        return text.replace(self.guard, "").replace(self.separator, "")


class SpecialTokens:
    """The texts that stand for one token each; finds them in users' texts and in rendered prompts."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = {text: token_id for text, token_id in ids.items() if text}
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._any = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._one = re.compile(self._any)
        self._prefixes = {text[:length] for text in self.ids for length in range(1, len(text))}
        self._longest = max(map(len, self.ids), default=0)

    def __repr__(self) -> str:
        return f"<SpecialTokens {len(self.ids)}>"

    def mark(self, text: str, marks: Marks) -> str:
        """Returns `text` with every special token, including overlapping ones, between a guard and a separator."""
        # Special tokens may overlap (`<a<a>`), so every position is tried with every token, not only the first match.
        spans = [(at, at + len(token)) for at in self._starts(text) for token in self.ids if text.startswith(token, at)]
        starts, ends = {start for start, _ in spans}, {end for _, end in spans}
        parts, last = [], 0
        # Where one token ends and another starts, the separator comes first: it closes the previous one.
        for at in sorted(starts | ends):
            parts += [text[last:at], marks.separator if at in ends else "", marks.guard if at in starts else ""]
            last = at
        return "".join(parts) + text[last:]

    def _starts(self, text: str) -> Iterator[int]:
        """Yields where special tokens start, overlapping ones included.

        Searching for the tokens themselves scans for their first characters, many times as fast as a pattern with
        look-around."""
        at = 0
        while match := self._one.search(text, at):
            yield match.start()
            at = match.start() + 1

    def seal(self, text: str, marks: Marks) -> str:
        """Returns `text`, followed by a separator if what comes next could complete a special token."""
        is_open = any(text[-length:] in self._prefixes for length in range(1, min(self._longest, len(text) + 1)))
        return text + marks.separator if is_open else text

    def split(self, text: str, marks: Marks) -> list[str | int]:
        """Splits a rendered prompt into special token ids and the plain texts between them, without the marks.

        A special token is the user's only if both marks are there: a guard without its separator is left where the
        template has truncated a user's text, and the template wrote what follows."""
        pieces: list[str | int] = []
        # A special token without a guard before it, or with a guard but without a separator after it.
        token = re.compile(f"(?<!{marks.guard})(?:{self._any})|(?<={marks.guard})(?:{self._any})(?!{marks.separator})")
        end = 0
        for at in self._starts(text):
            if at < end or (found := token.match(text, at)) is None:
                continue
            if plain := marks.remove(text[end:at]):
                pieces.append(plain)
            pieces.append(self.ids[found.group()])
            end = found.end()
        if plain := marks.remove(text[end:]):
            pieces.append(plain)
        return pieces
