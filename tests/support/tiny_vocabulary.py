"""A vocabulary of a few hundred tokens, and walks through constraints on it."""

import random
from collections.abc import Callable, Iterable

import numpy as np

from tokenbus.worker.chat_format.lark import LarkWriter
from tokenbus.worker.contract import engine_request
from tokenbus.worker.engine.constraints.compiler import ConstraintCompiler, ModelTokens
from tokenbus.worker.engine.constraints.matcher import Matcher

END, OTHER_END, MARKER = 0, 1, 2
WORDS = [b'{"', b'": ', b'", "', b", ", b"true", b"false", b"null", b"name", b"na", b"me", b"ab", b"abc", b"[]", b"}}"]
TOKENS = [b"", b"", b"", b"\n", b"\t", *(bytes([byte]) for byte in range(0x20, 0x100)), *WORDS]
"""Two end tokens, one without a text, white space, printable characters, all other bytes, and words."""
_IDS = {token: token_id for token_id, token in enumerate(TOKENS) if token}


def encode(text: str) -> list[int]:
    """Returns the longest tokens, from the left."""
    data, ids = text.encode(), []
    while data:
        size = next(size for size in range(5, 0, -1) if data[:size] in _IDS)
        ids.append(_IDS[data[:size]])
        data = data[size:]
    return ids


def decode(token_ids: Iterable[int]) -> str:
    return b"".join(TOKENS[token_id] for token_id in token_ids).decode()


def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(ModelTokens(TOKENS, frozenset({END, OTHER_END}), encode))


def constraint(kind: str, source: str, after: int | str | None = None) -> engine_request.Constraint:
    preamble = "" if after is None else preamble_until(after)
    return engine_request.Constraint(
        kind=engine_request.ConstraintKind(kind), source=source, param="grammar", preamble=preamble
    )


def preamble_until(marker: int | str) -> str:
    """Returns the grammar of free text up to a token or a text, and then of the constraint."""
    lark = LarkWriter({"marker": marker} if isinstance(marker, int) else {})
    return lark.write(f"{lark.text_until('marker' if isinstance(marker, int) else marker)} SPACE @body")


Choose = Callable[[list[int], list[int]], int]


def choice(seed: int) -> Choose:
    """Chooses by the seed and the tokens before, and by nothing else."""
    return lambda tokens, allowed: random.Random(f"{seed} {tokens}").choice(allowed)


def walk(
    matcher: Matcher, choose: Choose, *, before: Iterable[int] = (), limit: int = 32, most: int = 2_000
) -> list[int]:
    """Returns the tokens of an output behind those that the matcher has accepted `before`."""
    tokens = list(before)
    while len(tokens) < most:
        token_id = matcher.forced()
        if token_id is None:
            token_id = choose(tokens, np.flatnonzero(matcher.allowed()).tolist())
        matcher.accept(token_id)
        tokens.append(token_id)
        if token_id in (END, OTHER_END):
            break
        followers = matcher.accept_forced(limit)
        tokens += followers
        if END in followers:
            break
    return tokens
