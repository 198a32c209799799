"""Bundles are offered for most of the vocabularies that llama.cpp's own tests use, and agree with it on its test texts.

The files come with the source of llama-cpp-python, and are cached beside its wheel.
"""

from pathlib import Path

import pytest

from tests.support import llama_cpp_source, vocabularies
from tokenbus.protocol.prompt import prompt, tokenizer_bundle
from tokenbus.worker.tokenizers import gguf_bundle

OFFERED = {
    "aquila": True,
    "baichuan": True,
    "bert-bge": False,
    "command-r": True,
    "deepseek-coder": True,
    "deepseek-llm": True,
    "falcon": True,
    "gemma-4": True,
    "gpt-2": True,
    "gpt-neox": True,
    "llama-bpe": True,
    "llama-spm": True,
    "mpt": True,
    "nomic-bert-moe": False,
    "phi-3": True,
    "qwen2": True,
    "qwen35": True,
    "refact": True,
    "starcoder": True,
}
"""No bundles are offered for WordPiece and Unigram, which only embedding models use."""

QUICK = {"bert-bge", "gpt-2", "llama-spm", "nomic-bert-moe", "qwen2"}
"""One or two vocabularies of each kind, and none of the largest. The others are merged like these, and how each of them
cuts a text, test_tokenizers.py tries on a small vocabulary."""

_BETWEEN = "\n__ggml_vocab_test__\n"


@pytest.fixture(scope="module")
def folder() -> Path:
    return llama_cpp_source.folder("vocabularies")


def texts_of(path: Path) -> list[str]:
    """llama.cpp's test texts for a vocabulary, if it has any."""
    source = path.with_name(path.name + ".inp")
    return source.read_text().removesuffix(_BETWEEN).split(_BETWEEN) if source.exists() else []


def ids_of(path: Path) -> list[list[int]]:
    """The ids that llama.cpp's tests expect for those texts."""
    source = path.with_name(path.name + ".out")
    return [[int(number) for number in line.split()] for line in source.read_text().splitlines()]


def test_the_table_names_every_vocabulary_that_there_is(folder: Path) -> None:
    assert {path.stem.removeprefix("ggml-vocab-") for path in folder.glob("*.gguf")} == set(OFFERED)


@pytest.mark.parametrize(
    ("name", "offered"),
    [
        pytest.param(
            *(name, offered),
            id=f"{name}-{'offered' if offered else 'asked'}",
            marks=[pytest.mark.long] if name not in QUICK else [],
        )
        for name, offered in OFFERED.items()
    ],
)
def test_a_vocabulary_is_offered_where_it_can_be_rebuilt(folder: Path, name: str, offered: bool) -> None:
    path = folder / f"ggml-vocab-{name}.gguf"
    with vocabularies.load(path) as loaded:
        packed = gguf_bundle.build(*loaded)
        assert (packed is not None) == offered
        if packed is None:
            return
        encode = prompt.load_encoder(tokenizer_bundle.unpack(packed).tokenizer_json)
        texts = texts_of(path)
        encoded = [encode(text) for text in texts]
        assert encoded == [loaded.tokenizer.encode(text) for text in texts]
        assert not texts or encoded == ids_of(path)
