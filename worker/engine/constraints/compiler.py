"""Compiles constraints within limits, for a model's vocabulary, and caches the most recent ones (decision 0050)."""

from collections import OrderedDict
from collections.abc import Callable, Collection
from collections.abc import Sequence as Listing
from functools import cached_property
from typing import NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.constraints.grammar import ConstraintError, to_grammar
from tokenbus.worker.engine.constraints.matcher import Matcher

_MAX_ENCODED_BYTES = 256
"""Only the first token of a forced text is taken, and the rest is requested again: so the end of a long text is
useless, and a 60 KB constant would be tokenized again for each of its tokens."""
Encode = Callable[[str], list[int]]
_MAX_CACHED = 64
_MAX_CACHED_BYTES = 64 << 20
_BASE_BYTES = 1 << 18
_BYTES_PER_SOURCE_BYTE = 512
"""A compiled constraint takes about this much per byte of its source, plus a fixed amount."""
_SMALLEST = engine_request.Constraint(kind=engine_request.ConstraintKind.REGEX, source="a", param="regex")


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


def _limits() -> LLParserLimits:
    """With llguidance's default fuel a single mask may take over a second, and with 10,000 items per step llama.cpp's
    English grammar fails. 1,000 optional properties need a row of 5,000 items."""
    return LLParserLimits(
        initial_lexer_fuel=100_000,
        step_lexer_fuel=50_000,
        step_max_items=30_000,
        max_items_in_row=5_000,
        max_lexer_states=20_000,
        verbose_errors=False,
    )


class ConstraintCompiler:
    """Makes matchers for one vocabulary. Not thread-safe."""

    def __init__(self, tokens: ModelTokens) -> None:
        assert tokens.end_token_ids, "a constraint ends with an end token"
        self.tokens = tokens
        self._limits = _limits()
        self._cached: OrderedDict[tuple[str, str, str], Matcher] = OrderedDict()
        self._cached_bytes = 0

    def __repr__(self) -> str:
        return f"<ConstraintCompiler, {len(self._cached)} cached>"

    def prepare(self) -> None:
        """Does the setup in advance that the first constraint would otherwise wait for."""
        self.compile(_SMALLEST)

    def has_compiled(self, constraint: engine_request.Constraint) -> bool:
        """Whether the same constraint is cached."""
        return _key(constraint) in self._cached

    def compile(self, constraint: engine_request.Constraint) -> Matcher:
        """Returns a matcher at the beginning of an output. Raises ConstraintError."""
        key = _key(constraint)
        found = self._cached.get(key)
        if found is None:
            found = self._cached[key] = self._compile(constraint)
            self._cached_bytes += _size(key)
            while len(self._cached) > _MAX_CACHED or self._cached_bytes > _MAX_CACHED_BYTES:
                dropped, _ = self._cached.popitem(last=False)
                self._cached_bytes -= _size(dropped)
        else:
            self._cached.move_to_end(key)
        return found.copy()

    def _compile(self, constraint: engine_request.Constraint) -> Matcher:
        state = LLMatcher(self._tokenizer, to_grammar(constraint), limits=self._limits, log_level=0)
        if state.is_error():
            raise ConstraintError(state.get_error())
        matcher = Matcher(state, min(self.tokens.end_token_ids), len(self.tokens.token_bytes))
        # This detects constraints that are too costly from the start, and ones that allow nothing at all.
        matcher.allowed()
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Made on first use: it takes time and memory that most engines never need."""
        return make_tokenizer(self.tokens)


def _key(constraint: engine_request.Constraint) -> tuple[str, str, str]:
    return constraint.kind, constraint.source, constraint.preamble


def _size(key: tuple[str, str, str]) -> int:
    return _BASE_BYTES + _BYTES_PER_SOURCE_BYTE * len(key[1])
