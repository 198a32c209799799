"""Compiles constraints within limits, and caches the most recent ones (decision 0050)."""

from collections import OrderedDict
from functools import cached_property

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.constraints.grammar import ConstraintError, to_grammar
from tokenbus.worker.engine.constraints.matcher import Matcher
from tokenbus.worker.engine.constraints.vocabulary import ModelTokens, make_tokenizer

_MAX_CACHED = 64
_MAX_CACHED_BYTES = 64 << 20
_BASE_BYTES = 1 << 18
_BYTES_PER_SOURCE_BYTE = 512
"""A compiled constraint takes about this much per byte of its source, plus a fixed amount."""
_SMALLEST = engine_request.Constraint(kind=engine_request.ConstraintKind.REGEX, source="a", param="regex")


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
