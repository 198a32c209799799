"""Decides which constraints are small enough for the engine itself to compile and follow.

Nothing can stop llguidance in the middle of a call, and its own limits do not bound everything: a regex takes time
quadratic in its length before any limit applies, and a sufficiently ambiguous 120-byte Lark grammar takes over four
seconds for its first mask. So this bounds what makes a constraint costly. The bounds were found by attack
(tests/worker/engine/constraints/grammars/test_small.py): of thousands of small constraints on a vocabulary of 150,000
tokens, none took 0.1 s to compile or 10 ms for a mask."""

import re

from tokenbus.worker.contract import engine_request

_Kind = engine_request.ConstraintKind
_MAX_BYTES = {_Kind.JSON_SCHEMA: 8_192, _Kind.REGEX: 512, _Kind.CHOICE: 16_384, _Kind.LARK: 16_384}
"""A Lark grammar that we have generated is small if the schemas in it are; a client's never is, nor is any in GBNF."""
_MAX_PATTERN_CHARS = 512
"""The total length of all patterns in a schema."""
_PATTERN = re.compile(r'"pattern"\s*:\s*"((?:[^"\\]|\\.)*)"')
_COSTLY = re.compile(r"multipleOf|patternProperties|whitespace_pattern|\\u")
"""`multipleOf` becomes a regex with a state for each remainder; name patterns are compared with each other; and an
escaped letter may hide any of these."""


def is_small(constraint: engine_request.Constraint) -> bool:
    source, kind = constraint.source, constraint.kind
    if kind is _Kind.GBNF or (kind is _Kind.LARK and not constraint.is_written):
        return False
    if len(source.encode()) > _MAX_BYTES[kind]:
        return False
    if kind in (_Kind.REGEX, _Kind.CHOICE):
        return True
    return not _COSTLY.search(source) and sum(map(len, _PATTERN.findall(source))) <= _MAX_PATTERN_CHARS
