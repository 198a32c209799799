"""Makes a reranker's inputs from a query and documents, like llama.cpp's server.

A file may have a template for them, in which `{query}` and `{document}` stand for the texts. Unlike in that server,
special tokens are parsed only in the template, never in a user's text."""

import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Listing
from typing import NamedTuple

QUERY, DOCUMENT = "{query}", "{document}"
_PLACEHOLDER = re.compile(f"({re.escape(QUERY)}|{re.escape(DOCUMENT)})")


class PairTokens(NamedTuple):
    """The tokens around two texts, for a model without a template."""

    before: list[int]
    between: list[int]
    after: list[int]


class RerankPrompt:
    """The form of a model's inputs. Safe to use from several threads."""

    def __init__(self, runs: list[int | list[str]], encode: Callable[[str], list[int]]) -> None:
        """`runs` are tokens, and texts to be encoded together, in parts: template text or a placeholder."""
        self._runs = runs
        self._encode = encode

    def __repr__(self) -> str:
        return f"<RerankPrompt of {len(self._runs)} runs>"

    @classmethod
    def from_template(
        cls, template: str, special_tokens: Mapping[str, int], encode: Callable[[str], list[int]]
    ) -> "RerankPrompt":
        return cls(list(_runs_of(template, special_tokens)), encode)

    @classmethod
    def from_tokens(cls, tokens: PairTokens, encode: Callable[[str], list[int]]) -> "RerankPrompt":
        return cls([*tokens.before, [QUERY], *tokens.between, [DOCUMENT], *tokens.after], encode)

    def make(self, query: str, documents: Listing[str]) -> list[list[int]]:
        """Returns the token ids for each document."""
        known: dict[str, list[int]] = {}
        """Texts without a document, encoded once for all documents."""
        return [self._make({QUERY: query, DOCUMENT: document}, known) for document in documents]

    def _make(self, texts: Mapping[str, str], known: dict[str, list[int]]) -> list[int]:
        ids: list[int] = []
        for run in self._runs:
            if isinstance(run, int):
                ids.append(run)
                continue
            text = "".join(texts.get(part, part) for part in run)
            if DOCUMENT in run:
                ids += self._encode(text)
            else:
                ids += known.get(text) or known.setdefault(text, self._encode(text))
        return ids


def _runs_of(template: str, special_tokens: Mapping[str, int]) -> Iterator[int | list[str]]:
    longest_first = sorted(filter(None, special_tokens), key=len, reverse=True)
    special = re.compile(f"({'|'.join(map(re.escape, longest_first)) or r'(?!)'})")
    run: list[str] = []
    for part in _PLACEHOLDER.split(template):
        for piece in [part] if part in (QUERY, DOCUMENT) else special.split(part):
            if piece not in special_tokens:
                run += [piece] if piece else []
                continue
            if run:
                yield run
            yield special_tokens[piece]
            run = []
    if run:
        yield run
