"""Estimates from a model's files the memory that a replica takes, and chooses the sizes that fit.

The parts of an estimate were checked against what engines really take (decision 0064).

Explicit settings are taken as they are. The defaults are the model's own context, a KV cache for several of these, and
a cache in host memory; if that is too much, the host cache shrinks first, then the KV cache, and then the context
(decision 0064)."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from tokenbus.worker.contract.engine_errors import ModelError, ModelTooLargeError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.host_cache import slot_store
from tokenbus.worker.files.device_memory import DeviceMemory

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
_RESERVE_SHARE = 16
_LEAST_RESERVE = 512 << 20
_MOST_RESERVE = 4 << 30
_MAX_RESERVE_SHARE = 4
_UNKNOWN_CONTEXT = 8_192
"""The context for which a model counts as trained if its files don't say."""
_MAX_CONTEXT = 262_144
"""The longest context that is chosen without a setting."""
_MAX_POOLED_INPUT = 8_192
"""The longest input that a model pools without a setting: attention memory grows with its square."""
_CONTEXTS = 4
"""By default there is KV memory for this many contexts (`shared_kv_tokens`)."""
_MAX_SHARED_TOKENS = 65_536
_LEAST_CONTEXT = 2_048
"""No shorter context is chosen: most chats would not fit."""
_OFFLOADED_CONTEXT = 8_192
"""Layers are put on GPUs as long as this many tokens still fit beside them."""
_HOST_CACHE_SHARE = 8
"""If the KV cache has to shrink, the host cache gets one in this many bytes of what both have."""


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
    """Returns the memory that a model takes with these sizes. Raises ModelError if its files have negative ones: less
    than nothing would make room for others."""
    if min(facts) < 0:
        raise ModelError("its files say that it has less than nothing of something; fetch them again")
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


class OtherClaim(NamedTuple):
    """The memory that another process has planned to take of a device."""

    claimed_bytes: int
    taken_bytes: int
    """The part that it has already taken, so that it is no longer free."""
    later_bytes: int = 0
    """The additional memory that it may take gradually, for copies of prefixes."""


class Room(NamedTuple):
    """The memory of a device that a replica may take, including what its process has already taken for it."""

    total_bytes: int
    """The device's total memory."""
    free_bytes: int
    """The part that no other process has taken, or is about to take; others may need some of it later."""
    chosen_bytes: int
    """The part for which sizes are chosen: a share of the memory, without a reserve."""


UNLIMITED = Room(1 << 62, 1 << 62, 1 << 62)
"""The room if nothing is known about it."""


def reserve_bytes(total_bytes: int) -> int:
    """Returns the memory of a device that is left for others, and for what no estimate covers."""
    usual = max(_LEAST_RESERVE, min(_MOST_RESERVE, total_bytes // _RESERVE_SHARE))
    return min(usual, total_bytes // _MAX_RESERVE_SHARE)


def room_of(
    device: DeviceMemory, taken_bytes: int, elsewhere_bytes: int, others: Iterable[OtherClaim], share: float
) -> Room:
    """Returns the room for a part of a process, which has taken `taken_bytes` of the device and claimed
    `elsewhere_bytes` for its other parts. All workers together may have what is free and what they already have; the
    process gets a share of that."""
    listed = list(others)
    own = device.free_bytes + taken_bytes - sum(one.claimed_bytes - one.taken_bytes for one in listed)
    of_all = device.free_bytes + taken_bytes + sum(one.taken_bytes for one in listed)
    later = sum(one.later_bytes for one in listed)
    chosen = min(own - later, int(of_all * share)) - reserve_bytes(device.total_bytes)
    return Room(device.total_bytes, max(0, own - elsewhere_bytes), max(0, chosen - elsewhere_bytes))


class Rooms(NamedTuple):
    """The memory that a replica may take, of the host and of all its GPUs together, and the part of it on GPUs."""

    host: Room
    gpu: Room | None = None
    placement: DevicePlacement = DevicePlacement()

    def allow(self, need: MemoryNeed, bytes_of: Callable[[Room], int]) -> bool:
        """Whether a need fits into as many bytes of each device as `bytes_of` says."""
        fits_host = need.host_bytes(self.placement) <= bytes_of(self.host)
        return fits_host and (self.gpu is None or need.gpu_bytes(self.placement) <= bytes_of(self.gpu))

    def choose(self, need: MemoryNeed) -> bool:
        """Whether a need fits into the memory for which sizes are chosen."""
        return self.allow(need, lambda room: room.chosen_bytes)


def default_kv_tokens(length: int, settings: EngineSettings, placement: DevicePlacement) -> int:
    """Returns the default tokens of KV memory for all sequences of that length together.

    A GPU has no other use for its memory, and clears it quickly."""
    if placement.layer_share >= 1:
        return length * max(settings.max_num_seqs, _CONTEXTS)
    return shared_kv_tokens(length, _MAX_SHARED_TOKENS)


def shared_kv_tokens(length: int, max_shared: int) -> int:
    """Returns the tokens of KV memory for a few contexts, up to `max_shared` tokens, or for one longer context."""
    return max(length, min(_CONTEXTS * length, max_shared))


def wished(facts: ModelFacts, settings: EngineSettings, rooms: Rooms) -> Sizes:
    """Returns the sizes that a replica has if there is enough memory."""
    longest = _MAX_POOLED_INPUT if facts.pools else _MAX_CONTEXT
    length = settings.context_length or min(facts.trained_context or _UNKNOWN_CONTEXT, longest)
    if facts.pools:
        return Sizes(length, length, 0)
    kv_tokens = settings.kv_tokens or facts.kv_tokens or default_kv_tokens(length, settings, rooms.placement)
    if not settings.context_length:
        length = min(length, kv_tokens)
    # the system reclaims the memory of cached files
    has_prefixes = (facts.kv_bytes_per_token or facts.state_bytes) and not settings.keep_cache
    return Sizes(length, kv_tokens, slot_store.budget_bytes(settings, rooms.host.total_bytes) if has_prefixes else 0)


def fit(facts: ModelFacts, settings: EngineSettings, rooms: Rooms) -> MemoryNeed:
    """Returns a replica's memory need with the largest sizes that fit.

    Raises ModelTooLargeError, saying what would fit, if not even a short context does, or not what the settings ask
    for."""
    wish = wished(facts, settings, rooms)
    if rooms.choose(need := estimate(facts, settings, wish)):
        return need
    least = _least(facts, settings, wish)
    smallest = estimate(facts, settings, least)
    if not rooms.allow(smallest, lambda room: room.free_bytes):
        raise ModelTooLargeError(_refusal(facts, settings, smallest, rooms))
    cached = wish.host_cache_bytes
    if settings.host_cache_mib < 0:  # the KV cache comes first
        left = max(0, rooms.host.chosen_bytes - smallest.host_bytes(rooms.placement))
        cached = min(cached, left // _HOST_CACHE_SHARE)
    unit = max(settings.kv_block_size, 1)
    low, high = least.kv_tokens // unit, wish.kv_tokens // unit
    while low < high:  # the most blocks that fit; `low` of them do, or nothing does
        middle = (low + high + 1) // 2
        tried = Sizes(min(wish.context_length, middle * unit), middle * unit, cached)
        if rooms.choose(estimate(facts, settings, tried)):
            low = middle
        else:
            high = middle - 1
    kv_tokens = max(low * unit, least.kv_tokens)
    length = wish.context_length if settings.context_length else min(wish.context_length, kv_tokens)
    return estimate(facts, settings, Sizes(length, kv_tokens, cached))


def place(
    layers: Sequence[int],
    output_bytes: int,
    facts: ModelFacts,
    settings: EngineSettings,
    gpu: Room,
    num_gpus: int,
) -> DevicePlacement:
    """Returns which of a model's layers go to GPUs: those that the settings ask for, or the most that fit there, with
    keys and values of a reasonable context. `layers` has the size of each one's weights.

    Several GPUs get whole layers each, so each may have one layer less than would fit."""
    length = settings.context_length or min(facts.trained_context or _UNKNOWN_CONTEXT, _OFFLOADED_CONTEXT)
    need = estimate(facts, settings, Sizes(length, max(length, settings.kv_tokens), 0))
    lost = max(layers, default=0) * (num_gpus - 1)
    most = len(layers) + 1
    asked = settings.gpu_layers
    for count in range(most if asked < 0 else min(asked, most), 0, -1):
        # the output comes first, then layers from the last one on
        there = output_bytes + sum(layers[most - count :])
        placement = DevicePlacement(count, there, (count - 1) / max(1, len(layers)), num_gpus)
        if asked >= 0 or need.gpu_bytes(placement) + lost <= gpu.chosen_bytes:
            return placement
    return DevicePlacement()


def _least(facts: ModelFacts, settings: EngineSettings, wish: Sizes) -> Sizes:
    """Returns the smallest useful sizes that the settings allow."""
    length = settings.context_length or min(wish.context_length, _LEAST_CONTEXT)
    kv_tokens = settings.kv_tokens or facts.kv_tokens or length
    return Sizes(length, kv_tokens, 0 if settings.host_cache_mib < 0 else wish.host_cache_bytes)


def _refusal(facts: ModelFacts, settings: EngineSettings, least: MemoryNeed, rooms: Rooms) -> str:
    """Says what is missing, and what would fit."""
    host, gpu = rooms.host, rooms.gpu
    free = f"{mib(host.free_bytes)} of {mib(host.total_bytes)} are free"
    if gpu is not None:
        free += f", and {mib(gpu.free_bytes)} on GPUs"
    problem = f"{settings.model} needs {least} for a context of {least.context_length:,} tokens, and {free}"
    bare = msgspec.structs.replace(settings, context_length=0, kv_tokens=0, host_cache_mib=-1)
    smallest = estimate(facts, bare, _least(facts, bare, wished(facts, bare, rooms)))
    if rooms.allow(smallest, lambda room: room.free_bytes):
        found = fit(facts, bare, rooms)
        return (
            f"{problem}. With --context-length {found.context_length} or less, --kv-tokens {found.kv_tokens} or less "
            "and --host-cache-mib -1 it fits, or without these"
        )
    remedies = []
    if settings.cache_type_k == "f16" and least.kv_bytes > least.total_bytes // 8:
        remedies.append("keys and values in half the memory: --cache-type-k q8_0 --cache-type-v q8_0")
    left = host.free_bytes + (gpu.free_bytes if gpu is not None else 0) - (smallest.total_bytes - facts.weight_bytes)
    if left > 0:
        remedies.append(f"weights of at most {mib(left)}, more quantized or of a smaller model")
    remedies.append(f"{mib(least.total_bytes - host.free_bytes)} more memory")
    return f"{problem}. Give it {', or '.join(remedies)}"
