"""Byte pair encoding by a list of merges: of bytes written as letters (`gpt2`), or of characters (`gemma4`)."""

import re

from tokenbus.worker.engine.gguf.metadata import Metadata
from tokenbus.worker.engine.gguf.tokenizer import tokenizer_json
from tokenbus.worker.engine.gguf.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from tokenbus.worker.engine.gguf.tokenizer.tokenizer_json import TokenizerSpec

_CHARACTER_KINDS = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")
"""What `tokenizer.ggml.pre` names where the merges are of characters."""
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_LINES = tokenizer_json.split(r"[^\n]+|\n+")
_BYTE_TOKENS_APART = tokenizer_json.split(r"\A<(?=0x[0-9A-F]{2}>\z)")


def tokenizer_spec(metadata: Metadata, added_tokens: dict[str, int]) -> TokenizerSpec | None:
    """None for a kind that is not known. `added_tokens` are tokens that are found before anything else."""
    pre = metadata.text("tokenizer.ggml.pre") or "default"
    if metadata.text("tokenizer.ggml.model") == "gemma4" or pre in _CHARACTER_KINDS:
        return (
            _of_characters(metadata) if pre == "sarvam-moe" else _of_characters_with_lines_first(metadata, added_tokens)
        )
    return _of_bytes(metadata, pre) if pre in PRE_TOKENIZERS else None


def _of_bytes(metadata: Metadata, pre: str) -> TokenizerSpec:
    model = tokenizer_json.bpe(
        metadata.vocabulary(), metadata.texts("tokenizer.ggml.merges"), ignore_merges=PRE_TOKENIZERS[pre].ignore_merges
    )
    cuts = [tokenizer_json.split(pattern) for pattern in PRE_TOKENIZERS[pre].patterns]
    return TokenizerSpec(model, pre_tokenizers=(*cuts, tokenizer_json.BYTE_LEVEL))


def _of_characters(metadata: Metadata) -> TokenizerSpec:
    model = tokenizer_json.bpe(metadata.vocabulary(), metadata.texts("tokenizer.ggml.merges"), byte_fallback=True)
    return TokenizerSpec(model, pre_tokenizers=(_LINES,), normalizers=(tokenizer_json.REPLACE_SPACES,))


def _of_characters_with_lines_first(metadata: Metadata, added_tokens: dict[str, int]) -> TokenizerSpec:
    """A run of newlines that is a token is never merged from parts.

    The `tokenizers` library can take whole tokens first for all texts only. So what no merge makes gets a name that no
    text has, since spaces are escaped; byte tokens need their own names, and texts that look like them are cut instead.
    """
    merges = metadata.texts("tokenizer.ggml.merges")
    made = {merge.replace(" ", "", 1) for merge in merges}
    vocabulary = {_name(text, token_id, made): token_id for text, token_id in metadata.vocabulary().items()}
    model = tokenizer_json.bpe(vocabulary | added_tokens, merges, byte_fallback=True, ignore_merges=True)
    return TokenizerSpec(
        model, pre_tokenizers=(_LINES, _BYTE_TOKENS_APART), normalizers=(tokenizer_json.REPLACE_SPACES,)
    )


def _name(text: str, token_id: int, made: set[str]) -> str:
    is_found = len(text) == 1 or text in made or not text.strip("\n") or _BYTE_TOKEN.fullmatch(text)
    return text if is_found else f" {token_id}"
