"""A `config.json` means the same to every part that reads it."""

import json
from pathlib import Path

import msgspec
import pytest

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.convert import config as convert_config
from tokenbus.worker.engine.memory.fit import ModelFacts
from tokenbus.worker.files import model_config
from tokenbus.worker.on_demand import model_sizes

FIELDS = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


def write(folder: Path, **more: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(FIELDS | more))
    return path


def facts(folder: Path, **more: object) -> ModelFacts:
    """Returns the facts of a folder with a megabyte of weights, which are converted to f16."""
    write(folder, **more)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1 << 20))
    return model_sizes.read_facts(EngineSettings(model=str(folder), engine="gguf"), lambda share: None)


@pytest.mark.parametrize("name", ["head_dim", "num_key_value_heads", "sliding_window", "use_sliding_window", "dtype"])
def test_a_field_that_is_null_counts_as_absent_for_all_who_read_it(tmp_path: Path, name: str) -> None:
    without = {one: number for one, number in FIELDS.items() if one != name}
    plain, null = tmp_path / "plain", tmp_path / "null"
    plain.mkdir()
    null.mkdir()
    expected = plain / "config.json"
    expected.write_text(json.dumps(without))
    path = write(null, **{name: None})
    assert model_config.read_sizes(path, model_config.ModelSizes) == model_config.read_sizes(
        expected, model_config.ModelSizes
    )
    assert convert_config.read(path, path) == convert_config.read(expected, expected)
    assert model_config.read_onnx_config({"config.json": path}) == model_config.read_onnx_config(
        {"config.json": expected}
    )
    assert facts(null, **{name: None}).kv_bytes_per_token > 0


def test_conversion_the_onnx_engine_and_the_estimate_find_the_same_sizes(tmp_path: Path) -> None:
    path = write(tmp_path)
    converted, served = convert_config.read(path, path), model_config.read_onnx_config({"config.json": path})
    assert (converted.kv_heads, converted.head_size) == served.head_sizes == (2, 16)
    assert converted.context_length == served.context_length == facts(tmp_path).trained_context == 512
    assert facts(tmp_path).kv_bytes_per_token == 2 * 2 * 2 * 16 * 2, "keys and values, layers, heads, width, f16"


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_weights_in_float32_are_estimated_as_half_as_large_in_f16_whatever_the_field_is_called(
    tmp_path: Path, name: str
) -> None:
    assert facts(tmp_path, **{name: "float32"}).weight_bytes == 1 << 19
    assert facts(tmp_path, **{name: "bfloat16"}).weight_bytes == 1 << 20


@pytest.mark.parametrize("text", ["", "[]", "3", '{"hidden_size": "wide"}', "{" * 9, '{"a":' * 100_000])
def test_a_malformed_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        model_config.read_sizes(path, model_config.ModelSizes)


def test_without_a_file_nothing_is_known() -> None:
    assert msgspec.structs.asdict(model_config.read_sizes(None, model_config.ModelSizes))["hidden_size"] == 0


def test_the_sizes_of_a_model_that_reads_images_too_are_those_of_its_text(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = {"hidden_size": 640, "head_dim": None, "architectures": ["Gemma3TextModel"], "dtype": "bfloat16"}
    path.write_text(json.dumps({"architectures": ["A"], "hidden_size": 1, "head_dim": 8, "text_config": text}))
    sizes = model_config.read_sizes(path, model_config.ModelSizes)
    assert (sizes.hidden_size, sizes.head_dim, sizes.architectures, sizes.dtype) == (640, 8, ["A"], "bfloat16")


@pytest.mark.parametrize("given", [2**31, 2**32, int(1e30), 1e30])
def test_a_limit_that_means_none_is_the_widest_and_a_size_that_no_model_has_is_refused(
    tmp_path: Path, given: float
) -> None:
    path = write(tmp_path, max_position_embeddings=given, sliding_window=given)
    sizes = model_config.read_sizes(path, model_config.ModelSizes)
    assert (sizes.trained_context, sizes.window) == (2**31 - 1, 2**31 - 1)
    genai = tmp_path / model_config.GENAI_CONFIG
    genai.write_text(json.dumps({"model": {"context_length": given}}))
    assert model_config.read_onnx_config({genai.name: genai}).context_length == 2**31 - 1
    with pytest.raises(ModelError, match="hidden_size"):
        model_config.read_sizes(write(tmp_path, hidden_size=given), model_config.ModelSizes)
