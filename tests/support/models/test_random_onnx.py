"""Random ONNX models equal the GGUF with the same seed, are reproducible, load, and are refused if they can't exist."""

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import external_data_helper, numpy_helper

from tests.support import engines
from tests.support.greedy import greedy
from tests.support.models import nbits, random_model, random_onnx, random_vocabulary
from tests.support.models.shape import PRESETS, ImpossibleModelError, Shape, tensors
from tokenbus.protocol.wire import internal
from tokenbus.worker.engine.device.loaded_models import LoadedModels
from tokenbus.worker.engine.onnx.runner import OnnxRunner, load
from tools.demo_model import onnx_graph

TINY = PRESETS["tiny"]
TEXT = "The owl lives in Zürich, 日本 and \x00 10 other places.\n 👍🏽 "
PROMPT = list(range(10, 26))
FLAVOURS: tuple[onnx_graph.Flavour, ...] = ("gqa", "plain")


def written(folder: Path, shape: Shape = TINY, flavour: onnx_graph.Flavour = "gqa", **options: int) -> Path:
    random_onnx.write(folder, shape, flavour, **options)
    return folder


def served(folder: Path) -> OnnxRunner:
    runner = load(msgspec.structs.replace(engines.ONNX, model=str(folder)), lambda _: None, LoadedModels())
    assert isinstance(runner, OnnxRunner)
    return runner


def logits(folder: Path, flavour: onnx_graph.Flavour = "gqa") -> "np.ndarray[Any, Any]":
    """Returns the logits that onnxruntime itself computes after the prompt."""
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    ids = np.array([PROMPT])
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    if flavour == "plain":
        given["position_ids"] = np.arange(len(PROMPT))[None]
    for value in session.get_inputs():
        if value.name.startswith("past"):
            given[value.name] = np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
    (found,) = session.run(["logits"], given)
    return found[0, -1]


def initializers(folder: Path) -> dict[str, "np.ndarray[Any, Any]"]:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    external_data_helper.load_external_data_for_model(model, str(folder))
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.support.models.random_onnx", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("bits", random_onnx.BITS)
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_model_loads_in_onnxruntime_and_in_the_engine(tmp_path: Path, flavour: onnx_graph.Flavour, bits: int) -> None:
    folder = written(tmp_path / "model", flavour=flavour, bits=bits)
    assert np.isfinite(logits(folder, flavour)).all()
    runner = served(folder)
    told = greedy(runner, PROMPT, 8)
    assert greedy(runner, PROMPT, 8) == told
    assert told[0] == int(logits(folder, flavour).argmax())
    assert len(set(greedy(runner, [0, 50, 60], 16))) > 4, "it does not merely repeat its prompt's end"
    runner.close()


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_those_of_the_gguf_with_the_same_seed(tmp_path: Path, tied: bool) -> None:
    shape = TINY._replace(tied=tied)
    random_model.write(tmp_path / "model.gguf", shape, "f32", seed=3)
    found = initializers(written(tmp_path / "model", shape, seed=3))
    for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors:
        weights = found.pop(tensor.name)
        if tensor.name != "token_embd.weight":
            weights = weights.T
        if "attn_q" in tensor.name or "attn_k" in tensor.name:  # rotated halves in the place of rotated neighbours
            heads = weights.reshape(-1, 2, TINY.width // TINY.heads // 2, TINY.width)
            weights = heads.transpose(0, 2, 1, 3).reshape(weights.shape)
        assert np.array_equal(weights, tensor.data), tensor.name
    assert not [name for name in found if name.endswith("weight")]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_both_engines_say_the_same(tmp_path: Path, flavour: onnx_graph.Flavour) -> None:
    random_model.write(tmp_path / "model.gguf", TINY, "f32")
    settings = msgspec.structs.replace(engines.DEMO, model=str(tmp_path / "model.gguf"))
    other = engines.gguf_runner(settings)
    runner = served(written(tmp_path / "model", flavour=flavour))
    assert greedy(runner, PROMPT, 12) == greedy(other, PROMPT, 12)
    assert runner.tokenize(internal.Tokenize(text=TEXT)) == other.tokenize(internal.Tokenize(text=TEXT))
    assert (runner.token_bytes, runner.end_token_ids) == (other.token_bytes, other.end_token_ids)
    runner.close()
    other.close()


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_weights_are_near_those_that_were_drawn(bits: int) -> None:
    matrix = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    blobs, scales = nbits.quantize(matrix, bits)
    assert (blobs.shape, scales.shape) == ((6, 2, 32 * bits // 8), (6, 2))
    integers = blobs if bits == 8 else np.stack([blobs & 15, blobs >> 4], axis=-1).reshape(6, 2, 32)
    back = (integers.astype(np.float32) - (1 << (bits - 1))) * scales[..., None]
    # The largest of a block is met exactly; one that is as large on the other side is a whole step short.
    assert (np.abs(back.reshape(matrix.shape) - matrix) <= np.abs(scales).repeat(32, axis=1)).all()
    assert np.abs(back.reshape(matrix.shape) - matrix).mean() < np.abs(scales).mean() / 3


def test_an_empty_block_is_quantized_to_zeros() -> None:
    blobs, scales = nbits.quantize(np.zeros((1, 32), np.float32), 8)
    assert (scales == 0).all()
    assert (blobs == 128).all()


@pytest.mark.parametrize("bits", random_onnx.BITS)
def test_equal_seeds_give_equal_bytes(tmp_path: Path, bits: int) -> None:
    first, second, other = (
        contents(written(tmp_path / name, bits=bits, seed=seed))
        for name, seed in (("first", 7), ("second", 7), ("other", 8))
    )
    assert first == second
    assert first["model.onnx.data"] != other["model.onnx.data"]
    assert {name: len(data) for name, data in first.items()} == {name: len(data) for name, data in other.items()}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_folder_says_how_onnxruntime_genai_is_to_call_it(tmp_path: Path, flavour: onnx_graph.Flavour) -> None:
    folder = written(tmp_path / "model", flavour=flavour)
    config = json.loads((folder / "genai_config.json").read_text())
    decoder = config["model"]["decoder"]
    session = onnxruntime.InferenceSession(folder / decoder["filename"], providers=["CPUExecutionProvider"])
    layers = range(decoder["num_hidden_layers"])
    for values, named in ((session.get_inputs(), decoder["inputs"]), (session.get_outputs(), decoder["outputs"])):
        names = {name % layer for name in named.values() if "%d" in name for layer in layers}
        assert names | {name for name in named.values() if "%d" not in name} == {value.name for value in values}
    assert config["search"]["past_present_share_buffer"] == (flavour == "gqa")


@pytest.mark.parametrize("vocab", [random_vocabulary.SMALLEST, 5_000])
def test_every_text_can_be_tokenized_and_comes_back(tmp_path: Path, vocab: int) -> None:
    runner = served(written(tmp_path / "model", TINY._replace(vocab=vocab)))
    bos, *prompt = runner.tokenize(internal.Tokenize(text=TEXT))
    assert runner.token_bytes[bos] == b""
    assert b"".join(runner.token_bytes[token] for token in prompt) == TEXT.encode()
    runner.close()


@pytest.mark.parametrize("tied", [True, False])
def test_a_large_tensor_is_never_whole_in_memory(tmp_path: Path, tied: bool) -> None:
    shape = Shape(layers=1, width=1_024, feed_forward=64, heads=16, kv_heads=1, vocab=16_384, context=64, tied=tied)
    largest_bytes = 4 * max(tensor.size for tensor in tensors(shape))
    tracemalloc.start()
    written(tmp_path / "model", shape)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < largest_bytes / 2


@pytest.mark.parametrize(
    ("changes", "options", "complaint"),
    [
        ({"heads": 3, "kv_heads": 3}, {}, "width 256 is not divisible by heads 3"),
        ({}, {"seed": -1}, "seed must be at least 0, got -1"),
        ({"feed_forward": 80}, {"bits": 4}, "feed_forward must be a multiple of 32 for 4 bits, got 80"),
    ],
)
def test_a_model_that_cannot_be_is_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, int], options: dict[str, int], complaint: str
) -> None:
    with pytest.raises(ImpossibleModelError, match=complaint):
        written(tmp_path / "model", TINY._replace(**changes), **options)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_something_in_it_is_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "mine").touch()
    with pytest.raises(OSError, match="not empty"):
        written(folder)
    assert list(tmp_path.iterdir()) == [folder]
    assert [path.name for path in folder.iterdir()] == ["mine"]


def test_the_command_takes_a_preset_and_overrides(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    sizes = ("--layers", "3", "--kv-heads", "4", "--context", "99", "--no-tied")
    done = run(str(folder), "--preset", "demo", "--flavour", "plain", "--bits", "8", *sizes)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{(folder / 'model.onnx.data').stat().st_size:,} bytes" in done.stdout
    config = json.loads((folder / "config.json").read_text())
    told = {name: config[name] for name in ("num_hidden_layers", "num_key_value_heads", "max_position_embeddings")}
    assert told == {"num_hidden_layers": 3, "num_key_value_heads": 4, "max_position_embeddings": 99}
    assert (config["hidden_size"], config["tie_word_embeddings"]) == (PRESETS["demo"].width, False)


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    done = run(str(tmp_path / "model"), "--preset", "tiny", "--heads", "3")
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path / 'model'}: width 256 is not divisible by heads 3\n"
