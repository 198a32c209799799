"""The metadata of a GGUF file is read exactly. A file that is anything else is refused by name, and never crashes."""

import os
import random
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.engines import DEMO, gguf_runner
from tokenbus import demo
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.files import gguf_metadata
from tools.demo_model import chats

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + values


def gguf(*entries: bytes, version: int = 3, num_keys: int | None = None, magic: bytes = b"GGUF") -> bytes:
    num_keys = len(entries) if num_keys is None else num_keys
    return magic + struct.pack("<IQQ", version, 0, num_keys) + b"".join(entries)


def read(tmp_path: Path, data: bytes) -> gguf_metadata.Metadata:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return gguf_metadata.read(path)


def refusal(tmp_path: Path, data: bytes) -> str:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, data)
    assert str(tmp_path / "model.gguf") in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def demo_data() -> bytes:
    return demo.MODEL_PATH.read_bytes()


@pytest.fixture(scope="module")
def header_bytes(demo_data: bytes, tmp_path_factory: pytest.TempPathFactory) -> int:
    """The length of the demo model's metadata: that of the shortest beginning of the file that can be read."""
    folder = tmp_path_factory.mktemp("beginnings")
    shortest, longest = 24, len(demo_data)
    while shortest < longest:
        middle = (shortest + longest) // 2
        try:
            read(folder, demo_data[:middle])
        except ModelError:
            shortest = middle + 1
        else:
            longest = middle
    return shortest


def test_the_demo_model_says_what_it_is() -> None:
    facts = gguf_metadata.read(demo.MODEL_PATH)
    assert facts.text("general.architecture") == "llama"
    assert facts.values["llama.context_length"] == 2048
    assert facts.values["llama.rope.freq_base"] == 10_000.0
    assert facts.values["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert facts.values["tokenizer.ggml.add_bos_token"] is True
    assert facts.text("tokenizer.ggml.model") == "gpt2"
    assert facts.text("tokenizer.ggml.pre") == "qwen2"
    assert facts.text("tokenizer.chat_template") == chats.CHAT_TEMPLATE
    tokens = facts.texts("tokenizer.ggml.tokens")
    assert len(tokens) == len(facts.ints("tokenizer.ggml.token_type")) == 640
    assert tuple(tokens[: len(chats.SPECIAL_TOKENS)]) == chats.SPECIAL_TOKENS
    assert all(" " in merge[1:] for merge in facts.texts("tokenizer.ggml.merges"))


SCALARS = {
    "u8": (U8, "B", 255),
    "i8": (I8, "b", -128),
    "u16": (U16, "H", 65_535),
    "i16": (I16, "h", -32_768),
    "u32": (U32, "I", 2**32 - 1),
    "i32": (I32, "i", -(2**31)),
    "f32": (F32, "f", 0.5),
    "bool": (BOOL, "?", True),
    "u64": (U64, "Q", 2**64 - 1),
    "i64": (I64, "q", -(2**63)),
    "f64": (F64, "d", 0.1),
}


@pytest.mark.parametrize("name", SCALARS)
def test_a_value_of_every_kind_is_read_alone_and_in_an_array(tmp_path: Path, name: str) -> None:
    kind, form, value = SCALARS[name]
    packed = struct.pack("<" + form, value)
    facts = read(
        tmp_path,
        gguf(
            entry("one", kind, packed),
            entry("three", ARRAY, array(kind, 3, 3 * packed)),
            entry("none", ARRAY, array(kind, 0, b"")),
            entry("after", STRING, text("here")),
        ),
    )
    assert facts.values == {"one": value, "three": [value] * 3, "none": [], "after": "here"}
    assert type(facts.values["one"]) is type(value)


def test_the_values_of_a_long_array_are_skipped_and_counted(tmp_path: Path) -> None:
    entries = [
        entry("numbers", ARRAY, array(U64, 65_537, bytes(8 * 65_537))),
        entry("texts", ARRAY, array(STRING, 65_537, bytes(8 * 65_537))),
        entry("short", ARRAY, array(U8, 65_536, bytes(65_536))),
        entry("tokenizer.ggml.tokens", ARRAY, array(STRING, 65_537, 65_537 * text("a"))),
        entry("after", STRING, text("here")),
    ]
    facts = read(tmp_path, gguf(*entries))
    assert set(facts.values) == {"short", "tokenizer.ggml.tokens", "after"}
    assert facts.texts("tokenizer.ggml.tokens") == ["a"] * 65_537
    assert facts.lengths == {"numbers": 65_537, "texts": 65_537, "short": 65_536, "tokenizer.ggml.tokens": 65_537}
    sizes = gguf_metadata.read_sizes(tmp_path / "model.gguf")
    assert set(sizes.values) == {"short", "after"}
    assert sizes.vocab_size == facts.vocab_size == 65_537
    assert sizes.fingerprint == facts.fingerprint


@pytest.mark.parametrize("key", ["list", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"])
def test_more_texts_than_any_model_has_are_refused_before_they_are_read(tmp_path: Path, key: str) -> None:
    data = gguf(entry(key, ARRAY, array(STRING, 2_000_001, bytes(8 * 2_000_001))))
    assert f"its array {key} has 2,000,001 values, and no model has more than 2,000,000" in refusal(tmp_path, data)


def test_a_header_of_the_length_of_a_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    beginning = gguf(entry("list", ARRAY, array(U8, 1 << 30, b"")), entry("after", STRING, b""), num_keys=2)
    with path.open("wb") as file:  # most of it takes no place on the disk
        file.write(beginning)
        file.truncate(len(beginning) + (1 << 30) + 100)
    with pytest.raises(ModelError, match="its header has more than 128 MiB, which no model has"):
        gguf_metadata.read(path)


def test_more_tensors_than_any_model_has_are_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 100_001, 0) + bytes(100))
    with pytest.raises(ModelError, match="100001 tensors"):
        gguf_metadata.read_tensors(path)


@pytest.mark.parametrize(("alignment", "is_right"), [(1, True), (64, True), (3, False), (-32, False)])
def test_an_alignment_is_a_power_of_two(tmp_path: Path, alignment: int, is_right: bool) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(entry("general.alignment", I32, struct.pack("<i", alignment))))
    if is_right:
        assert gguf_metadata.read_tensors(path) == {}
    else:
        with pytest.raises(ModelError, match=f"an alignment of {alignment}"):
            gguf_metadata.read_tensors(path)


@pytest.mark.parametrize("most", [40, 1_000, 20_000])
def test_a_header_longer_than_what_is_read_at_first_is_read_as_a_whole(
    demo_data: bytes, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    known = gguf_metadata.read(demo.MODEL_PATH), gguf_metadata.read_tensors(demo.MODEL_PATH)
    monkeypatch.setattr(gguf_metadata, "_HEAD_BYTES", (most, 3 * most, len(demo_data)))
    assert (gguf_metadata.read(demo.MODEL_PATH), gguf_metadata.read_tensors(demo.MODEL_PATH)) == known


def test_a_pipe_that_nobody_writes_to_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="is no regular file"):
        gguf_metadata.read(tmp_path / "model.gguf")


def test_texts_are_read_alone_and_in_an_array(tmp_path: Path) -> None:
    strings = array(STRING, 3, text("a") + text("") + text("é😀"))
    facts = read(tmp_path, gguf(entry("name", STRING, text("Zoë")), entry("list", ARRAY, strings)))
    assert facts.text("name") == "Zoë"
    assert facts.texts("list") == ["a", "", "é😀"]


def test_what_is_absent_or_of_another_kind_is_nothing(tmp_path: Path) -> None:
    facts = read(tmp_path, gguf(entry("number", U32, struct.pack("<I", 1)), entry("name", STRING, text("x"))))
    assert (facts.text("absent"), facts.texts("absent"), facts.ints("absent")) == (None, [], [])
    assert (facts.text("number"), facts.texts("name"), facts.ints("name")) == (None, [], [])


@pytest.mark.parametrize(("version", "served"), [(1, False), (2, True), (3, True), (4, False)])
def test_versions_two_and_three_are_read(tmp_path: Path, version: int, served: bool) -> None:
    data = gguf(version=version)
    if served:
        assert read(tmp_path, data).values == {}
    else:
        assert f"version {version}" in refusal(tmp_path, data)


def test_a_hundred_thousand_keys_are_read_and_one_more_is_corrupt(tmp_path: Path) -> None:
    entries = [entry(str(number), U8, b"\1") for number in range(100_000)]
    assert len(read(tmp_path, gguf(*entries)).values) == 100_000
    assert "100001 keys" in refusal(tmp_path, gguf(*entries, entry("x", U8, b"\1")))


@pytest.mark.parametrize(
    "data",
    [
        gguf(entry("a", 13, b"\0" * 8)),
        gguf(entry("a", 2**32 - 1, b"\0" * 8)),
        gguf(entry("a", ARRAY, array(ARRAY, 1, array(U8, 1, b"\0")))),
        gguf(entry("a", ARRAY, array(STRING, 2**63, text("x")))),
        gguf(entry("a", ARRAY, array(U64, 2**63, b"\0" * 8))),
        gguf(entry("a", ARRAY, array(U8, 60, b"\0" * 8))),
        gguf(entry("a", STRING, struct.pack("<Q", 2**64 - 1))),
        gguf(entry("a", STRING, struct.pack("<Q", 2) + b"\xff\xfe")),
        gguf(entry("a", STRING, struct.pack("<Q", 4) + b"abc")),
        gguf(num_keys=1),
        gguf(num_keys=2**64 - 1),
        b"GGUF",
        b"GGUF\3\0\0",
    ],
)
def test_a_header_that_makes_no_sense_is_corrupt(tmp_path: Path, data: bytes) -> None:
    assert "corrupt or cut short" in refusal(tmp_path, data)


@pytest.mark.parametrize("data", [b"G", b"GGU", b"GGML" + bytes(100), b"PK\3\4" + bytes(100), b"\0" * 100, b"FUGG"])
def test_another_format_is_told_apart(tmp_path: Path, data: bytes) -> None:
    assert "not a GGUF file" in refusal(tmp_path, data)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    assert "can't be read" in refusal(tmp_path, b"")


def test_a_missing_file_is_refused_with_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file; name a GGUF file, or a model on the Hub as org/repo") as caught:
        gguf_metadata.read(tmp_path / "absent.gguf")
    assert str(tmp_path / "absent.gguf") in str(caught.value)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a directory; name") as caught:
        gguf_metadata.read(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_path_that_no_system_takes_is_refused() -> None:
    with pytest.raises(ModelError, match="can't be read"):
        gguf_metadata.read(Path("a\0b"))
    with pytest.raises(ModelError, match="can't be read"):
        gguf_metadata.read(Path("a" * 5_000))


def test_the_demo_model_cut_short_anywhere_in_its_header_is_refused(
    tmp_path: Path, demo_data: bytes, header_bytes: int
) -> None:
    end = header_bytes
    rng = random.Random(1)
    for length in [*range(1, 60), *rng.sample(range(60, end), 100), end - 1]:
        assert "GGUF" in refusal(tmp_path, demo_data[:length]), length
    assert read(tmp_path, demo_data[:end]).values == gguf_metadata.read(demo.MODEL_PATH).values


def test_a_model_cut_short_in_its_weights_is_refused_when_it_is_loaded(
    tmp_path: Path, demo_data: bytes, header_bytes: int
) -> None:
    path = tmp_path / "model.gguf"
    for length in (header_bytes, header_bytes + 100, len(demo_data) // 2, len(demo_data) - 1):
        path.write_bytes(demo_data[:length])
        with pytest.raises(ModelError, match=r"can't load it|fetch the file again") as caught:
            gguf_runner(EngineSettings(model=str(path), threads=1))
        assert str(path) in str(caught.value)


@given(flips=st.lists(st.tuples(st.integers(0, 2**31), st.integers(1, 255)), min_size=1, max_size=5))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_header_with_flipped_bits_is_read_or_refused_and_nothing_else(
    tmp_path: Path, demo_data: bytes, flips: list[tuple[int, int]]
) -> None:
    data = bytearray(demo_data[:20_000])
    for place, mask in flips:
        data[place % 400 if place % 2 else place % len(data)] ^= mask
    try:
        facts = read(tmp_path, bytes(data))
    except ModelError as error:
        assert str(tmp_path / "model.gguf") in str(error)
    else:
        assert facts.values


@given(tail=st.binary(max_size=200), num_keys=st.integers(0, 5))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_behind_the_magic_are_read_or_refused(tmp_path: Path, tail: bytes, num_keys: int) -> None:
    try:
        assert len(read(tmp_path, gguf(tail, num_keys=num_keys)).values) <= num_keys
    except ModelError as error:
        assert "corrupt or cut short" in str(error)


def test_equal_files_have_equal_fingerprints_and_any_change_of_the_header_another(
    tmp_path: Path, demo_data: bytes
) -> None:
    known = gguf_metadata.read(demo.MODEL_PATH).fingerprint
    assert read(tmp_path, demo_data).fingerprint == known
    assert read(tmp_path, demo_data + b"\0").fingerprint != known
    name = demo_data.index(b"Tokenbus demo")
    assert read(tmp_path, demo_data[:name] + b"T" + demo_data[name + 1 :]).fingerprint == known
    assert read(tmp_path, demo_data[:name] + b"X" + demo_data[name + 1 :]).fingerprint != known


def test_other_weights_have_another_fingerprint(tmp_path: Path, demo_data: bytes, header_bytes: int) -> None:
    """All bytes differ here, because the fingerprint hashes samples and not the whole file."""
    end = header_bytes
    other = demo_data[:end] + bytes(byte ^ 1 for byte in demo_data[end:])
    assert read(tmp_path, other).fingerprint != gguf_metadata.read(demo.MODEL_PATH).fingerprint


def test_the_demo_model_is_the_one_that_the_tests_serve() -> None:
    assert DEMO.model == str(demo.MODEL_PATH)


@pytest.mark.parametrize(("version", "reason"), [(1, "of version 1"), (3 << 24, "big-endian"), (4, "version 4 is not")])
def test_a_version_that_can_not_be_read_is_named(tmp_path: Path, version: int, reason: str) -> None:
    assert reason in refusal(tmp_path, gguf(version=version))


def test_a_file_with_a_vocabulary_and_no_weights_is_refused(tmp_path: Path, demo_data: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(demo_data[:8] + struct.pack("<Q", 0) + demo_data[16:])
    with pytest.raises(ModelError, match="holds a vocabulary and no weights"):
        gguf_runner(EngineSettings(model=str(path)))
