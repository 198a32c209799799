"""Writes rules in llguidance's Lark dialect: markers, free text closed by a marker, and JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tokenbus.worker.chat_format.grammar.schemas import with_style

_JSON_STYLE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""JSON as templates write it. A model that is free to write whitespace may never stop."""


_MAX_CHARS = 2_000_000
"""A compiled grammar takes about 30 bytes for each character, and a second for a million."""


class GrammarError(ValueError):
    """Calls in this format can't be constrained."""


class LarkWriter:
    """Collects the rules of one grammar. `tokens` are the ids of markers that are single tokens."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._rules: dict[str, str] = {}
        self._until: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        self._size = 0
        special = sorted(tokens, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, special)) + ")") if special else None

    def __repr__(self) -> str:
        return f"<LarkWriter {len(self._rules)} rules>"

    def __contains__(self, rule: str) -> bool:
        return rule in self._rules

    def add(self, name: str, body: str) -> str:
        """Adds a rule and returns its name. Raises GrammarError if the grammar becomes too large."""
        self._rules[name] = body
        self._size += len(body)
        if self._size > _MAX_CHARS:
            raise GrammarError(f"take more than {_MAX_CHARS:,} characters as a grammar")
        return name

    def write(self, start: str) -> str:
        """Returns the grammar with a start rule and all added rules."""
        rules = [f"{name}: {body}" for name, body in self._rules.items()]
        return "\n".join(["%llguidance {}", f"start: {start}", *rules, r"TEXT: /(.|\n)*/", r"SPACE: /[ \t\n]{0,4}/"])

    def marker(self, text: str) -> str:
        """Returns an expression for a marker: its tokens by id, and the texts between them."""
        return " ".join(
            f"<[{self._tokens[one]}]>" if one in self._tokens else literal(one) for one in self._split(text)
        )

    def text_until(self, marker: str) -> str:
        """Returns an expression for any text up to and including the next marker. Raises GrammarError for an empty
        marker."""
        first, *rest = self._split(marker.lstrip()) or [""]
        if not first:
            raise GrammarError("text that nothing closes can't be told from what follows")
        if first in self._tokens:
            return f"TEXT {self.marker(marker.lstrip())}"
        # a lazy rule ends with the first text that matches
        if first not in self._until:
            self._until[first] = name = f"until_{len(self._until)}"
            self.add(f"{name}[lazy]", f"TEXT {literal(first)}")
        return f"{self._until[first]} {self.marker(''.join(rest))}".strip()

    def texts_until(self, texts: list[str], marker: str) -> str:
        """Returns an expression for one of several texts and the marker after it.

        The texts are one terminal: in a rule, each of a thousand or more would be a parser item. A terminal matches
        greedily, so it includes the text with which the marker begins."""
        first, *rest = self._split(marker) or [""]
        if first in self._tokens:
            first, rest = "", [first, *rest]
        body = f"{one_of(texts)} {literal(first)}" if first else one_of(texts)
        if body not in self._texts:
            self._texts[body] = self.add(f"TEXTS_{len(self._texts)}", body)
        return f"{self._texts[body]} {self.marker(''.join(rest))}".strip()

    def _split(self, text: str) -> list[str]:
        return [one for one in (self._special.split(text) if self._special else [text]) if one]


def literal(text: str) -> str:
    """Returns an expression for a text."""
    return json.dumps(text, ensure_ascii=False)


def one_of(texts: list[str]) -> str:
    """Returns an expression for one of several texts."""
    return f"({' | '.join(map(literal, texts))})"


def json_of(schema: Mapping[str, Any]) -> str:
    """Returns an expression for the JSON of a value."""
    return f"%json {json.dumps(with_style(schema, _JSON_STYLE), ensure_ascii=False)}"


def joined(first: str, second: str) -> str:
    """Joins two markers, merging the whitespace where they meet."""
    edge = first[len(first.rstrip()) :] if second[:1].isspace() else ""
    return first.removesuffix(edge) + second if edge else first + second
