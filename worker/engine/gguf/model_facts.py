"""Reads from a GGUF's metadata what kind of model it is, how much memory it needs, and how its keys and values are kept
within a budget. Needs no library."""

import enum
import math
import os.path
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.memory.fit import ModelFacts
from tokenbus.worker.engine.scheduling.row_tiles import RowTiles
from tokenbus.worker.files import gguf_metadata, number_types
from tokenbus.worker.files.gguf_metadata import Metadata
from tokenbus.worker.files.layouts import GgufLayout

IDLE_LANES = 48
"""Lanes for the ends of cached prefixes."""
TILE_ROWS = 64
"""The tokens that llama.cpp's attention on CPUs computes together, if there are as many (`GGML_FA_TILE_Q`)."""
_BY_TOKEN, _BY_TILE = 6.5, 2.4
"""The time of a multiplication of attention on a CPU, by token and in tiles, compared with one of the weights (0.5B
shape, Q8_0, keys and values in F16, AVX2, at 600 to 4,000 cells: 86, 32 and 13 ps)."""
OTHER_ROWS = TILE_ROWS
"""Rows of logits in a pass besides those of running sequences: for the log probabilities of prompts, of which this many
tokens are computed at a time. llama.cpp wants a row for each of its sequences, of which there are fewer."""
EMBEDDED_INPUTS = 16
"""The most inputs that a model which generates embeds in one batch; each costs a row of logits."""
MEAN_OUTPUTS = 64
"""The most tokens whose states are returned at once if an embedding is the mean of all; each costs a row of logits
too."""
_MAX_DEFAULT_EMBED_TOKENS = 2_048
_CACHE_TYPES = {kind.name: kind for kind in number_types.ALL}
_F32_BYTES = 4
_BLOCK = re.compile(r"blk\.(\d{1,6})\.", re.ASCII)
_WINDOW_PATTERNS = {
    "afmoe": 4,
    "cohere2": 4,
    "exaone4": 4,
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gpt-oss": 2,
    "llama4": 4,
    "olmo2": 4,
    "smallthinker": 4,
}
"""Architectures whose files need not say which layers have windows: all but one in this many. Files of others may name
a window too, which llama.cpp ignores."""
_RECURRENT_ARCHITECTURES = ("arwkv7", "mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7")
"""Those in which no layer attends, even if their files name heads."""
_INTERVAL_ARCHITECTURES = ("qwen3next", "qwen35", "qwen35moe")
"""Those in which one layer in this many attends, and the others have a recurrent state."""


class PoolingType(enum.Enum):
    """The ways in which llama.cpp makes one row from an input's tokens, with its numbers for them."""

    MEAN = 1
    CLS = 2
    """The state of the first token."""
    LAST = 3
    """The state of the last token."""
    RANK = 4
    """The output of a classification head for the first state, or for the last one in a causal model."""


def pooling_of(metadata: Metadata) -> PoolingType | None:
    """Returns the pooling that the file names; `MEAN` for an encoder whose file names none, as in
    sentence-transformers; None for a model that generates."""
    arch = metadata.text("general.architecture") or ""
    named = metadata.number(f"{arch}.pooling_type")
    if named in {one.value for one in PoolingType}:
        return PoolingType(named)
    return PoolingType.MEAN if "bert" in arch else None


def read(found: Metadata, weight_bytes: int, settings: EngineSettings, num_seqs: int) -> ModelFacts:
    """Returns the facts of a model whose files take `weight_bytes`, for `num_seqs` running sequences."""
    architecture = found.text("general.architecture") or ""
    windowed = windowed_share(found)
    each = bytes_per_token(found, settings)
    trained, pools = found.number(f"{architecture}.context_length"), pooling_of(found) is not None
    embeds = not pools and settings.pooling != "none"
    return ModelFacts(
        weight_bytes=weight_bytes,
        kv_bytes_per_token=each - round(each * windowed),
        trained_context=trained,
        width=found.number(f"{architecture}.embedding_length"),
        vocab_size=found.vocab_size,
        rows=num_seqs + OTHER_ROWS + (embed_outputs(settings) if embeds else 0),
        state_bytes=states_bytes(found, num_seqs),
        heads=num_heads(found),
        window_bytes_per_token=round(each * windowed),
        window_tokens=window_tokens(found, settings, num_seqs),
        embed_tokens=embed_tokens(settings, trained) if embeds else 0,
        pools=pools,
    )


def weight_bytes(weights: Path) -> int:
    """Returns the size of all files of a model, given the first."""
    return sum(_size(part) for part in _parts(weights))


def layer_bytes(weights: Path) -> tuple[list[int], int]:
    """Returns the size of each layer's weights, and of those that turn the last layer's states into logits."""
    layers: dict[int, int] = {}
    outside: dict[str, int] = {}
    for part in _parts(weights):
        for name, size in _tensor_sizes(part):
            if block := _BLOCK.match(name):
                number = int(block[1])
                layers[number] = layers.get(number, 0) + size
            else:
                outside[name] = size
    output = sum(size for name, size in outside.items() if name.startswith("output"))
    if "output.weight" not in outside:  # the embedding also serves as the output matrix
        output += outside.get("token_embd.weight", 0)
    return [layers[number] for number in sorted(layers)], output


def matrix_types(weights: Path) -> dict[int, int]:
    """Returns how many numbers the matrices of all layers have of each of ggml's types."""
    found: dict[int, int] = {}
    for part in _parts(weights):
        for name, one in gguf_metadata.read_tensors(part).items():
            if len(one.shape) > 1 and _BLOCK.match(name):
                found[one.type] = found.get(one.type, 0) + math.prod(one.shape)
    return found


def _tensor_sizes(path: Path) -> Sequence[tuple[str, int]]:
    """Returns the bytes of each tensor of a file, up to where the next one begins."""
    tensors = sorted(gguf_metadata.read_tensors(path).items(), key=lambda item: item[1].start)
    ends = [one.start for _, one in tensors[1:]] + [_size(path)]
    return [(name, end - one.start) for (name, one), end in zip(tensors, ends, strict=True)]


def _parts(weights: Path) -> list[Path]:
    return [weights.with_name(name) for name in GgufLayout().parts_of(weights.name)]


def _size(path: Path) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0


def bytes_per_token(metadata: Metadata, settings: EngineSettings) -> int:
    """Returns the size of one token's keys and values, if all layers attend to all tokens; others take less.

    Raises ModelError for an unknown cache type."""
    arch = metadata.text("general.architecture") or ""
    layers = metadata.number(f"{arch}.block_count")
    heads = num_heads(metadata)
    if not heads or arch in _RECURRENT_ARCHITECTURES:  # no layer attends
        return 0
    width = metadata.number(f"{arch}.embedding_length") // heads
    key_width = metadata.number(f"{arch}.attention.key_length") or width
    value_width = metadata.number(f"{arch}.attention.value_length") or width
    # Most models have one number of KV heads for all layers; some have a list with one for each layer.
    per_layer = metadata.ints(f"{arch}.attention.head_count_kv")
    attending = layers - _recurrent_layers(metadata, arch) if arch in _INTERVAL_ARCHITECTURES else layers
    kv_heads = sum(per_layer) or attending * (metadata.number(f"{arch}.attention.head_count_kv") or heads)
    return kv_heads * (
        _value_bytes(key_width, settings.cache_type_k) + _value_bytes(value_width, settings.cache_type_v)
    )


def num_heads(metadata: Metadata) -> int:
    """Returns the attention heads of a layer, or of the one with the most."""
    arch = metadata.text("general.architecture") or ""
    heads = metadata.number(f"{arch}.attention.head_count")
    return heads or max(metadata.ints(f"{arch}.attention.head_count"), default=0)


def row_tiles(metadata: Metadata, weights: Path) -> RowTiles | None:
    """Returns what attention costs on a CPU, compared with the weights that a token is multiplied by; None if the files
    don't say. `weights` is the first file."""
    arch = metadata.text("general.architecture") or ""
    heads, layers = num_heads(metadata), metadata.number(f"{arch}.block_count")
    width = metadata.number(f"{arch}.embedding_length") // heads if heads else 0
    keys = metadata.number(f"{arch}.attention.key_length") or width
    values = metadata.number(f"{arch}.attention.value_length") or width
    experts, used = metadata.number(f"{arch}.expert_count"), metadata.number(f"{arch}.expert_used_count")
    multiplied = 0.0
    for part in _parts(weights):
        for name, tensor in gguf_metadata.read_tensors(part).items():
            if name.startswith("blk.") and len(tensor.shape) > 1:
                share = used / experts if experts and "_exps" in name else 1.0
                multiplied += math.prod(tensor.shape) * share
    if not multiplied or not heads:
        return None
    share = layers * heads * (keys + values) / multiplied
    return RowTiles(TILE_ROWS, share * _BY_TOKEN, share * _BY_TILE * TILE_ROWS)


def windowed_share(metadata: Metadata) -> float:
    """Returns the share of layers that attend to a window of tokens and keep no others."""
    arch = metadata.text("general.architecture") or ""
    if not metadata.number(f"{arch}.attention.sliding_window"):
        return 0.0
    key = f"{arch}.attention.sliding_window_pattern"
    listed = metadata.numbers(key)
    if listed:
        return sum(map(bool, listed)) / len(listed)
    layers = metadata.number(f"{arch}.block_count")
    if not layers or arch not in _WINDOW_PATTERNS:
        return 0.0
    return (layers - layers // (metadata.number(key) or _WINDOW_PATTERNS[arch])) / layers


def window_tokens(metadata: Metadata, settings: EngineSettings, num_seqs: int) -> int:
    """Returns the tokens that layers with windows keep for `num_seqs` lanes and the one for copies."""
    arch = metadata.text("general.architecture") or ""
    return metadata.number(f"{arch}.attention.sliding_window") * (num_seqs + 1) + settings.ubatch_tokens


def state_bytes(metadata: Metadata) -> int:
    """Returns the size of the recurrent states that a model keeps per lane, in all layers; 0 for most models."""
    arch = metadata.text("general.architecture") or ""
    width = metadata.number(f"{arch}.embedding_length")
    inner, state = metadata.number(f"{arch}.ssm.inner_size"), metadata.number(f"{arch}.ssm.state_size")
    convolved = max(0, metadata.number(f"{arch}.ssm.conv_kernel") - 1)
    if inner:
        size = convolved * (inner + 2 * metadata.number(f"{arch}.ssm.group_count") * state) + inner * state
    elif head_size := metadata.number(f"{arch}.wkv.head_size"):
        size = (2 + head_size) * width
    else:
        size = max(0, metadata.number(f"{arch}.shortconv.l_cache") - 1) * width
    return max(0, _recurrent_layers(metadata, arch) * size * _F32_BYTES)


def _recurrent_layers(metadata: Metadata, arch: str) -> int:
    """Returns the number of layers that have a recurrent state, if the model has any."""
    layers = metadata.number(f"{arch}.block_count")
    if per_layer := metadata.ints(f"{arch}.attention.head_count_kv"):
        return sum(not heads for heads in per_layer)
    if arch in _INTERVAL_ARCHITECTURES:
        return layers - layers // (metadata.number(f"{arch}.full_attention_interval") or 4)
    return layers


def states_bytes(metadata: Metadata, num_seqs: int) -> int:
    """Returns the size of the recurrent states of `num_seqs` lanes and the one for copies."""
    return (num_seqs + 1) * state_bytes(metadata)


def embed_outputs(settings: EngineSettings) -> int:
    """Returns the most tokens of embedded inputs whose states are returned at once."""
    return MEAN_OUTPUTS if settings.pooling == "mean" else EMBEDDED_INPUTS


def embed_tokens(settings: EngineSettings, context_length: int) -> int:
    """Returns the most tokens of an input that a generating model embeds."""
    return settings.max_embed_tokens or min(context_length, _MAX_DEFAULT_EMBED_TOKENS)


def fit_to_budget(settings: EngineSettings, metadata: Metadata, length: int) -> EngineSettings:
    """Lowers the KV memory in the settings to `kv_limit_bytes`, if that is less, and the context, if `length` is a
    default.

    Raises ModelError if not even one request of the context length would fit."""
    each, states = bytes_per_token(metadata, settings), states_bytes(metadata, settings.max_num_seqs)
    if settings.kv_limit_bytes and states > settings.kv_limit_bytes:
        raise ModelError(
            f"--kv-budget leaves {settings.kv_limit_bytes} bytes for this replica, and the recurrent states of "
            f"{settings.max_num_seqs} sequences take {states}: raise it, or lower --max-num-seqs"
        )
    if not settings.kv_limit_bytes or not each:
        return settings
    left, windows = settings.kv_limit_bytes - states, window_tokens(metadata, settings, settings.max_num_seqs)
    windowed = round(each * windowed_share(metadata))
    longer = (left - windows * windowed) // max(1, each - windowed)  # than all windows together
    fits = max(left // each, longer) // settings.kv_block_size * settings.kv_block_size
    if fits < (length if settings.context_length else max(settings.kv_block_size, 2)):
        raise ModelError(
            f"--kv-budget leaves {settings.kv_limit_bytes - states} bytes for this replica, which is {fits} tokens of "
            f"{each} bytes, and one request may need {length}: raise it, or lower --context-length"
        )
    return msgspec.structs.replace(settings, kv_tokens=min(settings.kv_tokens, fits), context_length=min(length, fits))


def _value_bytes(count: int, cache_type: str) -> int:
    if cache_type not in _CACHE_TYPES:
        raise ModelError(f"a cache type must be one of {', '.join(_CACHE_TYPES)}, got {cache_type}")
    return _CACHE_TYPES[cache_type].num_bytes(count)
