"""A GGUF engine meets the settings it is given, or says which one it can't meet; open ones follow the model's files."""

import pytest

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.gguf.settings_resolution import resolve, validate
from tokenbus.worker.files.model_config import GenerationConfig


def test_recommended_sizes_fill_in_what_settings_leave_open() -> None:
    recommended = GenerationConfig(context_length=1_024, max_num_seqs=5, kv_block_size=32, total_kv_blocks=100)
    found = resolve(EngineSettings(model="m"), recommended)
    assert (found.context_length, found.max_num_seqs, found.kv_block_size, found.kv_tokens) == (1_024, 5, 32, 3_200)
    asked = EngineSettings(model="m", context_length=64, max_num_seqs=2, kv_block_size=8, kv_tokens=640)
    assert resolve(asked, recommended) == asked


def test_without_recommendations_the_engine_chooses() -> None:
    found = resolve(EngineSettings(model="m"), GenerationConfig())
    assert (found.context_length, found.max_num_seqs, found.kv_block_size, found.kv_tokens) == (0, 16, 16, 0)


def test_a_recommendation_of_more_sequences_than_there_can_be_means_as_many_as_there_can_be() -> None:
    assert resolve(EngineSettings(model="m"), GenerationConfig(max_num_seqs=1_000)).max_num_seqs == 255


def test_a_recommendation_that_makes_no_sense_is_refused_as_the_setting_would_be() -> None:
    with pytest.raises(ModelError, match="--kv-block-size must be at least 1, got -16"):
        resolve(EngineSettings(model="m"), GenerationConfig(kv_block_size=-16))


@pytest.mark.parametrize(
    ("changes", "message"),
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
        ({"flash_attention": "yes"}, "--flash-attention must be one of auto, on, off"),
        ({"cache_type_v": "q8_0", "flash_attention": "off"}, "needs flash attention"),
        ({"split_mode": "columns"}, "--split-mode must be one of none, layer, row, tensor"),
        ({"host_cache_mib": -2}, "--host-cache-mib must be 0 or more"),
    ],
)
def test_a_setting_that_cannot_be_met_is_named_with_its_limit(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        validate(EngineSettings(model="m", **changes))  # type: ignore[arg-type]


def test_settings_at_their_limits_can_be_met() -> None:
    validate(EngineSettings(model="m", max_num_seqs=255, kv_block_size=1, kv_tokens=100, context_length=100))
    validate(EngineSettings(model="m", max_num_seqs=8, max_num_batched_tokens=9, cache_type_v="q4_0"))
