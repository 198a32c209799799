"""SentencePiece's kind of byte pair encoding (`llama`): the pair whose token has the highest score is merged first."""

from collections.abc import Iterator
from itertools import groupby

from worker.engine.gguf import tokenizer_json
from worker.engine.gguf.metadata import Metadata
from worker.engine.gguf.tokenizer_json import Design

_LONGEST_TOKEN = 512
"""Characters beyond which a token is refused: to look for its parts takes the square of its length."""


def design(metadata: Metadata, _whole: dict[str, int]) -> Design | None:
    """None where there are no scores to merge by."""
    vocabulary, scores = metadata.vocabulary(), metadata.numbers("tokenizer.ggml.scores")
    if len(scores) < len(vocabulary) or max(map(len, vocabulary)) > _LONGEST_TOKEN:
        return None
    model = tokenizer_json.bpe(vocabulary, merges_of(vocabulary, scores), byte_fallback=True)
    prefix = () if metadata.values.get("tokenizer.ggml.add_space_prefix") is False else (tokenizer_json.SPACE_BEFORE,)
    return Design(model, rewrites=(*prefix, tokenizer_json.ESCAPED_SPACES))


def merges_of(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that together are a token, the best score first.

    Of pairs with the same score llama.cpp merges the leftmost, a list of merges the first. It is the same for pairs
    that share no token, and for those that do (`▁▁▁` and `▁▁` in a run of spaces) where the longer left side is first.
    """
    ranked = sorted(vocabulary, key=lambda text: -scores[vocabulary[text]])
    merges: list[tuple[str, str]] = []
    for _, texts in groupby(ranked, key=lambda text: scores[vocabulary[text]]):
        pairs = [pair for text in texts for pair in _pairs(text, vocabulary)]
        merges += sorted(pairs, key=lambda pair: -len(pair[0])) if len(pairs) > 1 else pairs
    return merges


def _pairs(text: str, vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    for end in range(1, len(text)):
        if (left := text[:end]) in vocabulary and (right := text[end:]) in vocabulary:
            yield left, right
