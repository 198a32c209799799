"""The memory that a model needs is the sum of its parts."""

from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.memory.fit import DevicePlacement, MemoryNeed, ModelFacts, Sizes, estimate

MIB = 1 << 20
FACTS = ModelFacts(
    weight_bytes=500 * MIB, kv_bytes_per_token=1 << 10, trained_context=2_048, width=0, vocab_size=0, rows=0
)
SETTINGS = EngineSettings(model="m")


def need_of(
    facts: ModelFacts = FACTS, kv_tokens: int = 8_192, context: int = 2_048, cached: int = 0, **changes: object
) -> MemoryNeed:
    settings = EngineSettings(model="m", **changes)  # type: ignore[arg-type]
    return estimate(facts, settings, Sizes(context, kv_tokens, cached))


def test_a_need_is_the_sum_of_its_parts_and_says_them() -> None:
    need = need_of(ubatch_tokens=512)
    assert (need.weight_bytes, need.kv_bytes) == (500 * MIB, 8_192 << 10)
    assert need.total_bytes == need.weight_bytes + need.kv_bytes + need.compute_bytes
    assert str(need) == "613 MiB (weights 500 MiB, KV 8 MiB, buffers 105 MiB)"
    assert "host cache 64 MiB" in str(need_of(cached=64 * MIB))
    assert MemoryNeed(0, 0, 0).total_bytes == 0


def test_a_batch_keeps_its_states_and_the_mask_of_attention() -> None:
    wide = FACTS._replace(width=1_024)
    assert need_of(wide).compute_bytes - need_of().compute_bytes == 512 * 1_024 * 8 * 4
    longer = need_of(kv_tokens=16_384).compute_bytes - need_of().compute_bytes
    assert longer == 8_192 * (512 * 2 + 64)


def test_without_flash_attention_the_scores_of_all_heads_are_there_at_once() -> None:
    facts = FACTS._replace(heads=14)
    with_it, without = need_of(facts), need_of(facts, flash_attention="off")
    assert without.compute_bytes - with_it.compute_bytes == 8_192 * 512 * (4 * 16 - 2)


def test_layers_with_windows_keep_no_more_than_these() -> None:
    facts = FACTS._replace(window_bytes_per_token=512, window_tokens=1_000)
    assert need_of(facts, kv_tokens=500).kv_bytes == 500 * 1_536
    assert need_of(facts).kv_bytes == (8_192 << 10) + 1_000 * 512


def test_inputs_that_are_embedded_beside_streams_have_memory_of_their_own() -> None:
    embeds = need_of(FACTS._replace(embed_tokens=2_048))
    assert embeds.kv_bytes - need_of().kv_bytes == 2_048 << 10
    assert embeds.step_bytes - need_of().step_bytes == 2_048 * 512 * 2


def test_a_model_that_pools_computes_a_whole_input_at_once() -> None:
    facts = FACTS._replace(width=8)
    longer = need_of(facts._replace(pools=True)).compute_bytes - need_of(facts).compute_bytes
    assert longer == (2_048 - 512) * (8 * 8 * 4 + 8_192 * 2)


def test_what_is_on_gpus_is_not_on_the_host_besides_the_buffers_of_both() -> None:
    need = need_of(FACTS._replace(width=1_024))
    placed = DevicePlacement(gpu_layers=3, weight_bytes=100 * MIB, layer_share=0.5, num_gpus=2)
    assert need.gpu_bytes(placed) == 100 * MIB + need.kv_bytes // 2 + 2 * need.step_bytes
    assert need.host_bytes(placed) == need.total_bytes - 100 * MIB - need.kv_bytes // 2
    assert (need.gpu_bytes(DevicePlacement()), need.host_bytes(DevicePlacement())) == (0, need.total_bytes)
