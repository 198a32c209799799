"""The memory that a model needs, as its files say it."""

import json
from pathlib import Path

import pytest

from tokenbus import demo
from tokenbus.worker.engine.host_cache import sizing
from tokenbus.worker.engine.process.settings import EngineSettings
from tokenbus.worker.engine.runner import ModelError
from tokenbus.worker.on_demand import model_facts
from tokenbus.worker.on_demand.memory_need import MemoryNeed, ModelFacts, estimate

MIB = 1 << 20
FACTS = ModelFacts(
    weight_bytes=500 * MIB, kv_bytes_per_token=1 << 10, trained_context=2_048, width=0, vocab_size=0, rows=0
)


def settings(model: str | Path = "m", **changes: object) -> EngineSettings:
    return EngineSettings(model=str(model), host_cache_mib=0, **changes)  # type: ignore[arg-type]


def facts_of(given: EngineSettings) -> ModelFacts:
    return model_facts.read(given, lambda _: None)


def test_a_need_is_the_sum_of_its_parts_and_says_them() -> None:
    need = estimate(FACTS, settings())
    assert need.weight_bytes == 500 * MIB
    assert need.kv_bytes == 8_192 << 10
    assert need.total_bytes == (500 + 8 + 96) * MIB
    assert str(need) == "604 MiB (weights 500 MiB, KV 8 MiB, buffers 96 MiB)"
    assert "host cache 64 MiB" in str(estimate(FACTS, EngineSettings(model="m", host_cache_mib=64)))


def test_copies_in_host_memory_count_where_nobody_said_how_many_there_may_be() -> None:
    unset = estimate(FACTS, EngineSettings(model="m"))
    assert unset.host_cache_bytes == sizing.budget_bytes(-1) > 0
    assert estimate(FACTS._replace(kv_bytes_per_token=0), EngineSettings(model="m")).host_cache_bytes == 0


def test_settings_change_what_is_needed() -> None:
    assert estimate(FACTS, settings(kv_tokens=1_024)).kv_bytes == MIB
    assert estimate(FACTS, settings(context_length=1_024)).kv_bytes == 4 * MIB
    assert estimate(FACTS, settings(context_length=1_024)).context_length == 1_024
    wide = FACTS._replace(width=1_024)
    assert estimate(wide, settings()).compute_bytes - estimate(FACTS, settings()).compute_bytes == 512 * 1_024 * 8 * 4


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


def test_a_need_of_nothing_is_nothing() -> None:
    assert MemoryNeed(0, 0, 0).total_bytes == 0
