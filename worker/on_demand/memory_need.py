"""Estimates the memory that a model will take before it is loaded, from what its files say; pure.

The parts were compared with what engines really take (decision 0064)."""

from typing import NamedTuple

from tokenbus.worker.engine.gguf import kv_memory
from tokenbus.worker.engine.host_cache import sizing
from tokenbus.worker.engine.process.settings import EngineSettings

_MIB = 1 << 20
_PROCESS_BYTES = 96 * _MIB
"""An engine process with its libraries, before it has a model."""
_VOCABULARY_BYTES = 600
"""The bytes that a token of the vocabulary takes in tables: texts, merges, the tokenizer that routers get."""
_STATES = 8
"""Hidden states of a whole batch that a step keeps at the same time."""
_LOGITS_COPIES = 2
"""Where a step computes its logits, and where they can be read."""
_F32_BYTES = 4
_UNKNOWN_CONTEXT = 8_192
"""The tokens for which a model counts as trained if its files don't say."""


class ModelFacts(NamedTuple):
    """The sizes of a model, as its files say them."""

    weight_bytes: int
    """The size of the files with weights, of the type in which they are loaded."""
    kv_bytes_per_token: int
    """Keys and values of one token, in all layers. 0 for a model that keeps none."""
    trained_context: int
    """The tokens for which the model was trained."""
    width: int
    """The numbers of a token's hidden state."""
    vocab_size: int
    rows: int
    """The sequences whose logits are kept at the same time."""
    state_bytes: int = 0
    """Recurrent states of all lanes."""
    kv_tokens: int = 0
    """The tokens of KV memory, where an engine has its own rule for that."""


class MemoryNeed(NamedTuple):
    """The memory that a loaded model takes, in bytes."""

    weight_bytes: int
    kv_bytes: int
    compute_bytes: int
    """Buffers of a step, and the engine process itself."""
    host_cache_bytes: int = 0
    """Room for prefixes that no sequence uses."""
    context_length: int = 1
    """The tokens of one sequence for which this is enough."""

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.compute_bytes + self.host_cache_bytes

    def __str__(self) -> str:
        parts = f"weights {mib(self.weight_bytes)}, KV {mib(self.kv_bytes)}, buffers {mib(self.compute_bytes)}"
        if self.host_cache_bytes:
            parts += f", host cache {mib(self.host_cache_bytes)}"
        return f"{mib(self.total_bytes)} ({parts})"


def estimate(facts: ModelFacts, settings: EngineSettings) -> MemoryNeed:
    """Returns the memory that a model takes with these settings."""
    context = kv_memory.context_length(settings, facts.trained_context or _UNKNOWN_CONTEXT)
    kv_tokens = settings.kv_tokens or facts.kv_tokens or kv_memory.default_kv_tokens(context)
    states = min(settings.ubatch_tokens, settings.max_num_batched_tokens) * _STATES * facts.width * _F32_BYTES
    logits = facts.rows * facts.vocab_size * _F32_BYTES * _LOGITS_COPIES
    tables = facts.vocab_size * _VOCABULARY_BYTES
    has_prefixes = facts.kv_bytes_per_token or facts.state_bytes
    return MemoryNeed(
        weight_bytes=facts.weight_bytes,
        kv_bytes=kv_tokens * facts.kv_bytes_per_token + facts.state_bytes,
        compute_bytes=_PROCESS_BYTES + states + logits + tables,
        host_cache_bytes=sizing.budget_bytes(settings.host_cache_mib) if has_prefixes else 0,
        context_length=context,
    )


def mib(num_bytes: int) -> str:
    """Returns a size as text, rounded up."""
    return f"{-(-num_bytes // _MIB):,} MiB"
