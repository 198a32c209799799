"""A tokenizer rebuilt from a vocabulary of any kind makes the same ids as llama.cpp, for any text."""

import random
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import vocabularies
from tests.support.in_part import in_part
from tests.support.vocabularies import Loaded
from tokenbus.protocol.prompt import prompt, tokenizer_bundle
from tokenbus.protocol.wire import errors
from tokenbus.worker.tokenizers import gguf_bundle, probe_texts
from tokenbus.worker.tokenizers.pre_tokenizers import PRE_TOKENIZERS

Tokenize = Callable[[str], list[int]]

LETTERS = (
    "aBsStTrReEvVlLdmx'' \n\r\t123450.,/-(`$<|!;_IMGIMG"
    "éΣжǅ\u0301漢カ가、。\u3000\u00a0½٣ไ\u093eк👍ſ’…！ªㄅ\u200b\u0085\x1c"
)
NAMES_OF_CUT = {
    cut: [name for name in PRE_TOKENIZERS if PRE_TOKENIZERS[name] == cut] for cut in PRE_TOKENIZERS.values()
}
TELLING = (
    "IT's it'sX 12345 a1234567 don'T\n\n  x   1 ABcDe //\r\n é\u0301x 漢カ가。 ½٣ <|a|> $1.50 \t\n漢1 ",
    "real 'llx123",
)


def tokenizer_of(loaded: Loaded) -> Tokenize | None:
    """The tokenizer that a router makes of the bundle, if one is offered."""
    packed = gguf_bundle.build(*loaded)
    if packed is None:
        return None
    return prompt.load_encoder(tokenizer_bundle.unpack(packed).tokenizer_json)


def byte_letters() -> list[str]:
    """GPT-2's letter for each byte: a printable byte stands for itself, any other for a letter from U+0100 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + unseen.index(byte)) for byte in range(256)]


BYTE_LETTERS = byte_letters()


def cut_sensitive(pre: str) -> dict[str, vocabularies.Entry]:
    """A vocabulary in which any two neighbouring bytes merge, so that nearly every split shows in the ids."""
    used = [BYTE_LETTERS[byte] for byte in sorted(set(LETTERS.encode()))]
    pairs = list(product(used, used))
    random.Random(0).shuffle(pairs)
    pairs += [("ĠĠ", "ĠĠ"), ("ĠĠĠĠ", "ĠĠ"), ("ĊĊ", "Ċ")]
    unmerged = ["Ġsea", "123", "real", "'ll", "".join(BYTE_LETTERS[byte] for byte in "漢カ".encode())]
    tokens = [*BYTE_LETTERS, *(left + right for left, right in pairs), *unmerged, "<end>"]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [1] * (len(tokens) - 1) + [3],
        "merges": [f"{left} {right}" for left, right in pairs],
        "bos_token_id": len(tokens) - 1,
        "eos_token_id": len(tokens) - 1,
    }


@pytest.mark.parametrize("pre", in_part([names[0] for names in NAMES_OF_CUT.values()], 3))
def test_every_kind_of_cut_is_llama_cpps(tmp_path: Path, pre: str) -> None:
    chance = random.Random(pre)
    with vocabularies.load(vocabularies.write(tmp_path / "vocab.gguf", cut_sensitive(pre))) as loaded:
        encode = tokenizer_of(loaded)
        assert encode is not None
        for _ in range(100):
            text = "".join(chance.choice(LETTERS) for _ in range(chance.randint(1, 40)))
            assert encode(text) == loaded.tokenizer.encode(text), text


@pytest.mark.parametrize("names", in_part(NAMES_OF_CUT.values(), 3), ids=lambda names: names[0])
def test_all_names_of_a_cut_mean_the_same_to_llama_cpp(tmp_path: Path, names: list[str]) -> None:
    made = []
    for name in names:
        with vocabularies.load(vocabularies.write(tmp_path / "vocab.gguf", cut_sensitive(name))) as loaded:
            made.append([loaded.tokenizer.encode(text) for text in TELLING])
    assert all(ids == made[0] for ids in made)


@pytest.mark.parametrize(("pre", "other"), [("qwen2", "llama-bpe"), ("llama-bpe", "dbrx"), ("gpt-2", "default")])
def test_a_vocabulary_that_is_cut_otherwise_than_its_kind_says_is_not_offered(
    tmp_path: Path, pre: str, other: str
) -> None:
    with vocabularies.load(vocabularies.write(tmp_path / "vocab.gguf", cut_sensitive(pre))) as loaded:
        facts = loaded.metadata._replace(values=loaded.metadata.values | {"tokenizer.ggml.pre": other})
        assert gguf_bundle.build(facts, loaded.tokenizer) is None


RUNS = ["a", "A", " ", "\n", "!", "漢", "a b", "/\n", "aB", "e\u0301"]
"""Of these repeated, each kind of cut matches some as a whole."""


@pytest.mark.parametrize("pre", in_part([names[0] for names in NAMES_OF_CUT.values()], 3))
def test_no_text_is_too_long_for_a_tokenizer_that_calls_itself_for_each_character(tmp_path: Path, pre: str) -> None:
    chance = random.Random(pre)
    lines = "\n".join("".join(chance.choice(LETTERS) for _ in range(50)) for _ in range(1_000))
    with vocabularies.load(vocabularies.write(tmp_path / "vocab.gguf", cut_sensitive(pre))) as loaded:
        expected = loaded.tokenizer.encode(lines), loaded.tokenizer.encode_with_special_tokens(lines)
        loaded.tokenizer.encode_long_with(gguf_bundle.build(*loaded))
        assert (loaded.tokenizer.encode(lines), loaded.tokenizer.encode_with_special_tokens(lines)) == expected
        for run in RUNS:
            assert loaded.tokenizer.encode(run * (60_000 // len(run)))


@pytest.mark.parametrize("pre", ["tiny_aya", "afmoe"])
def test_a_long_number_takes_no_more_time_than_its_length_demands(tmp_path: Path, pre: str) -> None:
    with vocabularies.load(vocabularies.write(tmp_path / "vocab.gguf", cut_sensitive(pre))) as loaded:
        encode = tokenizer_of(loaded)
        assert encode is not None
        began = time.process_time()
        assert encode("1" * 100_000)
        assert time.process_time() - began < 3


@pytest.mark.parametrize("run", RUNS)
def test_a_text_that_would_overflow_the_stack_is_refused_if_there_is_no_other_tokenizer(
    tmp_path: Path, run: str
) -> None:
    with vocabularies.load(vocabularies.write(tmp_path / "vocab.gguf", cut_sensitive("gpt-4o"))) as loaded:
        with pytest.raises(errors.RequestError, match="a line of more than 8,192 characters"):
            loaded.tokenizer.encode(run * (60_000 // len(run)))
        assert loaded.tokenizer.encode("a word\n" * 100_000)


BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
MADE = [
    "▁▁",
    "▁▁▁",
    "▁▁▁▁",
    "th",
    "▁th",
    "he",
    "the",
    "▁the",
    "in",
    "ing",
    "thing",
    "▁thing",
    "aa",
    "aaa",
    "aaaa",
    "éa",
]
CHARACTERS = ["▁", *"thengiaé漢.<>s/"]
WHOLE = ["<mark>", "  \n", "ab b"]
BITS = [*"thengiaé漢.<>s/ \n▁bкm\0", "the", "<mark>", " thing", "   ", "</s>", "\n\n", "<0x41>", "  \n", "ab b"]
texts = st.lists(st.sampled_from(BITS), max_size=12).map("".join)


@pytest.fixture(scope="module", params=[True, False], ids=["space-before", "as-it-is"])
def by_score(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Loaded]:
    """A vocabulary of SentencePiece's kind, in which runs of spaces share a score, as in Llama 2."""
    tokens = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *CHARACTERS, *MADE, *WHOLE]
    scores = [-1e9 if set(text) == {"▁"} else -float(number) for number, text in enumerate(tokens)]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(CHARACTERS) + len(MADE)) + [4] * len(WHOLE)
    entries: dict[str, vocabularies.Entry] = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds}
    path = tmp_path_factory.mktemp("by-score") / "vocab.gguf"
    with vocabularies.load(vocabularies.write(path, entries | {"add_space_prefix": request.param})) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def of_characters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """A vocabulary of Gemma 4's kind: it merges characters, and runs of newlines are tokens that are never merged."""
    tokens = ["<unk>", "<s>", "</s>", "<table>", *BYTE_TOKENS, *CHARACTERS, "\n", "\n\n", "\n\n\n", *MADE, *WHOLE]
    kinds = [2, 3, 3, 1] + [6] * 256 + [1] * (len(CHARACTERS) + 3 + len(MADE)) + [4] * len(WHOLE)
    merges = [f"{text[:end]} {text[end:]}" for text in MADE for end in range(1, len(text)) if text[:end] in tokens]
    entries: dict[str, vocabularies.Entry] = {
        "model": "gemma4",
        "tokens": tokens,
        "token_type": kinds,
        "merges": [merge for merge in merges if merge.partition(" ")[2] in tokens],
        "bos_token_id": 1,
    }
    path = tmp_path_factory.mktemp("of-characters") / "vocab.gguf"
    with vocabularies.load(vocabularies.write(path, entries)) as loaded:
        yield loaded


@given(text=texts)
@settings(max_examples=300)
def test_tokens_merged_by_score_are_llama_cpps(by_score: Loaded, offered_by_score: Tokenize, text: str) -> None:
    assert offered_by_score(text) == by_score.tokenizer.encode(text)


@given(text=texts)
@settings(max_examples=300)
def test_tokens_merged_of_characters_are_llama_cpps(
    of_characters: Loaded, offered_of_characters: Tokenize, text: str
) -> None:
    assert offered_of_characters(text) == of_characters.tokenizer.encode(text)


@pytest.fixture(scope="module")
def offered_by_score(by_score: Loaded) -> Tokenize:
    encode = tokenizer_of(by_score)
    assert encode is not None
    return encode


@pytest.fixture(scope="module")
def offered_of_characters(of_characters: Loaded) -> Tokenize:
    encode = tokenizer_of(of_characters)
    assert encode is not None
    return encode


@pytest.mark.parametrize("text", ["<table>", "<0x41>", "<table>\n<0x41>", "\n\n", "\n" * 7, "</s>"])
def test_a_line_that_looks_like_a_token_is_merged_all_the_same(
    of_characters: Loaded, offered_of_characters: Tokenize, text: str
) -> None:
    assert offered_of_characters(text) == of_characters.tokenizer.encode(text)


def test_tokens_found_whole_that_overlap_so_that_the_order_of_search_matters_are_not_offered(tmp_path: Path) -> None:
    entries = cut_sensitive("gpt-2")
    tokens, kinds = entries["tokens"], entries["token_type"]
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)
    entries |= {"tokens": [*tokens, "<a><b", "<b><c>"], "token_type": [*kinds, 4, 4]}
    with vocabularies.load(vocabularies.write(tmp_path / "vocab.gguf", entries)) as loaded:
        assert set(loaded.tokenizer.user_defined) == {"<a><b", "<b><c>"}
        assert tokenizer_of(loaded) is None


def test_scores_that_do_not_cover_the_vocabulary_are_not_offered(by_score: Loaded) -> None:
    facts = by_score.metadata._replace(values=by_score.metadata.values | {"tokenizer.ggml.scores": [0.0]})
    assert gguf_bundle.build(facts, by_score.tokenizer) is None


def test_probes_of_a_large_vocabulary_stay_short() -> None:
    pieces = [b"token%d" % number for number in range(150_000)]
    names = [piece.decode() for piece in pieces]
    assert sum(map(len, probe_texts.vocabulary_texts(pieces, names, names))) < 100_000
