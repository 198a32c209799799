"""Estimates from a model's files the memory that it will take, before it is loaded.

The parts were checked against what engines really take (decision 0064)."""

from typing import NamedTuple

from tokenbus.worker.contract.engine_settings import EngineSettings

_MIB = 1 << 20
_PROCESS_BYTES = 96 * _MIB
"""An engine process with its libraries, before it has a model."""
_VOCABULARY_BYTES = 600
"""The bytes per vocabulary token in tables: texts, merges, the tokenizer that routers get."""
_STATES = 8
"""The number of hidden states of a whole batch that a step keeps at once."""
_LOGITS_COPIES = 2
"""The buffers in which a step computes its logits, and from which they are read."""
_F32_BYTES = 4
_MASK_BYTES = 2
"""Bytes of the attention mask for each pair of a batch's token and a KV cache's, with flash attention."""
SCORE_COPIES = 4
"""The buffers of onnxruntime in which plain attention keeps the scores of all heads at once."""
MAX_SCORE_BYTES = 256 << 20
"""ONNX engines compute a prompt in runs so short that none of these takes more than this."""
PADDING_TOKENS = 4_096
"""The padding that a batch of plain attention may have without a setting."""
GQA_SCORE_BYTES = 64 << 20
"""The most memory for the scores of a GroupQueryAttention node, which computes them in parts."""
_TOKEN_BYTES = 64
"""The bytes that prefix tree, scheduler and streams keep per token of the KV cache."""


class ModelFacts(NamedTuple):
    """The sizes of a model, as stated by its files."""

    weight_bytes: int
    """The size of the weights, in the type in which they are loaded."""
    kv_bytes_per_token: int
    """Bytes of one token's keys and values, in all layers that attend to everything. 0 for a model without any."""
    trained_context: int
    """The context length for which the model was trained; 0 if its files don't say."""
    width: int
    """The width of a token's hidden state."""
    vocab_size: int
    rows: int
    """The number of sequences whose logits are kept at once."""
    state_bytes: int = 0
    """Bytes of all lanes' recurrent states."""
    kv_tokens: int = 0
    """The tokens of KV memory, if an engine has its own rule for that."""
    heads: int = 0
    """The number of a layer's attention heads."""
    window_bytes_per_token: int = 0
    """Bytes of one token's keys and values in the layers that attend to a window."""
    window_tokens: int = 0
    """The number of tokens in all windows together."""
    embed_tokens: int = 0
    """The longest input that a generating model can also embed, in separate KV memory and buffers."""
    pools: bool = False
    """Whether the model generates nothing: a whole input is computed at once, and no prefix is kept."""
    copies_lanes: bool = False
    """Whether each lane holds tokens of its own: then copies of shared prefixes may take another context."""
    padding_tokens: int = 0
    """Tokens of KV memory that are lost where sequences of different lengths share a batch."""
    batch_tokens: int = 0
    """The most tokens that the device computes at once; 0: what the settings say."""
    score_copies: int = 0
    """The buffers that hold the scores of all heads at the same time; 0 if attention keeps only a mask."""
    max_score_bytes: int = 0
    """The most bytes of one such buffer; 0 sets no limit."""


class DevicePlacement(NamedTuple):
    """The part of a model that is on GPUs."""

    gpu_layers: int = 0
    """One more than the model has if the output layer is there too."""
    weight_bytes: int = 0
    layer_share: float = 0.0
    """The share of the layers that are there, with their keys and values."""
    num_gpus: int = 0


class Sizes(NamedTuple):
    """The sizes of a replica that depend on available memory."""

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
    """The part of the above that every computing device needs."""
    host_cache_bytes: int = 0
    """Room for prefixes that no sequence uses."""
    context_length: int = 1
    """The most tokens of one sequence that this suffices for."""
    kv_tokens: int = 0
    """The most tokens of all sequences that this suffices for."""

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.compute_bytes + self.host_cache_bytes

    def gpu_bytes(self, placement: DevicePlacement) -> int:
        """Returns the part of it that is on GPUs."""
        there = placement.weight_bytes + int(self.kv_bytes * placement.layer_share)
        return there + self.step_bytes * placement.num_gpus

    def host_bytes(self, placement: DevicePlacement) -> int:
        """Returns the part of it in host memory, where each step is prepared for the GPUs too."""
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
    batch = facts.batch_tokens or min(settings.ubatch_tokens, settings.max_num_batched_tokens)
    if facts.pools:
        batch = max(batch, sizes.context_length)
    states = batch * _STATES * facts.width * _F32_BYTES
    logits = facts.rows * facts.vocab_size * _F32_BYTES * _LOGITS_COPIES
    tables = facts.vocab_size * _VOCABULARY_BYTES
    num_windowed = min(sizes.kv_tokens, facts.window_tokens) + facts.embed_tokens
    cells = sizes.kv_tokens + facts.embed_tokens + facts.padding_tokens
    cells += sizes.context_length if facts.copies_lanes else 0
    kv = cells * facts.kv_bytes_per_token + num_windowed * facts.window_bytes_per_token + facts.state_bytes
    attention = _attention_bytes(facts, settings, batch, cells, sizes.context_length)
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


def _attention_bytes(facts: ModelFacts, settings: EngineSettings, batch: int, cells: int, length: int) -> int:
    """Returns the memory for attention between tokens while a layer is computed."""
    if facts.score_copies:
        scores = facts.heads * batch * length * _F32_BYTES
        return facts.score_copies * min(scores, facts.max_score_bytes or scores)
    if not facts.kv_bytes_per_token:
        return 0
    if settings.flash_attention == "off":  # the scores of all heads exist at the same time
        return cells * batch * (facts.heads + 2) * _F32_BYTES
    return cells * batch * _MASK_BYTES


def mib(num_bytes: int) -> str:
    """Returns a size as text, rounded up."""
    return f"{-(-num_bytes // _MIB):,} MiB"
