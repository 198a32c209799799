"""A published tokenizer's vocabulary in GGUF's form: byte-level byte pair encoding or SentencePiece's."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import Regex, Tokenizer, pre_tokenizers

from tokenbus.protocol.prompt.tokenizer_bundle import PromptRules
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.convert.config import CONVERTER
from tokenbus.worker.files.regular import MAX_TOKENIZER_BYTES, read_regular
from tokenbus.worker.tokenizers.onnx_tokenizer import OnnxTokenizer
from tokenbus.worker.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from tokenbus.worker.tokenizers.probe_texts import PROBE_TEXTS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""GGUF's token types."""
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_UNMERGED_SCORE = -1e6


class _Model(msgspec.Struct, frozen=True):
    type: str | None = None
    vocab: Any = None
    merges: list[Any] = []
    byte_fallback: bool | None = False
    ignore_merges: bool | None = False
    unk_token: str | None = None


class _Document(msgspec.Struct, frozen=True):
    """The fields of `tokenizer.json` that matter here."""

    model: _Model = _Model()
    added_tokens: list[dict[str, Any]] = []


class Vocabulary(NamedTuple):
    """The values of a GGUF's `tokenizer.*` keys."""

    model: str
    pre: str
    texts: list[str]
    types: list[int]
    scores: list[float]
    """For SentencePiece only."""
    merges: list[str]
    """For byte pair encoding only."""
    rules: PromptRules
    eos_token_id: int | None
    adds_space: bool


def read(sidecars: dict[str, Path], size: int, where: Path) -> Vocabulary:
    """Returns the vocabulary of `size` tokens. Raises ModelError if there is none that llama.cpp supports."""
    rules = OnnxTokenizer(sidecars, size, str(where)).rules
    path = sidecars["tokenizer.json"]
    content = read_regular(path, MAX_TOKENIZER_BYTES)
    try:
        document = msgspec.json.decode(content, type=_Document)
    except msgspec.DecodeError as error:
        raise ModelError(f"{path}: {error}; fetch it again") from error
    if document.model.type != "BPE" or not isinstance(document.model.vocab, dict):
        raise ModelError(f"{path}: a vocabulary of type {document.model.type} is not converted here; use {CONVERTER}")
    tokenizer = Tokenizer.from_buffer(content)
    texts, types = _tokens(document, size)
    is_pieces = bool(document.model.byte_fallback)
    merges = [" ".join(one) if isinstance(one, list) else str(one) for one in document.model.merges]
    return Vocabulary(
        model="llama" if is_pieces else "gpt2",
        pre="default" if is_pieces else _pre_tokenizer(tokenizer, bool(document.model.ignore_merges), path),
        texts=texts,
        types=types,
        scores=_scores(texts, merges) if is_pieces else [],
        merges=[] if is_pieces else merges,
        rules=rules,
        eos_token_id=tokenizer.token_to_id(rules.eos_token) if rules.eos_token else None,
        adds_space=is_pieces and tokenizer.encode("a", add_special_tokens=False).tokens[:1] == ["▁a"],
    )


def _tokens(document: _Document, size: int) -> tuple[list[str], list[int]]:
    """Returns texts and types by token id. Models have more logits than tokens; the rest get placeholder names."""
    texts, types = [f"[PAD{number}]" for number in range(size)], [UNUSED] * size
    for text, number in document.model.vocab.items():
        texts[number] = text
        types[number] = BYTE if document.model.byte_fallback and _BYTE_TOKEN.fullmatch(text) else NORMAL
    for added in document.added_tokens:
        texts[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    if document.model.unk_token in texts and document.model.byte_fallback:
        types[texts.index(document.model.unk_token)] = UNKNOWN
    return texts, types


def _scores(texts: list[str], merges: list[str]) -> list[float]:
    """Returns scores that make llama.cpp merge in the order of the merges."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", "", 1), rank)
    return [-float(ranks[text]) if text in ranks else _UNMERGED_SCORE for text in texts]


def _pre_tokenizer(tokenizer: Tokenizer, ignore_merges: bool, path: Path) -> str:
    """Returns llama.cpp's name for the pre-tokenizer that splits the probe texts as the published one does."""
    if tokenizer.pre_tokenizer is not None:
        cuts = _cuts(tokenizer.pre_tokenizer)
        known: dict[object, bool] = {}
        for name, candidate in PRE_TOKENIZERS.items():
            if candidate.ignore_merges == ignore_merges:
                if candidate not in known:
                    steps = [pre_tokenizers.Split(Regex(one), "isolated") for one in candidate.patterns]
                    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
                    known[candidate] = _cuts(pre_tokenizers.Sequence([*steps, last])) == cuts
                if known[candidate]:
                    return name
    raise ModelError(f"{path}: llama.cpp has no pre-tokenizer that cuts texts as this one does; use {CONVERTER}")


def _cuts(pre_tokenizer: Any) -> list[list[str]]:
    return [[part for part, _ in pre_tokenizer.pre_tokenize_str(text)] for text in PROBE_TEXTS]
