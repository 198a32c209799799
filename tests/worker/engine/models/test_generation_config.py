"""What a model's own files advise comes behind settings and before our own defaults; a broken file is named."""

import json
from pathlib import Path

import pytest

from tokenbus.protocol.wire.params import SamplingParams
from tokenbus.worker.engine.gguf import settings_resolution
from tokenbus.worker.engine.models import generation_config
from tokenbus.worker.engine.process.settings import EngineSettings
from tokenbus.worker.engine.runner import ModelError


def read_config(
    tmp_path: Path, in_weights: dict[str, float] | None = None, **contents: object
) -> generation_config.GenerationConfig:
    sidecars = {}
    for name, content in contents.items():
        path = tmp_path / f"{name}.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        sidecars[path.name] = path
    return generation_config.read(sidecars, in_weights or {})


def test_without_files_there_is_no_advice(tmp_path: Path) -> None:
    assert read_config(tmp_path) == generation_config.GenerationConfig()


def test_the_generation_config_gives_defaults_and_end_tokens(tmp_path: Path) -> None:
    generation = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "repetition_penalty": 1.1,
        "max_new_tokens": 512,
        "eos_token_id": [7, 8],
        "do_sample": True,
        "transformers_version": "4",
    }
    one = read_config(tmp_path, generation_config=generation, config={"eos_token_id": 9, "hidden_size": 64})
    assert one.defaults == SamplingParams(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1, max_tokens=512)
    assert one.end_token_ids == {7, 8, 9}


@pytest.mark.parametrize(
    ("given", "ids"), [(5, {5}), ([5], {5}), ([], set()), (None, set()), (-1, set()), ([3, -1], {3})]
)
def test_end_tokens_may_be_a_number_or_a_list(tmp_path: Path, given: object, ids: set[int]) -> None:
    assert read_config(tmp_path, config={"eos_token_id": given}).end_token_ids == ids


def test_what_the_weights_say_comes_behind_the_files(tmp_path: Path) -> None:
    in_weights = {"temperature": 0.2, "top_k": 64, "min_p": 0.05}
    one = read_config(tmp_path, in_weights, generation_config={"temperature": 0.9})
    assert (one.defaults.temperature, one.defaults.top_k, one.defaults.min_p) == (0.9, 64, 0.05)


def test_values_outside_the_wires_ranges_become_the_nearest_inside(tmp_path: Path) -> None:
    one = read_config(
        tmp_path, generation_config={"top_k": -1, "top_p": 0.0, "temperature": 200.0, "max_new_tokens": -5}
    )
    assert (one.defaults.top_k, one.defaults.temperature, one.defaults.max_tokens) == (0, 100.0, 1)
    assert 0 < one.defaults.top_p < 0.001


@pytest.mark.parametrize("wrap", [False, True])
def test_metadata_hints_size_the_engine_where_settings_leave_it_open(tmp_path: Path, wrap: bool) -> None:
    llm = {
        "max_sequence_length": 1_024,
        "scheduler": {"max_num_seqs": 5, "max_paddings": 9},
        "kv_cache": {"block_size": 32, "total_blocks": 100},
    }
    one = read_config(tmp_path, metadata={"metadata": {"llm": llm}} if wrap else {"llm": llm})
    chosen = settings_resolution.resolve(EngineSettings(model="m"), one)
    assert (chosen.context_length, chosen.max_num_seqs, chosen.kv_block_size, chosen.kv_tokens) == (1_024, 5, 32, 3_200)
    asked = EngineSettings(model="m", context_length=64, max_num_seqs=2, kv_block_size=8, kv_tokens=640)
    assert settings_resolution.resolve(asked, one) == asked


def test_without_hints_the_engine_chooses(tmp_path: Path) -> None:
    chosen = settings_resolution.resolve(EngineSettings(model="m"), generation_config.GenerationConfig())
    assert (chosen.context_length, chosen.max_num_seqs, chosen.kv_block_size, chosen.kv_tokens) == (0, 16, 16, 0)


@pytest.mark.parametrize("content", ["{", '{"top_k": "many"}', "[" * 5_000, '{"eos_token_id": {}}'])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json: .*; correct it or take it away"):
        read_config(tmp_path, generation_config=content)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"kv_block_size": 0}, "--kv-block-size must be at least 1, got 0"),
        ({"max_num_seqs": 0}, "--max-num-seqs must be 1 to 255, got 0"),
        ({"max_num_seqs": 256}, "--max-num-seqs must be 1 to 255, got 256"),
        ({"kv_tokens": 99, "context_length": 100}, r"--kv-tokens must be one block and one context at least \(100\)"),
        (
            {"max_num_seqs": 8, "max_num_batched_tokens": 8},
            r"--max-num-batched-tokens must be above --max-num-seqs \(8\)",
        ),
        ({"cache_type_k": "int8"}, "--cache-type-k must be one of f32, f16, bf16, q8_0"),
        ({"kv_layout": "paged"}, "--kv-layout must be one of auto, unified, per-stream"),
        ({"flash_attention": "yes"}, "--flash-attention must be one of auto, on, off"),
        ({"cache_type_v": "q8_0", "flash_attention": "off"}, "needs flash attention"),
        ({"split_mode": "tensor"}, "--split-mode must be one of none, layer, row"),
        ({"host_cache_mib": -2}, "--host-cache-mib must be 0 or more"),
    ],
)
def test_a_setting_that_cannot_be_met_is_named_with_its_limit(changes: dict[str, object], flag: str) -> None:
    with pytest.raises(ModelError, match=flag):
        settings_resolution.validate(EngineSettings(model="m", **changes))  # type: ignore[arg-type]


def test_settings_at_their_limits_can_be_met() -> None:
    settings_resolution.validate(
        EngineSettings(model="m", max_num_seqs=255, kv_block_size=1, kv_tokens=100, context_length=100)
    )
    settings_resolution.validate(
        EngineSettings(model="m", max_num_seqs=8, max_num_batched_tokens=9, cache_type_v="q4_0")
    )
