"""The facts from which the memory of a model is estimated, as its files say them."""

import json
import struct
from pathlib import Path

import pytest

from tests.support import broken_models
from tests.support.engines import gqa_demo
from tokenbus import demo
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.gguf import model_facts as gguf_facts
from tokenbus.worker.engine.memory.fit import ModelFacts
from tokenbus.worker.engine.onnx import graph
from tokenbus.worker.engine.onnx.device import Device
from tokenbus.worker.engine.onnx.model import OnnxMemory
from tokenbus.worker.files.model_config import read_onnx_config
from tokenbus.worker.on_demand import model_sizes


def settings(model: str | Path = "m", **changes: object) -> EngineSettings:
    return EngineSettings(model=str(model), host_cache_mib=0, **changes)  # type: ignore[arg-type]


def facts_of(given: EngineSettings) -> ModelFacts:
    return model_sizes.read_facts(given, lambda _: None)


def test_the_facts_of_the_demo_model_are_those_of_its_file() -> None:
    facts = facts_of(settings(demo.MODEL_PATH))
    assert facts.weight_bytes == demo.MODEL_PATH.stat().st_size
    assert (facts.trained_context, facts.vocab_size, facts.kv_bytes_per_token) == (2_048, 640, 1_024)
    assert facts_of(settings(demo.MODEL_PATH, cache_type_k="f32")).kv_bytes_per_token == 1_536


def test_all_files_of_a_folder_with_safetensors_count_in_the_type_to_which_they_are_converted(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"model-0000{number}-of-00002.safetensors").write_bytes(bytes(1_000_000))
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "vocab_size": 100, "max_position_embeddings": 512}))
    facts = facts_of(settings(tmp_path))
    assert facts.weight_bytes == 2_000_000
    assert facts.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert (facts.trained_context, facts.vocab_size, facts.width) == (512, 100, 64)
    assert facts_of(settings(tmp_path, quantize="q8_0")).weight_bytes == 2_000_000 * 8.5 / 16


def test_a_model_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no such file"):
        facts_of(settings(tmp_path / "none.gguf"))


def test_the_weights_of_a_model_are_the_size_of_its_files_and_unknown_for_one_that_is_not_here(tmp_path: Path) -> None:
    assert model_sizes.weight_bytes(settings(demo.MODEL_PATH)) == demo.MODEL_PATH.stat().st_size
    assert model_sizes.weight_bytes(settings("org/repo")) == 0
    assert model_sizes.weight_bytes(settings(tmp_path / "none.gguf")) == 0


def test_the_facts_of_an_onnx_model_say_how_its_attention_keeps_the_cache() -> None:
    plain, gqa = (facts_of(settings(folder, engine="onnx")) for folder in (demo.ONNX_PATH, gqa_demo()))
    assert (plain.trained_context, gqa.trained_context, gqa.heads, gqa.width) == (2_048, 2_048, 4, 128)
    assert plain.kv_bytes_per_token == 2 * gqa.kv_bytes_per_token == 2 * (2 * 4 * 2 * 32 * 4)
    assert (plain.padding_tokens, gqa.padding_tokens) == (4_096, 0)
    assert plain.copies_lanes
    assert gqa.copies_lanes


@pytest.mark.parametrize("attention", ["plain", "gqa"])
@pytest.mark.parametrize(
    "changes", [{}, {"max_num_seqs": 3, "pooling": "none"}, {"kv_pool_bytes": 1 << 26, "kv_limit_bytes": 1 << 25}]
)
def test_a_frontend_counts_for_an_onnx_model_what_its_engine_does(attention: str, changes: dict[str, object]) -> None:
    folder = demo.ONNX_PATH if attention == "plain" else gqa_demo()
    asked = settings(folder, engine="onnx", **changes)
    weights = next(folder.rglob("*.onnx"))
    model = graph.load(weights)
    config = read_onnx_config({"config.json": folder / "config.json"})
    engine = OnnxMemory(weights, model, graph.read(model, "demo"), config, Device("cpu"))
    assert facts_of(asked) == engine.facts(asked)._replace(weight_bytes=engine.weight_bytes)


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings"])
def test_a_model_that_is_smaller_than_nothing_makes_no_room_for_others(tmp_path: Path, name: str) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "max_position_embeddings": 512, name: -1_000_000}))
    facts = facts_of(settings(tmp_path))
    with pytest.raises(ModelError, match="less than nothing of something"):
        model_sizes.choose_sizes(facts, settings(tmp_path), 1 << 30)


def test_negative_numbers_of_a_gguf_are_none(tmp_path: Path) -> None:
    path = broken_models.with_value(tmp_path / "m.gguf", "llama.attention.head_count", struct.pack("<i", -1_000_000))
    data = bytearray(path.read_bytes())
    at = data.index(b"llama.attention.head_count") + len("llama.attention.head_count")
    data[at : at + 4] = struct.pack("<I", 5)  # the type of a number with a sign
    path.write_bytes(data)
    assert facts_of(settings(path)).kv_bytes_per_token == 0


def test_a_layer_without_a_number_is_no_layer(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(demo.MODEL_PATH.read_bytes().replace(b"blk.0.attn_q.weight", b"blk.x.attn_q.weight"))
    layers, _ = gguf_facts.layer_bytes(path)
    known, _ = gguf_facts.layer_bytes(demo.MODEL_PATH)
    assert len(layers) == len(known)
    assert sum(layers) < sum(known)
