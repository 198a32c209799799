"""Writes a tokenizer in the JSON format of the `tokenizers` library, in which routers read it."""

from typing import NamedTuple

import msgspec

Json = dict[str, object]


class Design(NamedTuple):
    """What becomes of a text: it is rewritten, then cut, then each piece is made into tokens."""

    model: Json
    cuts: tuple[Json, ...] = ()
    rewrites: tuple[Json, ...] = ()


def bpe(vocabulary: dict[str, int], merges: list[str], **options: bool) -> Json:
    """`merges` in their order, the two sides of each with a space between them."""
    return {"type": "BPE", "vocab": vocabulary, "merges": merges, **options}


def cut(pattern: str) -> Json:
    """Each match is a piece, and so is what lies between two matches."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


BYTES_AS_LETTERS: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
ESCAPED_SPACES: Json = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
SPACE_BEFORE: Json = {"type": "Prepend", "prepend": "▁"}


def write(design: Design, whole: dict[str, int]) -> str:
    """`whole` are tokens that are found in a text before anything else."""
    added = [{"id": token_id, "content": text} | _AS_IT_IS for text, token_id in whole.items()]
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": _sequence("normalizers", design.rewrites),
        "pre_tokenizer": _sequence("pretokenizers", design.cuts),
        "post_processor": None,
        "decoder": None,
        "model": design.model,
    }
    return msgspec.json.encode(document).decode()


_AS_IT_IS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}


def _sequence(name: str, steps: tuple[Json, ...]) -> Json | None:
    return {"type": "Sequence", name: steps} if steps else None
