"""Byte pair encoding by a list of merges: of bytes written as letters (`gpt2`), or of characters (`gemma4`)."""

import re

from tokenbus.worker.engine.gguf.metadata import Metadata
from tokenbus.worker.engine.gguf.tokenizer import tokenizer_json
from tokenbus.worker.engine.gguf.tokenizer.pretokenize import CUTS
from tokenbus.worker.engine.gguf.tokenizer.tokenizer_json import Design

_CHARACTER_KINDS = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")
"""What `tokenizer.ggml.pre` names where the merges are of characters."""
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_LINES = tokenizer_json.cut(r"[^\n]+|\n+")
_BYTE_TOKENS_APART = tokenizer_json.cut(r"\A<(?=0x[0-9A-F]{2}>\z)")


def design(metadata: Metadata, whole: dict[str, int]) -> Design | None:
    """None for a kind that is not known. `whole` are tokens that are found before anything else."""
    pre = metadata.text("tokenizer.ggml.pre") or "default"
    if metadata.text("tokenizer.ggml.model") == "gemma4" or pre in _CHARACTER_KINDS:
        return _of_characters(metadata) if pre == "sarvam-moe" else _of_characters_with_lines_first(metadata, whole)
    return _of_bytes(metadata, pre) if pre in CUTS else None


def _of_bytes(metadata: Metadata, pre: str) -> Design:
    model = tokenizer_json.bpe(
        metadata.vocabulary(), metadata.texts("tokenizer.ggml.merges"), ignore_merges=CUTS[pre].whole_words_first
    )
    cuts = [tokenizer_json.cut(pattern) for pattern in CUTS[pre].patterns]
    return Design(model, cuts=(*cuts, tokenizer_json.BYTES_AS_LETTERS))


def _of_characters(metadata: Metadata) -> Design:
    model = tokenizer_json.bpe(metadata.vocabulary(), metadata.texts("tokenizer.ggml.merges"), byte_fallback=True)
    return Design(model, cuts=(_LINES,), rewrites=(tokenizer_json.ESCAPED_SPACES,))


def _of_characters_with_lines_first(metadata: Metadata, whole: dict[str, int]) -> Design:
    """A run of newlines that is a token is never merged from parts.

    The `tokenizers` library can take whole tokens first for all texts only. So what no merge makes gets a name that no
    text has, since spaces are escaped; byte tokens need their own names, and texts that look like them are cut instead.
    """
    merges = metadata.texts("tokenizer.ggml.merges")
    made = {merge.replace(" ", "", 1) for merge in merges}
    vocabulary = {_name(text, token_id, made): token_id for text, token_id in metadata.vocabulary().items()}
    model = tokenizer_json.bpe(vocabulary | whole, merges, byte_fallback=True, ignore_merges=True)
    return Design(model, cuts=(_LINES, _BYTE_TOKENS_APART), rewrites=(tokenizer_json.ESCAPED_SPACES,))


def _name(text: str, token_id: int, made: set[str]) -> str:
    is_found = len(text) == 1 or text in made or not text.strip("\n") or _BYTE_TOKEN.fullmatch(text)
    return text if is_found else f" {token_id}"
