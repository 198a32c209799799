"""Models that take turns have contexts that leave room for others."""

from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.memory.fit import ModelFacts, Sizes, estimate
from tokenbus.worker.on_demand import model_sizes

MIB = 1 << 20
FACTS = ModelFacts(
    weight_bytes=500 * MIB, kv_bytes_per_token=12 << 10, trained_context=131_072, width=896, vocab_size=0, rows=0
)
SETTINGS = EngineSettings(model="m", host_cache_mib=0)


def test_a_model_has_a_long_context_if_that_leaves_half_of_the_budget_and_else_a_short_one() -> None:
    long = model_sizes.choose_sizes(FACTS, SETTINGS, 4_096 * MIB)
    assert (long.context_length, long.kv_tokens) == (32_768, 32_768)
    short = model_sizes.choose_sizes(FACTS, SETTINGS, 1_500 * MIB)
    assert (short.context_length, short.kv_tokens) == (8_192, 16_384)


def test_a_model_of_a_short_context_has_room_for_four() -> None:
    found = model_sizes.choose_sizes(FACTS._replace(trained_context=2_048), SETTINGS, 4_096 * MIB)
    assert (found.context_length, found.kv_tokens) == (2_048, 8_192)


def test_sizes_that_were_asked_for_count_as_they_are() -> None:
    asked = EngineSettings(model="m", context_length=50_000, kv_tokens=60_000, host_cache_mib=64)
    found = model_sizes.choose_sizes(FACTS, asked, 1)
    assert (found.context_length, found.kv_tokens, found.host_cache_bytes) == (50_000, 60_000, 64 * MIB)


def test_the_process_in_which_constraints_are_tried_counts_for_a_model_that_generates() -> None:
    facts = (FACTS._replace(vocab_size=size) for size in (0, 100_000))
    few, many = (model_sizes.choose_sizes(one, SETTINGS, 8_192 * MIB) for one in facts)
    plain = estimate(FACTS, SETTINGS, Sizes(few.context_length, few.kv_tokens, 0))
    assert few.compute_bytes == plain.compute_bytes + 35 * MIB
    assert many.compute_bytes - few.compute_bytes == 100_000 * (600 + 540)


def test_an_engine_gets_the_sizes_that_were_counted_and_a_simulator_keeps_its_own() -> None:
    found = model_sizes.with_sizes(SETTINGS, model_sizes.choose_sizes(FACTS, SETTINGS, 4_096 * MIB))
    assert (found.context_length, found.kv_tokens, found.kv_limit_bytes) == (32_768, 32_768, 32_768 * (12 << 10))
    nothing = ModelFacts(0, 0, 0, 0, 0, 0)
    assert model_sizes.with_sizes(SETTINGS, model_sizes.choose_sizes(nothing, SETTINGS, 0)) is SETTINGS
