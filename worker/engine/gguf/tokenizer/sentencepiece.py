"""SentencePiece's kind of byte pair encoding (`llama`): the pair whose token has the highest score is merged first."""

from tokenbus.worker.engine.gguf.metadata import Metadata
from tokenbus.worker.engine.gguf.tokenizer import tokenizer_json
from tokenbus.worker.engine.gguf.tokenizer.tokenizer_json import TokenizerSpec

_LONGEST_TOKEN = 512
"""Characters beyond which a token is refused: to look for its parts takes the square of its length."""


def tokenizer_spec(metadata: Metadata, _added_tokens: dict[str, int]) -> TokenizerSpec | None:
    """None where there are no scores to merge by."""
    vocabulary, scores = metadata.vocabulary(), metadata.numbers("tokenizer.ggml.scores")
    if len(scores) < len(vocabulary) or max(map(len, vocabulary)) > _LONGEST_TOKEN:
        return None
    model = tokenizer_json.bpe(vocabulary, merges_of(vocabulary, scores), byte_fallback=True)
    prefix = () if metadata.values.get("tokenizer.ggml.add_space_prefix") is False else (tokenizer_json.PREPEND_SPACE,)
    return TokenizerSpec(model, normalizers=(*prefix, tokenizer_json.REPLACE_SPACES))


def merges_of(vocabulary: dict[str, int], scores: list[float]) -> list[str]:
    """Every pair of tokens that together are a token, the best score first.

    Of pairs with the same score llama.cpp merges the leftmost, a list of merges the first. That is the same for pairs
    that no text has side by side, and in a run of spaces, whose tokens may share a score, if the longer left side is
    first. Tokens with a space are left out: no text has one, since spaces are escaped.
    """
    by_score: dict[float, list[str]] = {}
    for text, token_id in vocabulary.items():
        if " " not in text:
            by_score.setdefault(scores[token_id], []).append(text)
    merges: list[str] = []
    for score in sorted(by_score, reverse=True):
        merges += [f"{left} {right}" for left, right in _pairs(by_score[score], vocabulary)]
    return merges


def _pairs(texts: list[str], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    pairs = [
        (left, right)
        for text in texts
        for end in range(len(text) - 1, 0, -1)
        if (left := text[:end]) in vocabulary and (right := text[end:]) in vocabulary
    ]
    return pairs if len(texts) == 1 else sorted(pairs, key=lambda pair: -len(pair[0]))
