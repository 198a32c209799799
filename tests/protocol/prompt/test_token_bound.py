"""A text never has fewer tokens than the bound says, and of a tokenizer that removes text there is no bound."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.protocol.prompt import prompt, token_bound, tokenizer_bundle
from tokenbus.protocol.wire import internal
from tokenbus.worker.tokenizers import gguf_bundle
from tokenbus.worker.tokenizers.gguf_bundle import Json, TokenizerSpec

LETTERS = list(token_bound.byte_letters())
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["  ", "th", "the", "Ġthe", "====", "========", "================", "é"]


def vocabulary(pieces: list[str]) -> dict[str, int]:
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}


def byte_level(**changes: Any) -> str:
    merges = ["t h", "th e", "Ġ the", "= =", "== ==", "==== ====", "======== ========"]
    pieces = [*LETTERS, "th", "the", "Ġthe", "==", "====", "========", "================"]
    design = TokenizerSpec(gguf_bundle.bpe_model(vocabulary(pieces), merges), pre_tokenizers=(gguf_bundle.BYTE_LEVEL,))
    return changed(gguf_bundle.write(design, {"<whole  thing>": len(vocabulary(pieces))}), changes)


def sentencepiece(**changes: Any) -> str:
    merges = ["t h", "th e", "▁ the", "▁ ▁"]
    pieces = [*BYTE_TOKENS, "t", "h", "e", "▁", "th", "the", "▁the", "▁▁"]
    model = gguf_bundle.bpe_model(vocabulary(pieces), merges, byte_fallback=True)
    rewrites: tuple[Json, ...] = (gguf_bundle.PREPEND_SPACE, gguf_bundle.REPLACE_SPACES)
    text = gguf_bundle.write(TokenizerSpec(model, normalizers=rewrites), {"< a b >": len(vocabulary(pieces))})
    return changed(text, changes)


def changed(text: str, changes: dict[str, Any]) -> str:
    document = json.loads(text)
    for path, value in changes.items():
        *folders, name = path.split("__")
        place = document
        for folder in folders:
            place = place[folder]
        place[name] = value
    return json.dumps(document)


TEXTS = st.lists(st.one_of(st.sampled_from([*WORDS, "<whole  thing>", "< a b >", " ", "="]), st.text(max_size=5))).map(
    "".join
)


@pytest.mark.parametrize("tokenizer", [byte_level, sentencepiece])
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_the_bound(tokenizer: Callable[[], str], text: str) -> None:
    bound = token_bound.from_tokenizer_json(tokenizer())
    assert bound is not None
    assert bound.min_tokens(text) <= len(prompt.load_encoder(tokenizer())(text))


@pytest.mark.parametrize(("text", "least"), [("", 0), ("=" * 160, 10), ("=" * 161, 11), ("the" * 100, 20), ("é", 1)])
def test_the_bound_is_near_where_tokens_are_long(text: str, least: int) -> None:
    bound = token_bound.from_tokenizer_json(byte_level())
    assert bound is not None
    assert least <= bound.min_tokens(text) <= len(prompt.load_encoder(byte_level())(text))


REMOVES = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [REMOVES, gguf_bundle.BYTE_LEVEL]}},
        {"normalizer": {"type": "NFC"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": ""}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"truncation": {"max_length": 512}},
        {"model__type": "WordPiece"},
        {"model__type": "Unigram"},
        {"model__vocab": {"a": 0}},
        {"model__end_of_word_suffix": "</w>"},
        {"added_tokens": [{"id": 1, "content": "<x>", "lstrip": True}]},
    ],
)
def test_there_is_no_bound_where_a_part_of_a_text_may_become_no_token(changes: dict[str, Any]) -> None:
    assert token_bound.from_tokenizer_json(byte_level()) is not None
    assert token_bound.from_tokenizer_json(byte_level(**changes)) is None


def test_there_is_no_bound_of_pieces_that_lack_a_byte() -> None:
    assert token_bound.from_tokenizer_json(sentencepiece()) is not None
    assert token_bound.from_tokenizer_json(sentencepiece(model__byte_fallback=False)) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": 3}', '{"model": {"type": "BPE"}}'])
def test_there_is_no_bound_of_what_is_no_tokenizer(text: str) -> None:
    assert token_bound.from_tokenizer_json(text) is None


def test_a_text_that_is_certainly_too_long_is_refused_before_it_is_tokenized() -> None:
    def encode(text: str) -> list[int]:
        raise AssertionError("it was tokenized")

    rules = tokenizer_bundle.PromptRules(special_tokens={}, vocab_size=300)
    builder = prompt.PromptBuilder(rules, encode, token_bound.from_tokenizer_json(byte_level()))
    with pytest.raises(Exception, match="at least 100 tokens; with one to generate it must fit 100"):
        builder.build(internal.Tokenize(text="=" * 1_600), 99)
    with pytest.raises(AssertionError):
        builder.build(internal.Tokenize(text="=" * 1_600), 100)
