"""Byte pair encoding by a list of merges, over bytes written as letters (`gpt2`) or over characters (`gemma4`)."""

import re

from tokenbus.worker.files.gguf_metadata import Metadata
from tokenbus.worker.tokenizers.gguf import tokenizer_json
from tokenbus.worker.tokenizers.gguf.pre_tokenizers import PRE_TOKENIZERS
from tokenbus.worker.tokenizers.gguf.tokenizer_json import TokenizerSpec

_CHARACTER_KINDS = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")
"""Values of `tokenizer.ggml.pre` whose merges are over characters."""
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_LINES = tokenizer_json.split(r"[^\n]+|\n+")
_BYTE_TOKENS_APART = tokenizer_json.split(r"\A<(?=0x[0-9A-F]{2}>\z)")


def tokenizer_spec(metadata: Metadata, added_tokens: dict[str, int]) -> TokenizerSpec | None:
    """Returns None for an unknown kind. `added_tokens` are matched first."""
    pre = metadata.text("tokenizer.ggml.pre") or "default"
    if metadata.text("tokenizer.ggml.model") == "gemma4" or pre in _CHARACTER_KINDS:
        return _by_characters(metadata) if pre == "sarvam-moe" else _by_characters_and_lines(metadata, added_tokens)
    if pre not in PRE_TOKENIZERS:
        return None
    patterns, ignore_merges = PRE_TOKENIZERS[pre]
    model = tokenizer_json.bpe(metadata.vocabulary(), _merges(metadata), ignore_merges=ignore_merges)
    return TokenizerSpec(model, pre_tokenizers=(*map(tokenizer_json.split, patterns), tokenizer_json.BYTE_LEVEL))


def _by_characters(metadata: Metadata) -> TokenizerSpec:
    model = tokenizer_json.bpe(metadata.vocabulary(), _merges(metadata), byte_fallback=True)
    return TokenizerSpec(model, pre_tokenizers=(_LINES,), normalizers=(tokenizer_json.REPLACE_SPACES,))


def _by_characters_and_lines(metadata: Metadata, added_tokens: dict[str, int]) -> TokenizerSpec:
    """Builds a tokenizer in which a run of newlines that is itself a token is never merged from parts.

    The `tokenizers` library can look for whole tokens first (`ignore_merges`), but then does so for all texts. Tokens
    that no merge produces must not be found that way, so they get names that no text contains: spaces are replaced, so
    a name with a space is safe. Byte tokens must keep their names; texts that look like them are split instead."""
    merges = _merges(metadata)
    merged = {merge.replace(" ", "", 1) for merge in merges}
    vocabulary = {_name(text, token_id, merged): token_id for text, token_id in metadata.vocabulary().items()}
    model = tokenizer_json.bpe(vocabulary | added_tokens, merges, byte_fallback=True, ignore_merges=True)
    steps = (_LINES, _BYTE_TOKENS_APART)
    return TokenizerSpec(model, pre_tokenizers=steps, normalizers=(tokenizer_json.REPLACE_SPACES,))


def _merges(metadata: Metadata) -> list[str]:
    return metadata.texts("tokenizer.ggml.merges")


def _name(text: str, token_id: int, merged: set[str]) -> str:
    is_reachable = len(text) == 1 or text in merged or not text.strip("\n") or _BYTE_TOKEN.fullmatch(text)
    return text if is_reachable else f" {token_id}"
