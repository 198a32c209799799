"""Chooses the sizes of a model that takes turns with others.

A model that took all available memory would force the others out each time. So it gets a context that is long enough
for most uses, or a short one if that would take more than half of the budget (decision 0064)."""

import msgspec

from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.host_cache import slot_store
from tokenbus.worker.engine.memory import fit
from tokenbus.worker.engine.memory.need import MemoryNeed, ModelFacts, Sizes, estimate
from tokenbus.worker.files import device_memory

_LONG_CONTEXT = 32_768
_SHORT_CONTEXT = 8_192
_CONSTRAINT_BYTES = 35 << 20
_CONSTRAINT_TOKEN_BYTES = 540
"""The process in which a model's constraints are tried, and what it takes for each token of the vocabulary. It outlives
the first constraint; for a model that stays it comes out of the reserve."""
_MAX_SHARED_TOKENS = 16_384
"""Less than a model that stays gets (`memory/fit.py`)."""


def choose(facts: ModelFacts, settings: EngineSettings, budget_bytes: int) -> MemoryNeed:
    """Returns a model's memory need within a budget for all; 0 means the machine's memory."""
    longest = min(facts.trained_context or _SHORT_CONTEXT, _LONG_CONTEXT)
    need = _need(facts, settings, longest)
    if need.total_bytes > _budget(budget_bytes) // 2:
        need = _need(facts, settings, min(longest, _SHORT_CONTEXT))
    return need


def sized(settings: EngineSettings, need: MemoryNeed) -> EngineSettings:
    """Returns the settings with which an engine takes no more than planned. A simulator takes nothing."""
    if not need.weight_bytes:
        return settings
    return msgspec.structs.replace(
        settings, context_length=need.context_length, kv_tokens=need.kv_tokens, kv_limit_bytes=need.kv_bytes
    )


def _need(facts: ModelFacts, settings: EngineSettings, longest: int) -> MemoryNeed:
    length = settings.context_length or longest
    shared = fit.shared_kv_tokens(length, _MAX_SHARED_TOKENS)
    kv_tokens = settings.kv_tokens or facts.kv_tokens or (length if facts.pools else shared)
    has_prefixes = not facts.pools and (facts.kv_bytes_per_token or facts.state_bytes)
    # the system reclaims the memory of cached files
    cached = slot_store.budget_bytes(settings) if has_prefixes and not settings.keep_cache else 0
    need = estimate(facts, settings, Sizes(min(length, kv_tokens), kv_tokens, cached))
    isolated = 0 if facts.pools else _CONSTRAINT_BYTES + facts.vocab_size * _CONSTRAINT_TOKEN_BYTES
    return need._replace(compute_bytes=need.compute_bytes + isolated)


def _budget(budget_bytes: int) -> int:
    host = device_memory.host()
    return budget_bytes or (host.total_bytes if host is not None else 0)
