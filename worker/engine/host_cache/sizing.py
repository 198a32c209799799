"""Decides how many copies of blocks a host's memory may hold."""

import os

from tokenbus.worker.engine.host_cache.slot_store import FindProblem, SlotStore
from tokenbus.worker.engine.host_cache.slots import SlotLayout
from tokenbus.worker.engine.runner import ModelError

POLICIES = ("auto", "write-through", "write-back")
_MAX_SLOTS = 1 << 20
"""The prefix tree takes about 1 kB of memory per block."""
_DEFAULT_SLOTS = 65_536
_DEFAULT_BYTES = 1 << 30
_DEFAULT_SHARE = 8
"""Without a setting, at most one in this many bytes of the machine's memory is used for copies."""


def make_store(
    identity: str, block_size: int, block_bytes: int, host_cache_mib: int, find_problem: FindProblem
) -> SlotStore | None:
    """Returns a store with as many slots as the setting allows, or None if it allows none. Raises ModelError if that is
    too many."""
    layout = SlotLayout(block_size, block_bytes, 0)
    budget = budget_bytes(host_cache_mib)
    if host_cache_mib < 0:
        budget = min(budget, _DEFAULT_SLOTS * layout.slot_bytes)
    count = budget // layout.slot_bytes
    if count > _MAX_SLOTS:
        raise ModelError(
            f"--host-cache-mib must be at most {_MAX_SLOTS * layout.slot_bytes >> 20:,} for this model, "
            f"got {host_cache_mib}: it would hold {count:,} blocks, and a worker keeps up to {_MAX_SLOTS:,}"
        )
    return SlotStore(identity, layout._replace(num_slots=count), find_problem) if count else None


def budget_bytes(host_cache_mib: int) -> int:
    """Returns the bytes of host memory that the setting allows for copies."""
    if host_cache_mib >= 0:
        return host_cache_mib << 20
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(_DEFAULT_BYTES, memory // _DEFAULT_SHARE)
