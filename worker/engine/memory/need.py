"""Estimates the memory that a model will take before it is loaded, from what its files say; pure.

The parts were compared with what engines really take (decision 0064)."""

from typing import NamedTuple

from tokenbus.worker.contract.engine_settings import EngineSettings

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
_MASK_BYTES = 2
"""A place of the attention mask, for each token of a batch and each of the KV cache, with flash attention."""
_TOKEN_BYTES = 64
"""The bytes that prefix tree, scheduler and streams keep for each token of the KV cache."""


class ModelFacts(NamedTuple):
    """The sizes of a model, as its files say them."""

    weight_bytes: int
    """The size of the files with weights, of the type in which they are loaded."""
    kv_bytes_per_token: int
    """Keys and values of one token, in all layers that attend to everything. 0 for a model that keeps none."""
    trained_context: int
    """The tokens for which the model was trained; 0 if its files don't say."""
    width: int
    """The numbers of a token's hidden state."""
    vocab_size: int
    rows: int
    """The sequences whose logits are kept at the same time."""
    state_bytes: int = 0
    """Recurrent states of all lanes."""
    kv_tokens: int = 0
    """The tokens of KV memory, where an engine has its own rule for that."""
    heads: int = 0
    """Attention heads of a layer."""
    window_bytes_per_token: int = 0
    """Keys and values of one token in the layers that attend to a window."""
    window_tokens: int = 0
    """The tokens in all windows together."""
    embed_tokens: int = 0
    """The longest input that a model which generates embeds beside that, in KV memory and buffers of its own."""
    pools: bool = False
    """Whether the model generates nothing: a whole input is computed at once, and no prefix is kept."""


class DevicePlacement(NamedTuple):
    """The part of a model that is on GPUs."""

    gpu_layers: int = 0
    """One more than the model has if its output is there too."""
    weight_bytes: int = 0
    layer_share: float = 0.0
    """The share of the layers that are there, with their keys and values."""
    num_gpus: int = 0


class Sizes(NamedTuple):
    """The sizes of a replica that are chosen by the memory there is."""

    context_length: int
    """The most tokens of one sequence."""
    kv_tokens: int
    """The tokens of KV memory for all sequences together."""
    host_cache_bytes: int
    """Room for prefixes that no sequence uses."""


class MemoryNeed(NamedTuple):
    """The memory that a loaded model takes, in bytes."""

    weight_bytes: int
    kv_bytes: int
    compute_bytes: int
    """Buffers of a step, and the engine process itself."""
    step_bytes: int = 0
    """The part of the above that every device needs that computes."""
    host_cache_bytes: int = 0
    """Room for prefixes that no sequence uses."""
    context_length: int = 1
    """The tokens of one sequence for which this is enough."""
    kv_tokens: int = 0
    """The tokens of all sequences for which this is enough."""

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.compute_bytes + self.host_cache_bytes

    def gpu_bytes(self, placement: DevicePlacement) -> int:
        """Returns the part of it that is on GPUs."""
        there = placement.weight_bytes + int(self.kv_bytes * placement.layer_share)
        return there + self.step_bytes * placement.num_gpus

    def host_bytes(self, placement: DevicePlacement) -> int:
        """Returns the part of it that is in the host's memory, which prepares each step for the GPUs too."""
        return (
            self.total_bytes
            - min(placement.weight_bytes, self.weight_bytes)
            - int(self.kv_bytes * placement.layer_share)
        )

    def __str__(self) -> str:
        parts = f"weights {mib(self.weight_bytes)}, KV {mib(self.kv_bytes)}, buffers {mib(self.compute_bytes)}"
        if self.host_cache_bytes:
            parts += f", host cache {mib(self.host_cache_bytes)}"
        return f"{mib(self.total_bytes)} ({parts})"


def estimate(facts: ModelFacts, settings: EngineSettings, sizes: Sizes) -> MemoryNeed:
    """Returns the memory that a model takes with these sizes."""
    batch = min(settings.ubatch_tokens, settings.max_num_batched_tokens)
    if facts.pools:
        batch = max(batch, sizes.context_length)
    states = batch * _STATES * facts.width * _F32_BYTES
    logits = facts.rows * facts.vocab_size * _F32_BYTES * _LOGITS_COPIES
    tables = facts.vocab_size * _VOCABULARY_BYTES
    num_windowed = min(sizes.kv_tokens, facts.window_tokens) + facts.embed_tokens
    cells = sizes.kv_tokens + facts.embed_tokens
    kv = cells * facts.kv_bytes_per_token + num_windowed * facts.window_bytes_per_token + facts.state_bytes
    attention = cells * batch * _mask_bytes(facts, settings) if facts.kv_bytes_per_token else 0
    states *= 2 if facts.embed_tokens else 1
    return MemoryNeed(
        weight_bytes=facts.weight_bytes,
        kv_bytes=kv,
        compute_bytes=_PROCESS_BYTES + tables + sizes.kv_tokens * _TOKEN_BYTES + states + logits + attention,
        step_bytes=states + attention,
        host_cache_bytes=sizes.host_cache_bytes,
        context_length=sizes.context_length,
        kv_tokens=sizes.kv_tokens,
    )


def _mask_bytes(facts: ModelFacts, settings: EngineSettings) -> int:
    """Returns what attention between one token and another takes while a layer is computed."""
    if settings.flash_attention == "off":  # the scores of all heads are there at the same time
        return (facts.heads + 2) * _F32_BYTES
    return _MASK_BYTES


def mib(num_bytes: int) -> str:
    """Returns a size as text, rounded up."""
    return f"{-(-num_bytes // _MIB):,} MiB"
