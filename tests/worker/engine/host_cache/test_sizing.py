"""A host cache has the slots that its setting pays for, and no other number."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.worker.contract.contract import CheckpointSizes
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.host_cache import slot_store
from tokenbus.worker.engine.host_cache.slot_store import SlotStore
from tokenbus.worker.engine.host_cache.slots import SlotLayout

BLOCK, NUM_BYTES = 16, 4_000
SLOT_BYTES = SlotLayout(BLOCK, NUM_BYTES, 0).slot_bytes
MOST_MIB = SLOT_BYTES  # 2**20 slots


def num_slots(host_cache_mib: int) -> int:
    store = slot_store.make_store(
        "model", BLOCK, NUM_BYTES, EngineSettings(model="m", host_cache_mib=host_cache_mib), lambda *_: ""
    )
    return 0 if store is None else store.layout.num_slots


def test_a_setting_buys_as_many_slots_as_fit() -> None:
    assert [num_slots(mib) for mib in (0, 1, 700)] == [0, (1 << 20) // SLOT_BYTES, (700 << 20) // SLOT_BYTES]
    assert num_slots(700) > 65_536


def test_without_a_setting_there_are_no_more_slots_than_a_prefix_tree_should_hold() -> None:
    assert 0 < num_slots(-1) <= 65_536


def test_a_setting_that_would_be_cut_is_refused_with_the_largest_that_is_not() -> None:
    with pytest.raises(
        ModelError, match=rf"--host-cache-mib must be at most {MOST_MIB:,} for this model, got"
    ) as raised:
        num_slots(MOST_MIB + 1)
    assert "1,048,576" in str(raised.value)


def checkpoint_store(state_bytes: int, token_bytes: int, host_cache_mib: int) -> SlotStore | None:
    wanted = EngineSettings(model="m", host_cache_mib=host_cache_mib)
    sizes = CheckpointSizes(0, state_bytes, token_bytes, 500)
    return slot_store.make_checkpoint_store("m", sizes, wanted, lambda *_: "", lambda data: "")


@given(st.integers(1, 200 << 20), st.sampled_from([0, 1, 2_000, 100_000]), st.integers(-1, 64))
def test_checkpoints_that_fit_in_the_budget_fit_in_the_slots(
    state_bytes: int, token_bytes: int, host_cache_mib: int
) -> None:
    store = checkpoint_store(state_bytes, token_bytes, host_cache_mib)
    sizes = slot_store.checkpoint_sizes(CheckpointSizes(0, state_bytes, token_bytes, 500), store)
    if store is None or sizes is None:
        return
    layout = store.layout
    assert sizes.budget_bytes <= slot_store.budget_bytes(EngineSettings(model="m", host_cache_mib=host_cache_mib))
    assert layout.num_slots <= (65_536 if host_cache_mib < 0 else 1 << 20)
    for num_tokens in (1, 16, 2_047, 100_000):
        parts = layout.parts(state_bytes, 0 if token_bytes else num_tokens)
        assert sizes.state_copy_bytes(num_tokens) == parts * layout.slot_bytes
        if token_bytes:
            parts = layout.parts(500 + num_tokens * token_bytes, num_tokens)
            assert sizes.kv_bytes(num_tokens) == parts * layout.slot_bytes
    left_over = sizes.state_copy_bytes(16) - state_bytes
    assert left_over <= layout.slot_bytes + state_bytes * 2 // 5


def test_without_room_for_one_checkpoint_there_are_none() -> None:
    assert checkpoint_store(1_000, 10, 0) is None
    assert (
        slot_store.checkpoint_sizes(CheckpointSizes(0, 5 << 20, 1_000, 500), checkpoint_store(5 << 20, 1_000, 1))
        is None
    )
