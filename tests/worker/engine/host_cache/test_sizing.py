"""A host cache has the slots that its setting pays for, and no other number."""

import pytest

from tokenbus.worker.engine.host_cache import sizing
from tokenbus.worker.engine.host_cache.slots import SlotLayout
from tokenbus.worker.engine.process.settings import EngineSettings
from tokenbus.worker.engine.runner import ModelError

BLOCK, NUM_BYTES = 16, 4_000
SLOT_BYTES = SlotLayout(BLOCK, NUM_BYTES, 0).slot_bytes
MOST_MIB = SLOT_BYTES  # 2**20 slots


def num_slots(host_cache_mib: int) -> int:
    store = sizing.make_store(
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
