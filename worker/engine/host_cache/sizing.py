"""Decides how many copies of blocks a host's memory may hold."""

from tokenbus.worker.engine import device_memory
from tokenbus.worker.engine.host_cache.slot_store import FindProblem, SlotStore
from tokenbus.worker.engine.host_cache.slots import SlotLayout
from tokenbus.worker.engine.process.settings import EngineSettings
from tokenbus.worker.engine.runner import ModelError

POLICIES = ("auto", "write-through", "write-back")
_MAX_SLOTS = 1 << 20
"""The prefix tree takes about 1 kB of memory per block."""
_DEFAULT_SLOTS = 65_536
_DEFAULT_BYTES = 1 << 30
_DEFAULT_SHARE = 8
"""Without a setting, at most one in this many bytes of the machine's memory is used for copies."""


def make_store(
    identity: str, block_size: int, block_bytes: int, settings: EngineSettings, find_problem: FindProblem
) -> SlotStore | None:
    """Returns a store with as many slots as the settings allow, or None if they allow none. Raises ModelError if that
    is too many."""
    layout = SlotLayout(block_size, block_bytes, 0)
    budget = budget_bytes(settings)
    if settings.host_cache_mib < 0:
        budget = min(budget, _DEFAULT_SLOTS * layout.slot_bytes)
    count = budget // layout.slot_bytes
    if count > _MAX_SLOTS:
        raise ModelError(
            f"--host-cache-mib must be at most {_MAX_SLOTS * layout.slot_bytes >> 20:,} for this model, "
            f"got {settings.host_cache_mib}: it would hold {count:,} blocks, and a worker keeps up to {_MAX_SLOTS:,}"
        )
    return SlotStore(identity, layout._replace(num_slots=count), find_problem) if count else None


def budget_bytes(settings: EngineSettings, total_bytes: int | None = None) -> int:
    """Returns the bytes of host memory that the settings allow for copies, on a machine or in a container that has
    `total_bytes`; None reads how many."""
    if settings.host_cache_mib >= 0:
        return settings.host_cache_mib << 20
    if total_bytes is None:
        host = device_memory.host()
        total_bytes = host.total_bytes if host is not None else _DEFAULT_BYTES
    allowed = min(_DEFAULT_BYTES, total_bytes // _DEFAULT_SHARE)
    return min(allowed, settings.host_cache_limit_bytes or allowed)
