"""A model's vocabulary in the form that llguidance requires."""

from collections.abc import Callable, Collection
from collections.abc import Sequence as Listing
from typing import NamedTuple

from llguidance import LLTokenizer, TokenizerWrapper

_MAX_ENCODED_BYTES = 256
"""Only the first token of a forced text is taken, and the rest is requested again: so the end of a long text is
useless, and a 60 KB constant would be tokenized anew for each of its tokens."""
Encode = Callable[[str], list[int]]


class ModelTokens(NamedTuple):
    """The tokens of a model."""

    token_bytes: Listing[bytes]
    end_token_ids: Collection[int]
    encode: Encode
    """Returns the tokens of a text. Any thread may call it."""


class PartEncoder:
    """Finds the tokens of texts in the middle of an output, with exactly the bytes of the text."""

    def __init__(self, model: ModelTokens) -> None:
        self._encode = model.encode
        # Some end tokens have text, which would end the output if it occurred in it.
        self.special = frozenset(n for n, text in enumerate(model.token_bytes) if not text or n in model.end_token_ids)
        # A byte that no text contains marks tokens that only a grammar naming them by id can match.
        self.tokens = [b"\xff<%d>" % n if n in self.special else text for n, text in enumerate(model.token_bytes)]
        self._ids: dict[bytes, int] = {}

    def __repr__(self) -> str:
        return f"<PartEncoder of {len(self.tokens)} tokens>"

    def encode(self, text: bytes) -> list[int]:
        """Returns the tokens of a text, leaving out bytes that no token begins with."""
        decoded = text.decode(errors="replace")
        # Some tokenizers put a space before a text; after a line break a text gets just its own tokens.
        for ids in (self._encode(decoded), self._encode(f"\n{decoded}")):
            count = self._num_last(ids, text)
            if count is not None:
                return ids[len(ids) - count :]
        return self._longest_first(text)

    def _num_last(self, ids: Listing[int], text: bytes) -> int | None:
        """Returns how many of the last tokens make up the text; None if it can't be split off."""
        found, count = b"", 0
        while len(found) < len(text) and count < len(ids):
            count += 1
            found = self.tokens[ids[-count]] + found
        return count if found == text else None

    def _longest_first(self, text: bytes) -> list[int]:
        if not self._ids:
            self._ids = {one: token_id for token_id, one in enumerate(self.tokens) if token_id not in self.special}
        longest = max(map(len, self._ids))
        ids: list[int] = []
        while text:
            sizes = range(min(longest, len(text)), 0, -1)
            size = next((size for size in sizes if text[:size] in self._ids), None)
            if size is None:  # no token begins with this
                break
            ids.append(self._ids[text[:size]])
            text = text[size:]
        return ids


class _Vocabulary:
    """The tokens and the tokenizer of a model. llguidance asks it for the tokens of forced texts."""

    def __init__(self, model: ModelTokens) -> None:
        self._parts = PartEncoder(model)
        self.eos_token_id = min(model.end_token_ids)
        self.bos_token_id = None
        self.special_token_ids = sorted(self._parts.special)
        self.tokens = self._parts.tokens

    def __call__(self, text: bytes) -> list[int]:
        """Returns the tokens of the beginning of a text."""
        size = _MAX_ENCODED_BYTES
        while len(text) > size and text[size] & 0xC0 == 0x80:  # inside a character
            size -= 1
        return self._parts.encode(text[:size])


def make_tokenizer(model: ModelTokens) -> LLTokenizer:
    """Takes up to 0.9 s and 56 MB for 152,000 tokens, holding the GIL."""
    vocabulary = TokenizerWrapper(_Vocabulary(model))
    return LLTokenizer(vocabulary, n_vocab=len(model.token_bytes), eos_token=sorted(model.end_token_ids))
