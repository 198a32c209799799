"""Makes a GGUF model's tokenizer bundle, with which routers tokenize exactly as llama.cpp does.

A tokenizer is rebuilt from the metadata, in the `tokenizers` library's JSON format, and compared with llama.cpp's own
on many texts. If it differs anywhere, it is not offered, and routers ask the worker to tokenize. Two kinds are rebuilt:
byte pair encoding by a list of merges, over bytes written as letters (`gpt2`) or over characters (`gemma4`), and
SentencePiece's variant (`llama`), which merges the pair with the highest score first.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import structlog

from tokenbus.protocol.prompt import prompt, tokenizer_bundle
from tokenbus.worker.files.gguf_metadata import Metadata
from tokenbus.worker.tokenizers import model_tokenizer, probe_texts
from tokenbus.worker.tokenizers.gguf_tokenizer import GgufTokenizer
from tokenbus.worker.tokenizers.pre_tokenizers import PRE_TOKENIZERS

Json = dict[str, object]


class TokenizerSpec(NamedTuple):
    """The steps that turn a text into tokens, in the library's terms: the text is normalized and pre-tokenized, and the
    model encodes each part."""

    model: Json
    pre_tokenizers: tuple[Json, ...] = ()
    normalizers: tuple[Json, ...] = ()


def bpe_model(vocabulary: dict[str, int], merges: list[str], **options: bool) -> Json:
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


_CHARACTER_KINDS = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")
"""Values of `tokenizer.ggml.pre` whose merges are over characters."""
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_LINES = split(r"[^\n]+|\n+")
_BYTE_TOKENS_APART = split(r"\A<(?=0x[0-9A-F]{2}>\z)")


def bpe_spec(metadata: Metadata, added_tokens: dict[str, int]) -> TokenizerSpec | None:
    """Returns None for an unknown kind. `added_tokens` are matched first."""
    pre = metadata.text("tokenizer.ggml.pre") or "default"
    if metadata.text("tokenizer.ggml.model") == "gemma4" or pre in _CHARACTER_KINDS:
        return _by_characters(metadata) if pre == "sarvam-moe" else _by_characters_and_lines(metadata, added_tokens)
    if pre not in PRE_TOKENIZERS:
        return None
    patterns, ignore_merges = PRE_TOKENIZERS[pre]
    model = bpe_model(metadata.vocabulary(), _merges(metadata), ignore_merges=ignore_merges)
    return TokenizerSpec(model, pre_tokenizers=(*map(split, patterns), BYTE_LEVEL))


def _by_characters(metadata: Metadata) -> TokenizerSpec:
    model = bpe_model(metadata.vocabulary(), _merges(metadata), byte_fallback=True)
    return TokenizerSpec(model, pre_tokenizers=(_LINES,), normalizers=(REPLACE_SPACES,))


def _by_characters_and_lines(metadata: Metadata, added_tokens: dict[str, int]) -> TokenizerSpec:
    """Builds a tokenizer in which a run of newlines that is itself a token is never merged from parts.

    The `tokenizers` library can look for whole tokens first (`ignore_merges`), but then does so for all texts. Tokens
    that no merge produces must not be found that way, so they get names that no text contains: spaces are replaced, so
    a name with a space is safe. Byte tokens must keep their names; texts that look like them are split instead."""
    merges = _merges(metadata)
    merged = {merge.replace(" ", "", 1) for merge in merges}
    vocabulary = {_name(text, token_id, merged): token_id for text, token_id in metadata.vocabulary().items()}
    model = bpe_model(vocabulary | added_tokens, merges, byte_fallback=True, ignore_merges=True)
    steps = (_LINES, _BYTE_TOKENS_APART)
    return TokenizerSpec(model, pre_tokenizers=steps, normalizers=(REPLACE_SPACES,))


def _merges(metadata: Metadata) -> list[str]:
    return metadata.texts("tokenizer.ggml.merges")


def _name(text: str, token_id: int, merged: set[str]) -> str:
    is_reachable = len(text) == 1 or text in merged or not text.strip("\n") or _BYTE_TOKEN.fullmatch(text)
    return text if is_reachable else f" {token_id}"


_MAX_TOKEN_CHARS = 512
"""Finding the parts of a token takes time quadratic in its length, so a vocabulary with a longer token is refused."""


def sentencepiece_spec(metadata: Metadata, _added_tokens: dict[str, int]) -> TokenizerSpec | None:
    """Returns None if there are no scores to merge by."""
    vocabulary, scores = metadata.vocabulary(), metadata.numbers("tokenizer.ggml.scores")
    if len(scores) < len(vocabulary) or max(map(len, vocabulary)) > _MAX_TOKEN_CHARS:
        return None
    model = bpe_model(vocabulary, merges_of(vocabulary, scores), byte_fallback=True)
    prefix = () if metadata.values.get("tokenizer.ggml.add_space_prefix") is False else (PREPEND_SPACE,)
    return TokenizerSpec(model, normalizers=(*prefix, REPLACE_SPACES))


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


_SPECS: dict[str, Callable[[Metadata, dict[str, int]], TokenizerSpec | None]] = {
    "gpt2": bpe_spec,
    "gemma4": bpe_spec,
    "llama": sentencepiece_spec,
}


def build(metadata: Metadata, reference: GgufTokenizer, pretrained: bytes | None = None) -> bytes | None:
    """Returns the packed bundle, or None if no tokenizer agrees with the reference.

    `pretrained` is the `tokenizer.json` next to the model, which is tried if the rebuilt one does not agree."""
    for text in _candidates(metadata, reference, pretrained):
        if _agrees(text, reference):
            return tokenizer_bundle.pack(tokenizer_bundle.TokenizerBundle(tokenizer_json=text, rules=reference.rules))
    return None


def _candidates(metadata: Metadata, reference: GgufTokenizer, pretrained: bytes | None) -> Iterator[str]:
    model = metadata.text("tokenizer.ggml.model")
    spec = _SPECS[model](metadata, reference.user_defined) if model in _SPECS else None
    if spec is not None:
        yield write(spec, reference.user_defined)
    if pretrained is not None and (text := model_tokenizer.without_special_tokens(pretrained)) is not None:
        yield text


def _agrees(text: str, reference: GgufTokenizer) -> bool:
    try:
        encode = prompt.load_encoder(text)
    except ValueError as error:
        structlog.get_logger().warning("tokenizer_not_built", error=str(error))
        return False
    # The fixed texts are the same for all models; these are made from this model's tokens.
    own = probe_texts.vocabulary_texts(reference.token_bytes, reference.rules.special_tokens, reference.user_defined)
    for probe in (*probe_texts.PROBE_TEXTS, *own):
        if encode(probe) != reference.encode(probe):
            structlog.get_logger().warning("tokenizer_differs", probe=probe[:40])
            return False
    return True
