"""Writes a tokenizer in the JSON format of the `tokenizers` library, in which routers read it."""

from typing import NamedTuple

import msgspec

Json = dict[str, object]


class TokenizerSpec(NamedTuple):
    """What becomes of a text: it is rewritten, then cut, then each piece is made into tokens."""

    model: Json
    pre_tokenizers: tuple[Json, ...] = ()
    normalizers: tuple[Json, ...] = ()


def bpe(vocabulary: dict[str, int], merges: list[str], **options: bool) -> Json:
    """`merges` in their order, the two sides of each with a space between them."""
    return {"type": "BPE", "vocab": vocabulary, "merges": merges, **options}


def split(pattern: str) -> Json:
    """Each match is a piece, and so is what lies between two matches."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


BYTE_LEVEL: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
REPLACE_SPACES: Json = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND_SPACE: Json = {"type": "Prepend", "prepend": "▁"}


def write(tokenizer_spec: TokenizerSpec, added_tokens: dict[str, int]) -> str:
    """`added_tokens` are tokens that are found in a text before anything else."""
    added = [{"id": token_id, "content": text} | _VERBATIM for text, token_id in added_tokens.items()]
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": _sequence("normalizers", tokenizer_spec.normalizers),
        "pre_tokenizer": _sequence("pretokenizers", tokenizer_spec.pre_tokenizers),
        "post_processor": None,
        "decoder": None,
        "model": tokenizer_spec.model,
    }
    return msgspec.json.encode(document).decode()


_VERBATIM = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}


def _sequence(name: str, steps: tuple[Json, ...]) -> Json | None:
    return {"type": "Sequence", name: steps} if steps else None
