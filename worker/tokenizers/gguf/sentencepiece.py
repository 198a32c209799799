"""SentencePiece's variant of byte pair encoding (`llama`), which merges the pair with the highest score first."""

from tokenbus.worker.files.gguf_metadata import Metadata
from tokenbus.worker.tokenizers.gguf import tokenizer_json
from tokenbus.worker.tokenizers.gguf.tokenizer_json import TokenizerSpec

_MAX_TOKEN_CHARS = 512
"""Finding the parts of a token takes time quadratic in its length, so a vocabulary with a longer token is refused."""


def tokenizer_spec(metadata: Metadata, _added_tokens: dict[str, int]) -> TokenizerSpec | None:
    """Returns None if there are no scores to merge by."""
    vocabulary, scores = metadata.vocabulary(), metadata.numbers("tokenizer.ggml.scores")
    if len(scores) < len(vocabulary) or max(map(len, vocabulary)) > _MAX_TOKEN_CHARS:
        return None
    model = tokenizer_json.bpe(vocabulary, merges_of(vocabulary, scores), byte_fallback=True)
    prefix = () if metadata.values.get("tokenizer.ggml.add_space_prefix") is False else (tokenizer_json.PREPEND_SPACE,)
    return TokenizerSpec(model, normalizers=(*prefix, tokenizer_json.REPLACE_SPACES))


def merges_of(vocabulary: dict[str, int], scores: list[float]) -> list[str]:
    """Returns every pair of tokens that together form a token, best score first.

    If scores are equal, llama.cpp merges the leftmost pair of the text, and the `tokenizers` library the first pair of
    the list. The result is the same for pairs that are never adjacent in a text. In runs of spaces, whose tokens may
    share a score, it is the same if the pair with the longer left side comes first. Tokens with a space are left out:
    no text contains one once spaces are replaced."""
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
