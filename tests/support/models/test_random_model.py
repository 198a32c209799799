"""Random models load, compute, are reproducible, and are refused if they can't exist."""

import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import msgspec
import pytest

from tests.support import engines
from tests.support.greedy import greedy
from tests.support.models import quantization, random_model, random_vocabulary
from tests.support.models.shape import PRESETS, ImpossibleModelError, Shape, check, tensors
from tokenbus.protocol.wire import internal, messages
from tokenbus.worker.engine.gguf.runner import GgufRunner
from tokenbus.worker.files import gguf_metadata
from tools.demo_model import chats

TINY = PRESETS["tiny"]
TEXT = "The owl lives in Zürich, 日本 and \x00 10 other places.\n 👍🏽 "


@contextmanager
def loaded(path: Path) -> Iterator[GgufRunner]:
    runner = engines.gguf_runner(msgspec.structs.replace(engines.DEMO, model=str(path)))
    try:
        yield runner
    finally:
        runner.close()


def tensor_types(path: Path) -> dict[str, gguf.GGMLQuantizationType]:
    return {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(path).tensors}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.support.models.random_model", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("quantized_to", "gate_type"),
    [
        ("f32", gguf.GGMLQuantizationType.F32),
        ("f16", gguf.GGMLQuantizationType.F16),
        ("bf16", gguf.GGMLQuantizationType.BF16),
        ("q8_0", gguf.GGMLQuantizationType.Q8_0),
        ("q4_k_m", gguf.GGMLQuantizationType.Q4_K),
        ("q2_k_s", gguf.GGMLQuantizationType.Q2_K),
    ],
)
def test_a_model_of_any_quantization_loads_and_computes_finite_tokens(
    tmp_path: Path, quantized_to: str, gate_type: gguf.GGMLQuantizationType
) -> None:
    path = tmp_path / "model.gguf"
    random_model.write(path, TINY, quantized_to)
    assert tensor_types(path)["blk.0.ffn_gate.weight"] == gate_type
    with loaded(path) as runner:
        prompt = runner.tokenize(internal.Tokenize(text=TEXT))
        results = greedy(runner, prompt, 8)
        assert len(results) == 8
        assert all(0 <= result < TINY.vocab for result in results)
        assert greedy(runner, prompt, 8) == results


def test_a_model_does_not_merely_repeat_its_prompt_end(tmp_path: Path) -> None:
    random_model.write(tmp_path / "model.gguf", TINY)
    with loaded(tmp_path / "model.gguf") as runner:
        assert len(set(greedy(runner, [0, 50, 60], 16))) > 4


@pytest.mark.parametrize("vocab", [random_vocabulary.SMALLEST, TINY.vocab, 5_000])
def test_every_text_can_be_tokenized_and_comes_back(tmp_path: Path, vocab: int) -> None:
    path = tmp_path / "model.gguf"
    random_model.write(path, TINY._replace(vocab=vocab))
    with loaded(path) as runner:
        bos, *prompt = runner.tokenize(internal.Tokenize(text=TEXT))
        assert runner.token_bytes[bos] == b""
        assert b"".join(runner.token_bytes[token] for token in prompt) == TEXT.encode()
        assert len(set(runner.token_bytes)) == vocab - len(chats.SPECIAL_TOKENS) + 1, (
            "all but the control tokens differ"
        )
        assert runner.bundle is not None, "the tokenizers library must agree with llama.cpp"


def test_a_conversation_is_put_into_the_demo_template(tmp_path: Path) -> None:
    random_model.write(tmp_path / "model.gguf", TINY)
    with loaded(tmp_path / "model.gguf") as runner:
        told = [messages.ChatMessage(role="user", content="a")]
        assert runner.tokenize(internal.Tokenize(messages=told)) == [0, 3, len(chats.SPECIAL_TOKENS) + ord("a"), 1, 4]
        assert runner.end_token_ids == {1}


@pytest.mark.parametrize("quantized_to", ["f16", "q4_k_m"])
def test_equal_seeds_give_equal_bytes(tmp_path: Path, quantized_to: str) -> None:
    paths = [tmp_path / name for name in ("first", "second", "other")]
    for path, seed in zip(paths, (7, 7, 8), strict=True):
        random_model.write(path, TINY, quantized_to, seed=seed)
    first, second, other = (path.read_bytes() for path in paths)
    assert first == second
    assert first != other
    assert len(first) == len(other)


def test_an_untied_model_has_an_output_of_its_own(tmp_path: Path) -> None:
    random_model.write(tmp_path / "tied.gguf", TINY)
    random_model.write(tmp_path / "untied.gguf", TINY._replace(tied=False))
    assert tensor_types(tmp_path / "untied.gguf").keys() - tensor_types(tmp_path / "tied.gguf") == {"output.weight"}
    with loaded(tmp_path / "untied.gguf") as runner:
        assert len(greedy(runner, [0, 50], 4)) == 4


def test_a_large_tensor_is_never_whole_in_memory(tmp_path: Path) -> None:
    shape = Shape(layers=1, width=4_096, feed_forward=64, heads=64, kv_heads=1, vocab=2_048, context=64)
    largest_bytes = 4 * max(tensor.size for tensor in tensors(shape))
    tracemalloc.start()
    random_model.write(tmp_path / "model.gguf", shape)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < largest_bytes / 3


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_every_preset_can_be(preset: Shape) -> None:
    check(preset)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"heads": 3, "kv_heads": 3}, "width 256 is not divisible by heads 3"),
        ({"width": 12, "heads": 4}, "12 makes 4 heads 3 wide; an odd width"),
        ({"kv_heads": 3}, "heads 4 is not divisible by kv_heads 3"),
        ({"kv_heads": 8}, "heads 4 is not divisible by kv_heads 8"),
        ({"vocab": random_vocabulary.SMALLEST - 1}, f"vocab must be at least {random_vocabulary.SMALLEST}"),
        ({"layers": 0}, "layers must be 1 to"),
        ({"layers": 513}, "layers must be at most 512, got 513"),
        ({"heads": -4}, "heads must be 1 to"),
        ({"context": 2**31}, "context must be 1 to"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, int], complaint: str
) -> None:
    with pytest.raises(ImpossibleModelError, match=complaint):
        random_model.write(tmp_path / "model.gguf", TINY._replace(**changes))
    assert not list(tmp_path.iterdir())


def test_rows_that_fill_no_block_are_refused_only_where_llama_cpp_has_no_fallback(tmp_path: Path) -> None:
    narrow = TINY._replace(width=96)
    with pytest.raises(ImpossibleModelError, match="width must be a multiple of 128 for q1_0, got 96"):
        random_model.write(tmp_path / "model.gguf", narrow, "q1_0")
    random_model.write(tmp_path / "model.gguf", narrow, "q4_k_m")
    assert tensor_types(tmp_path / "model.gguf")["blk.0.ffn_gate.weight"] == gguf.GGMLQuantizationType.Q5_0


def test_an_unknown_quantization_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ImpossibleModelError, match=r"'q9_9' is none of .*q4_k_m, .*q8_0"):
        random_model.write(tmp_path / "model.gguf", TINY, "q9_9")
    assert {"f32", "f16", "bf16", "q8_0", "q4_0", "q4_k_m", "q4_k", "q6_k"} <= quantization.file_types().keys()


def test_what_the_quantizer_refuses_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "file_types", lambda: {"broken": 9_999})
    with pytest.raises(ImpossibleModelError, match=r"can't write broken: .*invalid output file type"):
        random_model.write(tmp_path / "model.gguf", TINY, "broken")
    assert not list(tmp_path.iterdir())


def test_the_command_takes_a_preset_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    done = run(
        str(path), "--preset", "demo", "--quantization", "Q8_0", "--layers", "3", "--kv-heads", "4", "--context", "99"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{path.stat().st_size:,} bytes" in done.stdout
    assert [path] == list(tmp_path.iterdir())
    values = gguf_metadata.read(path).values
    written = {name: values[f"llama.{name}"] for name in ("block_count", "attention.head_count_kv", "context_length")}
    assert written == {"block_count": 3, "attention.head_count_kv": 4, "context_length": 99}
    assert values["llama.embedding_length"] == PRESETS["demo"].width
    assert values["general.file_type"] == quantization.file_types()["q8_0"]


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    done = run(str(tmp_path / "model.gguf"), "--preset", "tiny", "--heads", "3")
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path / 'model.gguf'}: width 256 is not divisible by heads 3\n"
