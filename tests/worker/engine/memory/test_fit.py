"""Sizes fit into the memory there is, and settings win."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.memory.fit import (
    UNLIMITED,
    DevicePlacement,
    MemoryNeed,
    ModelFacts,
    Room,
    Rooms,
    fit,
    place,
)

MIB = 1 << 20
GIB = 1 << 30
HALF = ModelFacts(
    weight_bytes=504 * MIB, kv_bytes_per_token=12 << 10, trained_context=131_072, width=896, vocab_size=151_936, rows=65
)
"""A model of half a billion parameters."""
LARGE = HALF._replace(weight_bytes=40 * GIB, kv_bytes_per_token=320 << 10, width=8_192)


def settings(**changes: object) -> EngineSettings:
    return EngineSettings(model="m", **changes)  # type: ignore[arg-type]


def host(num_bytes: int) -> Room:
    return Room(num_bytes, num_bytes, num_bytes - num_bytes // 16)


def fitted(facts: ModelFacts, num_bytes: int, **changes: object) -> MemoryNeed:
    return fit(facts, settings(**changes), Rooms(host(num_bytes)))


@pytest.mark.parametrize(
    ("trained", "context", "kv_tokens"),
    [
        (512, 512, 2_048),
        (8_192, 8_192, 32_768),
        (32_768, 32_768, 65_536),
        (131_072, 131_072, 131_072),
        (1 << 20, 262_144, 262_144),
        (0, 8_192, 32_768),
    ],
)
def test_with_plenty_of_memory_there_is_the_models_own_context_and_four_of_them_up_to_65536_tokens(
    trained: int, context: int, kv_tokens: int
) -> None:
    found = fit(HALF._replace(trained_context=trained), settings(), Rooms(UNLIMITED))
    assert (found.context_length, found.kv_tokens, found.host_cache_bytes) == (context, kv_tokens, GIB)


def test_eight_gibibytes_hold_the_whole_context_of_a_model_of_half_a_billion_parameters() -> None:
    assert fitted(HALF, 8 * GIB).context_length == 131_072


def test_copies_in_a_file_take_no_memory() -> None:
    assert fitted(HALF, 8 * GIB, keep_cache="/cache", host_cache_mib=64).host_cache_bytes == 0


def test_less_memory_takes_from_the_host_cache_first_then_from_the_kv_cache() -> None:
    found = [fitted(HALF, size * GIB) for size in (8, 3, 2)]
    assert [one.context_length for one in found] == [131_072, 131_072, found[2].context_length]
    assert found[0].host_cache_bytes > found[1].host_cache_bytes > found[2].host_cache_bytes > 0
    assert 32_768 < found[2].context_length == found[2].kv_tokens < 131_072


def test_settings_are_taken_as_they_are() -> None:
    found = fitted(HALF, 8 * GIB, context_length=4_096, kv_tokens=5_000, host_cache_mib=64)
    assert (found.context_length, found.kv_tokens, found.host_cache_bytes) == (4_096, 5_000, 64 * MIB)
    assert fitted(HALF, 8 * GIB, kv_tokens=5_000).context_length == 5_000
    assert fitted(HALF, 8 * GIB, context_length=200_000).kv_tokens == 200_000


def test_a_context_that_was_asked_for_is_not_cut_while_the_cache_for_several_is() -> None:
    found = fitted(HALF, 2 * GIB, context_length=30_000)
    assert found.context_length == 30_000 <= found.kv_tokens


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(ModelError, match=r"m needs .* MiB .* of 2,048 MiB are free\. With --context-length \d+ or le"):
        fitted(HALF, 2 * GIB, context_length=131_072)
    with pytest.raises(ModelError, match=r"m needs .* a context of 2,048 tokens, .*weights of at most .* MiB"):
        fitted(LARGE, 8 * GIB)
    with pytest.raises(ModelError, match=r"--cache-type-k q8_0"):
        fitted(LARGE._replace(weight_bytes=GIB), GIB)


def test_the_sizes_that_a_refusal_names_do_fit() -> None:
    with pytest.raises(ModelError) as refusal:
        fitted(HALF, 2 * GIB, context_length=131_072, host_cache_mib=4_096)
    words = str(refusal.value).split()
    length, kv_tokens = (int(words[words.index(flag) + 1]) for flag in ("--context-length", "--kv-tokens"))
    assert fitted(HALF, 2 * GIB, context_length=length, kv_tokens=kv_tokens).context_length == length


def test_a_small_share_never_makes_less_than_a_short_context_while_memory_is_free() -> None:
    found = fit(HALF, settings(), Rooms(Room(8 * GIB, 7 * GIB, 0)))
    assert (found.context_length, found.kv_tokens, found.host_cache_bytes) == (2_048, 2_048, 0)


def test_a_model_that_pools_keeps_no_prefixes_and_has_inputs_of_8192_tokens() -> None:
    found = fitted(HALF._replace(pools=True), 8 * GIB)
    assert (found.context_length, found.kv_tokens, found.host_cache_bytes) == (8_192, 8_192, 0)


sizes = st.integers(0, 1 << 17)


@given(
    facts=st.builds(
        ModelFacts,
        weight_bytes=st.integers(0, 64 * GIB),
        kv_bytes_per_token=st.integers(0, 1 << 20),
        trained_context=sizes,
        width=st.integers(0, 8_192),
        vocab_size=st.integers(0, 200_000),
        rows=st.integers(0, 300),
        state_bytes=st.integers(0, GIB),
        window_bytes_per_token=st.integers(0, 1 << 20),
        window_tokens=st.integers(0, 20_000),
        kv_tokens=st.just(0),
        heads=st.integers(0, 64),
        embed_tokens=st.integers(0, 4_096),
        pools=st.just(False),
    ),
    free=st.integers(0, 128 * GIB),
    share=st.floats(0.001, 1),
    context=st.just(0) | sizes,
    kv_tokens=st.just(0) | sizes,
    cached=st.just(-1) | st.integers(0, 4_096),
)
def test_whatever_is_chosen_fits_and_nothing_that_was_asked_for_changes(
    facts: ModelFacts, free: int, share: float, context: int, kv_tokens: int, cached: int
) -> None:
    asked = settings(context_length=context, kv_tokens=kv_tokens and max(kv_tokens, context), host_cache_mib=cached)
    room = Room(free, free, int(free * share))
    try:
        found = fit(facts, asked, Rooms(room))
    except ModelError:
        return
    assert found.total_bytes <= free
    assert context in (0, found.context_length)
    assert asked.kv_tokens in (0, found.kv_tokens)
    assert found.context_length <= found.kv_tokens
    least = min(facts.trained_context or 8_192, 2_048) if not (context or kv_tokens) else 0
    assert found.context_length >= least
    if found.kv_tokens > max(2_048, context, asked.kv_tokens) and not kv_tokens:
        assert found.total_bytes <= room.chosen_bytes


LAYERS = [100 * MIB] * 24


def placed(gpu_bytes: int, num_gpus: int = 1, **changes: object) -> DevicePlacement:
    return place(LAYERS, 200 * MIB, HALF, settings(**changes), host(gpu_bytes), num_gpus)


def test_all_layers_go_to_a_gpu_that_has_room_for_them() -> None:
    assert placed(8 * GIB) == (25, 200 * MIB + sum(LAYERS), 1.0, 1)


def test_as_many_layers_go_to_a_gpu_as_fit_with_their_keys_and_values_from_the_last_one_on() -> None:
    found = [placed(size * MIB).gpu_layers for size in (0, 200, 400, 1_000, 2_000, 4_000)]
    assert found[0] == 0
    assert found[-1] == 25
    assert all(before <= after for before, after in pairwise(found))
    some = placed(1_500 * MIB)
    assert 1 < some.gpu_layers < 25
    assert some.weight_bytes == 200 * MIB + (some.gpu_layers - 1) * 100 * MIB
    assert some.layer_share == (some.gpu_layers - 1) / 24


def test_layers_that_were_asked_for_go_there_whatever_is_free() -> None:
    assert placed(MIB, gpu_layers=7).gpu_layers == 7
    assert placed(MIB, gpu_layers=999).gpu_layers == 25
    assert placed(80 * GIB, gpu_layers=0) == DevicePlacement()


def test_two_gpus_may_each_have_a_layer_less_than_fits() -> None:
    assert placed(1_500 * MIB, 2).gpu_layers <= placed(1_500 * MIB).gpu_layers - 1


def test_the_kv_cache_of_a_model_on_a_gpu_takes_what_the_gpu_has_for_as_many_contexts_as_sequences() -> None:
    all_layers = placed(80 * GIB)
    rooms = Rooms(host(16 * GIB), host(80 * GIB), all_layers)
    found = fit(HALF, settings(max_num_seqs=16), rooms)
    assert (found.context_length, found.kv_tokens) == (131_072, 16 * 131_072)
    tight = fit(HALF, settings(max_num_seqs=16), rooms._replace(gpu=host(8 * GIB)))
    assert tight.context_length == 131_072 < tight.kv_tokens < 16 * 131_072
    assert tight.gpu_bytes(all_layers) <= host(8 * GIB).chosen_bytes
    assert tight.gpu_bytes(all_layers) > 0.9 * host(8 * GIB).chosen_bytes


def test_a_gpu_without_room_is_named_in_the_refusal() -> None:
    with pytest.raises(ModelError, match=r"MiB on GPUs"):
        fit(HALF, settings(gpu_layers=25), Rooms(host(16 * GIB), host(MIB), placed(MIB, gpu_layers=25)))
