"""The tokenizer of an ONNX model agrees with the files beside it, to the byte."""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.support.engines import DEMO, gguf_runner
from tokenbus import demo
from tokenbus.protocol.prompt import prompt, tokenizer_bundle
from tokenbus.protocol.wire import internal, messages
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.engine.gguf.runner import GgufRunner
from tokenbus.worker.tokenizers.onnx_tokenizer import OnnxTokenizer
from tools.demo_model import chats

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
BITS = [*"thengiaé漢.<>s/ \n▁бк🙂\0'", "the", " thing", "   ", "\n\n", "<0x41>", "'s", " n't", "X", "<tool>"]
texts = st.lists(st.sampled_from(BITS), max_size=12).map("".join)


def of(folder: Path, size: int | None = None) -> OnnxTokenizer:
    return OnnxTokenizer({path.name: path for path in folder.iterdir() if path.is_file()}, size, "m.onnx")


def save(folder: Path, tokenizer: Tokenizer, **files: Any) -> Path:
    """Writes a model's folder. `files` are those beside the tokenizer, by name without ending."""
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, document in files.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder


def bpe(tokens: Iterable[str], **options: Any) -> Tokenizer:
    vocab: dict[str, int] = {}
    for token in tokens:
        vocab.setdefault(token, len(vocab))
    merges = [
        (token[:end], token[end:])
        for token in vocab
        for end in range(1, len(token))
        if not token.startswith("<") and token[:end] in vocab and token[end:] in vocab
    ]
    return Tokenizer(models.BPE(vocab, merges, **options))


def byte_level() -> Tokenizer:
    """A tokenizer like GPT-2's, with bytes written as letters."""
    tokenizer = bpe([*LETTERS, "th", "the", "Ġt", "Ġth", "ing", "ĠĠ", "ĊĊ"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>"), AddedToken("é漢")])
    return tokenizer


def by_spaces() -> Tokenizer:
    """A tokenizer like SentencePiece's: spaces become low lines, unknown text bytes, and a space is put first."""
    made = ["▁", *"thengiaé.", "th", "the", "▁the", "in", "ing", "▁▁"]
    tokenizer = bpe(["<unk>", "<s>", *BYTES, *made], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def by_spaces_without_one_in_front() -> Tokenizer:
    """A tokenizer like Gemma's, which adds no space in front."""
    made = ["▁", *"thengiaé.", "the", "▁the", "in", "ing", "▁▁", "▁▁▁"]
    tokenizer = bpe(["<pad>", "unused", *BYTES, *made], byte_fallback=True)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<pad>", "unused"])
    tokenizer.add_tokens([AddedToken("▁▁", normalized=False), AddedToken("\n\n", normalized=False)])
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = bpe(["unk", "▁", *"thengiaé.", "th", "the", "▁the", "ing", "<>"], unk_token="unk")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["unk"])
    return tokenizer


def word_pieces() -> Tokenizer:
    words = ["[UNK]", "the", "thing", "a", "t", "##h", "##e", "##ing", "##s", ".", "'", "s", "n", "##t", "<", ">", "/"]
    tokenizer = Tokenizer(models.WordPiece({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]"])
    return tokenizer


KINDS = {
    "byte-level": byte_level,
    "spaces": by_spaces,
    "spaces-bare": by_spaces_without_one_in_front,
    "metaspace": metaspace,
    "word-pieces": word_pieces,
}


@pytest.fixture(scope="module")
def gguf() -> Iterator[GgufRunner]:
    runner = gguf_runner(DEMO)
    yield runner
    runner.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo model's sidecars that a test can change."""
    for path in demo.ONNX_PATH.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, list[bytes]]]:
    """A tokenizer of each kind, with its token bytes."""
    found = {}
    for name, make in KINDS.items():
        tokenizer = make()
        found[name] = tokenizer, of(save(tmp_path_factory.mktemp(name), tokenizer)).token_bytes
    return found


# agreement with the GGUF


def test_the_demo_files_say_what_the_gguf_says(gguf: GgufRunner) -> None:
    found = of(demo.ONNX_PATH)
    theirs = tokenizer_bundle.unpack(gguf.bundle or b"")
    assert found.token_bytes == gguf.token_bytes
    assert found.end_token_ids == gguf.end_token_ids
    assert found.rules == theirs.rules
    assert found.size == gguf.config.vocab_size


def test_a_router_makes_the_demo_models_prompts_of_its_bundle(gguf: GgufRunner) -> None:
    found = of(demo.ONNX_PATH)
    builder = prompt.load_builder(tokenizer_bundle.unpack(found.bundle))
    conversation = [messages.ChatMessage(role="user", content=f"What is 3 + 4? {chats.END} é漢")]
    ids = gguf.tokenize(internal.Tokenize(messages=conversation))
    assert found.tokenize(internal.Tokenize(messages=conversation)) == ids
    assert builder.build(internal.Tokenize(messages=conversation)) == ids


@given(text=st.text(max_size=40))
@settings(max_examples=100)
def test_the_demo_files_make_the_ggufs_ids_of_any_text(gguf: GgufRunner, demo_files: OnnxTokenizer, text: str) -> None:
    ids = demo_files.tokenize(internal.Tokenize(text=text))
    assert ids == gguf.tokenize(internal.Tokenize(text=text))
    assert b"".join(demo_files.token_bytes[token_id] for token_id in ids) == text.encode()


@pytest.fixture(scope="module")
def demo_files() -> OnnxTokenizer:
    return of(demo.ONNX_PATH)


# token bytes


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
@settings(max_examples=150)
def test_token_bytes_one_after_another_are_the_text_that_the_decoder_makes(
    kinds: dict[str, tuple[Tokenizer, list[bytes]]], kind: str, text: str
) -> None:
    tokenizer, pieces = kinds[kind]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    joined = b"".join(pieces[token_id] for token_id in ids).decode()
    decoded = tokenizer.decode(ids)
    assert joined in (decoded, f" {decoded}")


@pytest.mark.parametrize("kind", ["byte-level", "spaces", "spaces-bare"])
@given(text=texts.filter(lambda text: not any(token in text for token in ("<tool>", "<s>", "</s>"))))
@settings(max_examples=150)
def test_token_bytes_of_a_vocabulary_with_all_bytes_are_the_text_itself(
    kinds: dict[str, tuple[Tokenizer, list[bytes]]], kind: str, text: str
) -> None:
    tokenizer, pieces = kinds[kind]
    joined = b"".join(pieces[token_id] for token_id in tokenizer.encode(text, add_special_tokens=False).ids).decode()
    shown = text if kind == "byte-level" else text.replace("▁", " ")
    assert joined == (f" {shown}" if kind == "spaces" and text else shown)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_have_no_text(kinds: dict[str, tuple[Tokenizer, list[bytes]]], kind: str) -> None:
    tokenizer, pieces = kinds[kind]
    special = [number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    assert special
    assert {pieces[number] for number in special} == {b""}


def test_ids_behind_the_tokenizers_last_have_no_text(tmp_path: Path) -> None:
    tokenizer = byte_level()
    known = tokenizer.get_vocab_size()
    assert of(save(tmp_path, tokenizer), known + 3).token_bytes[known:] == [b"", b"", b""]


@pytest.mark.parametrize("kind", ["byte-level", "spaces", "spaces-bare"])
def test_added_tokens_keep_their_ids_where_special_ones_are_taken_out(tmp_path: Path, kind: str) -> None:
    whole = KINDS[kind]()
    plain = {token.content: number for number, token in whole.get_added_tokens_decoder().items() if not token.special}
    assert plain
    made = of(save(tmp_path, whole))
    in_router = prompt.load_builder(tokenizer_bundle.unpack(made.bundle))
    for text, number in plain.items():
        assert number in made.encode(text)
        assert number in in_router.build(internal.Tokenize(text=text))


# sizes


def test_a_tokenizer_may_know_fewer_tokens_than_there_are_logits_and_none_more(tmp_path: Path) -> None:
    tokenizer = byte_level()
    known = tokenizer.get_vocab_size()
    save(tmp_path, tokenizer)
    for size in (known, known + 100, 2 * known):
        assert (
            of(tmp_path, size).size
            == len(of(tmp_path, size).token_bytes)
            == of(tmp_path, size).rules.vocab_size
            == size
        )
    for size in (known - 1, 2 * known + 1):
        with pytest.raises(ModelError, match=rf"m\.onnx: .* has {known} tokens, its logits {size}: they belong"):
            of(tmp_path, size)


def test_a_model_without_logits_has_its_tokenizers_size(tmp_path: Path) -> None:
    tokenizer = byte_level()
    assert of(save(tmp_path, tokenizer)).size == tokenizer.get_vocab_size()


# templates


def test_a_template_in_a_file_of_its_own_comes_before_the_configs(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "from the config"}))
    assert of(folder).rules.chat_template == chats.CHAT_TEMPLATE
    (folder / "chat_template.jinja").unlink()
    assert of(folder).rules.chat_template == "from the config"


def test_of_several_templates_the_default_one_is_taken(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "chat"}]
    save(tmp_path, byte_level(), tokenizer_config={"chat_template": several})
    assert of(tmp_path).rules.chat_template == "chat"
    save(tmp_path, byte_level(), tokenizer_config={"chat_template": several[:1]})
    assert of(tmp_path).rules.chat_template is None


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    assert of(save(tmp_path, byte_level(), tokenizer_config={})).rules.chat_template is None


def test_a_template_that_is_no_text_is_passed_over_for_the_configs(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), tokenizer_config={"chat_template": "from the config"})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    assert of(tmp_path).rules.chat_template == "from the config"


# BOS and end tokens


def framed() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "config", "begins"),
    [
        (byte_level, {"bos_token": "<s>", "add_bos_token": True}, True),
        (byte_level, {"bos_token": "<s>"}, False),
        (framed, {"bos_token": "<s>"}, True),
        (framed, {"bos_token": {"content": "<s>", "lstrip": False}}, True),
        (framed, {"bos_token": "<s>", "add_bos_token": False}, False),
        (framed, {"bos_token": "</s>"}, False),
        (framed, {}, False),
    ],
)
def test_a_prompt_begins_with_bos_where_the_config_or_else_the_tokenizer_says_so(
    tmp_path: Path, tokenizer: Any, config: dict[str, Any], begins: bool
) -> None:
    found = of(save(tmp_path, tokenizer(), tokenizer_config=config))
    bos = found.rules.special_tokens["<s>"]
    ids = found.tokenize(internal.Tokenize(text="the"))
    assert (ids[0] == bos) is begins
    assert ids.count(bos) == begins


def test_names_that_the_config_lacks_are_in_the_other_file(tmp_path: Path) -> None:
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    rules = of(save(tmp_path, byte_level(), tokenizer_config={"eos_token": None}, special_tokens_map=names)).rules
    assert (rules.bos_token, rules.eos_token) == ("<s>", "</s>")
    assert rules.bos_token_id == rules.special_tokens["<s>"]


def test_a_bos_that_the_tokenizer_does_not_know_is_never_added(tmp_path: Path) -> None:
    found = of(save(tmp_path, byte_level(), tokenizer_config={"bos_token": "<none>", "add_bos_token": True}))
    assert found.rules.bos_token_id is None
    assert len(found.tokenize(internal.Tokenize(text="the"))) == 1


@pytest.mark.parametrize(("genai", "more"), [(None, set()), (7, {7}), ([7, 9], {7, 9})])
def test_end_tokens_are_those_of_the_config_and_of_the_builders_file(
    tmp_path: Path, genai: Any, more: set[int]
) -> None:
    save(
        tmp_path, byte_level(), tokenizer_config={"eos_token": "</s>"}, genai_config={"model": {"eos_token_id": genai}}
    )
    found = of(tmp_path)
    assert found.end_token_ids == {found.rules.special_tokens["</s>"]} | more


def test_a_tokenizer_that_shortens_texts_is_kept_from_it(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    found = of(save(tmp_path, tokenizer))
    assert len(found.tokenize(internal.Tokenize(text="abcdef"))) == 6
    assert len(found.encode_with_special_tokens("abcdef")) == 6


# malformed files


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"m\.onnx: has no tokenizer\.json beside it that can be read; fetch it"):
        of(tmp_path)


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"model": 3}',
        b'{"added_tokens": 3}',
        b'{"added_tokens": [3]}',
        b'{"added_tokens": [{"special": true}], "model": {"type": "BPE", "vocab": {}, "merges": []}}',
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
        b"[" * 100_000,
        b'{"added_tokens": ' + b"[" * 100_000,
        b'{"version": "\xff"}',
    ],
)
def test_a_tokenizer_that_is_damaged_is_named(tmp_path: Path, document: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(document)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        of(tmp_path)


@given(data=st.data())
@settings(max_examples=150)
def test_a_tokenizer_with_any_byte_changed_loads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    folder = tmp_path_factory.getbasetemp() / "changed"
    folder.mkdir(exist_ok=True)
    whole = by_spaces().to_str().encode()
    place = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.sampled_from(b'\x00 "0189{}[],:x\xff') | st.integers(0, 255))
    (folder / "tokenizer.json").write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
    try:
        found = of(folder)
    except ModelError as error:
        assert "tokenizer.json" in str(error)
    else:
        assert len(found.token_bytes) == found.size


@pytest.mark.parametrize("name", ["tokenizer_config", "special_tokens_map", "genai_config"])
@pytest.mark.parametrize(
    "document",
    [
        b"{",
        b"[]",
        b'{"bos_token": 3, "model": 3}',
        b'{"chat_template": {}, "model": ""}',
        b'{"bos_token": "\xff", "model": {"eos_token_id": "\xff"}}',
    ],
)
def test_a_config_that_is_wrong_is_named(tmp_path: Path, name: str, document: bytes) -> None:
    save(tmp_path, byte_level())
    (tmp_path / f"{name}.json").write_bytes(document)
    with pytest.raises(ModelError, match=rf"{name}\.json: .*; correct or remove it"):
        of(tmp_path)


@pytest.mark.parametrize("size", [None, 256])
def test_a_token_of_a_number_that_no_vocabulary_has_is_refused(tmp_path: Path, size: int | None) -> None:
    folder = save(tmp_path, Tokenizer(models.BPE({letter: number for number, letter in enumerate(LETTERS)}, [])))
    document = json.loads((folder / "tokenizer.json").read_text())
    document["model"]["vocab"]["far"] = 1 << 31
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ModelError, match=r"its tokenizer\.json has a token of number 2,147,483,648"):
        of(folder, size)
