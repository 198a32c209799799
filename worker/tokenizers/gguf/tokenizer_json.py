"""Writes a tokenizer in the `tokenizers` library's JSON format, which routers read."""

from typing import NamedTuple

import msgspec

Json = dict[str, object]


class TokenizerSpec(NamedTuple):
    """The steps that turn a text into tokens, in the library's terms: the text is normalized and pre-tokenized, and the
    model encodes each part."""

    model: Json
    pre_tokenizers: tuple[Json, ...] = ()
    normalizers: tuple[Json, ...] = ()


def bpe(vocabulary: dict[str, int], merges: list[str], **options: bool) -> Json:
    """Returns a byte pair encoding model. Each merge is two tokens separated by a space."""
    return {"type": "BPE", "vocab": vocabulary, "merges": merges, **options}


def split(pattern: str) -> Json:
    """Returns a pre-tokenizer that makes each match, and each text between two matches, a part."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


BYTE_LEVEL: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
REPLACE_SPACES: Json = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND_SPACE: Json = {"type": "Prepend", "prepend": "▁"}
_VERBATIM = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}


def write(spec: TokenizerSpec, added_tokens: dict[str, int]) -> str:
    """Returns the document. `added_tokens` are matched before any other step."""
    added = [{"id": token_id, "content": text} | _VERBATIM for text, token_id in added_tokens.items()]
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": _sequence("normalizers", spec.normalizers),
        "pre_tokenizer": _sequence("pretokenizers", spec.pre_tokenizers),
        "post_processor": None,
        "decoder": None,
        "model": spec.model,
    }
    return msgspec.json.encode(document).decode()


def _sequence(name: str, steps: tuple[Json, ...]) -> Json | None:
    return {"type": "Sequence", name: steps} if steps else None
