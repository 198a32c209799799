"""Decides how many copies of blocks or checkpoints a host's memory may hold."""

from tokenbus.worker.contract.contract import CheckpointSizes
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.host_cache.slot_store import FindProblem, FindStateProblem, SlotStore
from tokenbus.worker.engine.host_cache.slots import SlotLayout
from tokenbus.worker.files import device_memory

_MAX_SLOTS = 1 << 20
"""The prefix tree takes about 1 kB of memory per block."""
_DEFAULT_SLOTS = 65_536
_LEAST_TOKENS = 16
"""A checkpoint with fewer tokens is of little use."""
_SLOT_TOKENS = 64
"""A slot for checkpoints has room for the keys and values of this many tokens, within the limits `_MIN_SLOT_BYTES` and
`_MAX_SLOT_BYTES`."""
_MIN_SLOT_BYTES = 4_096
_MAX_SLOT_BYTES = 1 << 20
_MIN_SLOT_TOKENS = 256
_BYTES_PER_TOKEN_ID = 64
"""A slot has room for one token id per this many bytes of data: the ids take a sixteenth of it."""
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


def make_checkpoint_store(
    identity: str,
    sizes: CheckpointSizes,
    settings: EngineSettings,
    find_problem: FindProblem,
    find_state_problem: FindStateProblem,
) -> SlotStore | None:
    """Returns a store for checkpoints with states, keys and values of these sizes, or None if there is no room for
    any."""
    layout = _checkpoint_layout(sizes.state_bytes, sizes.token_bytes)
    most = _DEFAULT_SLOTS if settings.host_cache_mib < 0 else _MAX_SLOTS
    count = min(most, budget_bytes(settings) // layout.slot_bytes)
    named = f"{identity}:checkpoints {sizes.state_bytes},{sizes.token_bytes},{sizes.copy_bytes}"
    return SlotStore(named, layout._replace(num_slots=count), find_problem, find_state_problem) if count else None


def checkpoint_sizes(sizes: CheckpointSizes, store: SlotStore | None) -> CheckpointSizes | None:
    """Returns the sizes of checkpoints in a store, or None if there is no room for even one."""
    if store is None:
        return None
    layout = store.layout
    stored = sizes._replace(
        budget_bytes=layout.num_slots * layout.slot_bytes,
        slot_bytes=layout.slot_bytes,
        slot_data_bytes=layout.block_bytes,
        slot_tokens=layout.block_size,
    )
    needed = stored.state_copy_bytes(_LEAST_TOKENS) + stored.kv_bytes(_LEAST_TOKENS)
    return stored if needed <= stored.budget_bytes else None


def _checkpoint_layout(state_bytes: int, token_bytes: int) -> SlotLayout:
    """Returns slots small enough to waste little in the last one of a copy, and large enough to be few."""
    least = min(state_bytes, _SLOT_TOKENS * token_bytes or state_bytes)
    data_bytes = min(_MAX_SLOT_BYTES, max(_MIN_SLOT_BYTES, 1 << max(0, least.bit_length() - 1)))
    return SlotLayout(max(_MIN_SLOT_TOKENS, data_bytes // _BYTES_PER_TOKEN_ID), data_bytes, 0)


def budget_bytes(settings: EngineSettings, total_bytes: int | None = None) -> int:
    """Returns the bytes of host memory that the settings allow for copies, on a machine or in a container with
    `total_bytes`; None reads that from the system."""
    if settings.host_cache_mib >= 0:
        return settings.host_cache_mib << 20
    if total_bytes is None:
        host = device_memory.host()
        total_bytes = host.total_bytes if host is not None else _DEFAULT_BYTES
    allowed = min(_DEFAULT_BYTES, total_bytes // _DEFAULT_SHARE)
    return min(allowed, settings.host_cache_limit_bytes or allowed)
