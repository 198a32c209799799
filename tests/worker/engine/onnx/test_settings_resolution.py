"""An ONNX engine meets the settings it is given, or says which one it can't meet."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings, OnnxSettings, SchedulerSettings
from tokenbus.worker.engine.onnx import settings_resolution
from tokenbus.worker.engine.onnx.settings_resolution import CacheLimits
from tokenbus.worker.files.model_config import GenerationConfig

FIXED = CacheLimits(trained=4_096, bytes_per_token=1_000)
OWN = FIXED._replace(has_own_rows=True)


def settings(**changes: Any) -> EngineSettings:
    return EngineSettings(model="m.onnx", **changes)


def shape(
    limits: CacheLimits = FIXED, generation_config: GenerationConfig | None = None, **changes: Any
) -> settings_resolution.CacheSize:
    return settings_resolution.size_cache(settings(**changes), generation_config or GenerationConfig(), limits)


# validation


@pytest.mark.parametrize(
    "met",
    [
        {},
        {"onnx": OnnxSettings(provider="cuda")},
        {"onnx": OnnxSettings(device_id=0, device_memory_mib=0, min_free_mib=0, max_paddings=-1)},
        {"max_num_seqs": 1},
        {"max_num_seqs": 256},
        {"max_num_seqs": -1, "kv_block_size": -1},
        {"kv_block_size": 1},
        {"context_length": 0, "kv_tokens": 0, "threads": 0},
        {"max_num_seqs": 8, "max_num_batched_tokens": 9},
        {"max_num_batched_tokens": 2},
        {"scheduler": SchedulerSettings(expected_tokens=0, priority_s=0)},
        {"scheduler": SchedulerSettings(expected_tokens=1_000_000, priority_s=3_600)},
    ],
)
def test_settings_at_their_limits_are_met(met: dict[str, Any]) -> None:
    settings_resolution.validate(settings(**met))


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        ("--provider must be one of auto, cpu, cuda, got rocm", {"onnx": OnnxSettings(provider="rocm")}),
        ("--device-id must be 0 or more, got -1", {"onnx": OnnxSettings(device_id=-1)}),
        ("--device-memory-mib must be 0 or more, got -1", {"onnx": OnnxSettings(device_memory_mib=-1)}),
        ("--min-free-mib must be 0 or more, got -1", {"onnx": OnnxSettings(min_free_mib=-1)}),
        ("--max-paddings must be 0 or more, got -2", {"onnx": OnnxSettings(max_paddings=-2)}),
        ("--max-num-seqs must be 1 to 256, got 0", {"max_num_seqs": 0}),
        ("--max-num-seqs must be 1 to 256, got 257", {"max_num_seqs": 257}),
        ("--max-num-seqs must be 1 to 256, got -2", {"max_num_seqs": -2}),
        ("--kv-block-size must be at least 1, got 0", {"kv_block_size": 0}),
        ("--context-length must be at least 1, or 0 to have it chosen, got -1", {"context_length": -1}),
        ("--kv-tokens must be at least one context, or 0 to have it chosen, got -1", {"kv_tokens": -1}),
        (
            r"--max-num-batched-tokens must be above --max-num-seqs \(8\), got 8",
            {"max_num_seqs": 8, "max_num_batched_tokens": 8},
        ),
        (r"--max-num-batched-tokens must be above --max-num-seqs \(1\), got 1", {"max_num_batched_tokens": 1}),
        ("--threads must be 0 or more, got -1", {"threads": -1}),
        ("--expected-tokens must be 0 or more, got -1", {"scheduler": SchedulerSettings(expected_tokens=-1)}),
        ("--priority-s must be 0 to 3,600, got -1", {"scheduler": SchedulerSettings(priority_s=-1)}),
        ("--priority-s must be 0 to 3,600, got 3601", {"scheduler": SchedulerSettings(priority_s=3_601)}),
    ],
)
def test_a_setting_one_past_its_limit_is_refused_by_its_flag(message: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=f"^{message}$"):
        settings_resolution.validate(settings(**wrong))


@pytest.mark.parametrize(
    ("flag", "given_value"),
    [
        ("--cache-type-k", "q8_0"),
        ("--cache-type-v", "f32"),
        ("--flash-attention", "on"),
        ("--gpu-layers", 3),
        ("--main-gpu", 1),
        ("--split-mode", "row"),
        ("--tensor-split", (1.0, 2.0)),
        ("--ubatch-tokens", 128),
    ],
)
def test_a_setting_that_only_the_other_engine_has_is_refused_by_its_flag(flag: str, given_value: object) -> None:
    with pytest.raises(ModelError, match=f"^{flag} is for --engine gguf; remove it$"):
        settings_resolution.validate(settings(**{flag.removeprefix("--").replace("-", "_"): given_value}))


@pytest.mark.parametrize("devices", [("CUDA0",), ("cuda",), ("cuda:",), ("cpu", "gpu"), ("none",), ("cuda:1234",)])
def test_a_graph_runs_on_one_device_with_a_name_of_onnxruntime(devices: tuple[str, ...]) -> None:
    with pytest.raises(
        ModelError, match=f"^--devices must be one of cpu, cuda:0, cuda:1, ..., got {','.join(devices)}$"
    ):
        settings_resolution.validate(settings(devices=devices))


def test_a_device_is_named_in_one_way_only() -> None:
    for name in ("cpu", "cuda:0", "cuda:12"):
        settings_resolution.validate(settings(devices=(name,)))
    with pytest.raises(ModelError, match="pass only one of these"):
        settings_resolution.validate(settings(devices=("cuda:1",), onnx=OnnxSettings(device_id=1)))


# resolution


def test_without_settings_or_recommendations_sixteen_sequences_of_4096_tokens_run_beside_eight_idle_rows() -> None:
    assert shape() == settings_resolution.CacheSize(16, 4_096, max_num_seqs=16, num_rows=24, kv_tokens=24 * 4_096)
    assert shape().total_blocks == 24 * 256


def test_a_model_made_for_less_has_a_shorter_context_and_one_that_does_not_say_the_usual_one() -> None:
    assert shape(FIXED._replace(trained=1_000)).context_length == 992
    assert shape(FIXED._replace(trained=None)).context_length == 4_096
    assert shape(FIXED._replace(trained=131_072)).context_length == 4_096


def test_settings_come_before_recommendations_and_those_before_the_defaults() -> None:
    generation_config = GenerationConfig(
        context_length=1_024, max_num_seqs=3, kv_block_size=32, total_kv_blocks=400, max_paddings=7
    )
    assert shape(generation_config=generation_config) == settings_resolution.CacheSize(32, 1_024, 3, 7, 7 * 1_024)
    asked = shape(
        generation_config=generation_config, context_length=512, max_num_seqs=2, kv_block_size=8, kv_tokens=2_048
    )
    assert asked == settings_resolution.CacheSize(8, 512, 2, 4, 2_048)
    assert settings_resolution.max_paddings(settings(), generation_config) == 7
    assert settings_resolution.max_paddings(settings(onnx=OnnxSettings(max_paddings=0)), generation_config) == 0
    assert settings_resolution.max_paddings(settings(), GenerationConfig()) == 4_096


def test_recommended_blocks_are_counted_in_the_recommended_size() -> None:
    generation_config = GenerationConfig(kv_block_size=64, total_kv_blocks=32, context_length=1_024)
    assert shape(generation_config=generation_config).num_rows == 2


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        ("--kv-block-size must be at least 1, got -16", {"kv_block_size": -16}),
        ("--max-num-seqs must be 1 to 256, got -4", {"max_num_seqs": -4}),
        ("--context-length must be at least 1", {"context_length": -512}),
        ("--kv-tokens must be at least one context", {"total_kv_blocks": -1}),
    ],
)
def test_a_recommendation_that_makes_no_sense_is_refused_as_the_setting_would_be(
    message: str, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ModelError, match=message):
        shape(generation_config=GenerationConfig(**wrong))


def test_a_recommendation_of_more_sequences_than_there_can_be_means_as_many_as_there_can_be() -> None:
    assert shape(generation_config=GenerationConfig(max_num_seqs=1_000)).max_num_seqs == 256


def test_sequences_that_were_chosen_leave_a_step_room_for_a_prompt() -> None:
    with pytest.raises(ModelError, match=r"--max-num-batched-tokens must be above --max-num-seqs \(16\), got 16"):
        shape(max_num_batched_tokens=16)
    assert shape(max_num_batched_tokens=17).max_num_seqs == 16


# memory


def test_rows_that_take_memory_as_they_are_written_share_the_tokens_that_were_planned() -> None:
    found = shape(OWN, context_length=4_096, kv_tokens=10_000)
    assert found == settings_resolution.CacheSize(16, 4_096, max_num_seqs=16, num_rows=24, kv_tokens=10_000)
    assert found.total_blocks == 625
    assert shape(OWN, context_length=4_096, kv_tokens=4_096, max_num_seqs=256).num_rows == 256
    with pytest.raises(ModelError, match=r"^--kv-tokens 4095 are too few for one context of 4096 tokens"):
        shape(OWN, context_length=4_096, kv_tokens=4_095)


def test_a_limit_in_bytes_leaves_a_context_for_copies_of_shared_prefixes() -> None:
    assert shape(OWN, context_length=512, kv_tokens=9_000, kv_limit_bytes=2_512_000).kv_tokens == 2_000
    with pytest.raises(ModelError, match=r"^the 1023999 bytes of the memory budget are too few for one context of 512"):
        shape(OWN, context_length=512, kv_limit_bytes=1_023_999)


def test_a_few_rows_fit_into_a_gpu_s_memory() -> None:
    assert settings_resolution.short_enough(131_072, 100_000) == 25_000
    assert settings_resolution.short_enough(8_192, 100_000) == 8_192
    assert settings_resolution.short_enough(131_072, 9_000) == 4_096
    assert settings_resolution.short_enough(131_072, 3_000) == 3_000


def test_kv_tokens_are_whole_contexts_at_most() -> None:
    assert shape(context_length=512, kv_tokens=512 * 5 + 511).num_rows == 5
    assert shape(context_length=512, kv_tokens=512).num_rows == 1
    message = (
        "^--kv-tokens 511 are too few for one context of 512 tokens, which takes 512000 bytes: pass a smaller --cont"
    )
    with pytest.raises(ModelError, match=message):
        shape(context_length=512, kv_tokens=511)


def test_a_budget_in_bytes_is_kept() -> None:
    assert shape(context_length=512, kv_limit_bytes=512_000 * 3).num_rows == 3
    assert shape(context_length=512, kv_limit_bytes=512_000 * 3 - 1).num_rows == 2
    assert shape(context_length=512, kv_limit_bytes=512_000 * 9, kv_tokens=1_024).num_rows == 2
    with pytest.raises(ModelError, match=r"^the 511999 bytes of --kv-budget are too few for one context of 512 tokens"):
        shape(context_length=512, kv_limit_bytes=511_999)


def test_sequences_that_were_asked_for_and_do_not_fit_are_refused() -> None:
    assert shape(context_length=512, kv_tokens=1_536, max_num_seqs=3).max_num_seqs == 3
    with pytest.raises(
        ModelError, match=r"^--max-num-seqs 4 needs room for as many contexts of 512 tokens, there is room"
    ):
        shape(context_length=512, kv_tokens=1_536, max_num_seqs=4)


def test_sequences_that_were_chosen_and_do_not_fit_are_fewer() -> None:
    assert shape(context_length=512, kv_tokens=1_536).max_num_seqs == 3
    assert (
        shape(context_length=512, kv_tokens=1_536, generation_config=GenerationConfig(max_num_seqs=9)).max_num_seqs == 3
    )


def test_a_context_above_what_the_model_was_made_for_is_refused() -> None:
    assert shape(context_length=4_096).context_length == 4_096
    with pytest.raises(ModelError, match=r"^--context-length 4097 is above what the model was made for, 4096$"):
        shape(context_length=4_097)
    assert shape(FIXED._replace(trained=None), context_length=8_192).context_length == 8_192


def test_a_block_larger_than_the_context_is_refused() -> None:
    found = shape(context_length=512, kv_block_size=512)
    assert found.total_blocks == found.num_rows
    with pytest.raises(ModelError, match=r"^--kv-block-size 513 is above the context, 512$"):
        shape(context_length=512, kv_block_size=513)
    with pytest.raises(ModelError, match=r"^--kv-block-size 5000 is above the context, 4096$"):
        shape(FIXED._replace(trained=None), kv_block_size=5_000)


numbers = st.integers(1, 10_000)


@given(
    context=st.just(0) | numbers,
    block_size=st.just(-1) | st.integers(1, 300),
    num_seqs=st.just(-1) | st.integers(1, 256),
    kv_tokens=st.just(0) | st.integers(1, 10**6),
    kv_limit_bytes=st.just(0) | st.integers(1, 10**9),
    trained=st.none() | numbers,
    bytes_per_token=st.integers(1, 10**6),
    has_own_rows=st.booleans(),
)
def test_a_shape_keeps_every_limit_or_there_is_none(
    context: int,
    block_size: int,
    num_seqs: int,
    kv_tokens: int,
    kv_limit_bytes: int,
    trained: int | None,
    bytes_per_token: int,
    has_own_rows: bool,
) -> None:
    asked = settings(
        context_length=context,
        kv_block_size=block_size,
        max_num_seqs=num_seqs,
        kv_tokens=kv_tokens,
        kv_limit_bytes=kv_limit_bytes,
    )
    limits = CacheLimits(trained, bytes_per_token, has_own_rows=has_own_rows)
    try:
        found = settings_resolution.size_cache(asked, GenerationConfig(), limits)
    except ModelError:
        return
    assert 1 <= found.max_num_seqs <= found.num_rows <= 256
    assert num_seqs in (-1, found.max_num_seqs)
    assert found.context_length % found.block_size == 0
    assert 0 < found.context_length <= min(context or trained or 4_096, trained or 10_000)
    assert block_size in (-1, found.block_size)
    size = found.kv_tokens
    assert found.context_length <= size
    assert has_own_rows or size == found.num_rows * found.context_length
    assert not kv_tokens or size <= kv_tokens
    most = size + found.context_length if has_own_rows else size
    assert not kv_limit_bytes or most * bytes_per_token <= kv_limit_bytes
    again = msgspec.structs.replace(asked, kv_limit_bytes=0, kv_tokens=size, context_length=found.context_length)
    assert settings_resolution.size_cache(again, GenerationConfig(), limits) == found, "a restart has what there was"


def test_a_chosen_context_is_as_long_as_the_budget_allows_and_one_that_was_asked_for_is_refused() -> None:
    limits = settings_resolution.CacheLimits(trained=4_096, bytes_per_token=10)
    budget = 10 * 1_000
    found = settings_resolution.size_cache(EngineSettings(model="m", kv_limit_bytes=budget), GenerationConfig(), limits)
    assert (found.context_length, found.num_rows) == (992, 1)
    with pytest.raises(ModelError, match="--kv-budget"):
        settings_resolution.size_cache(
            EngineSettings(model="m", kv_limit_bytes=budget, context_length=1_024), GenerationConfig(), limits
        )
