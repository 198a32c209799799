"""Reads from a GGUF's metadata what kind of model it is and how much memory it needs. Needs no library."""

import enum
from collections.abc import Sequence
from pathlib import Path

from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.gguf import kv_memory
from tokenbus.worker.engine.memory.need import ModelFacts
from tokenbus.worker.files import gguf_metadata
from tokenbus.worker.files.gguf_metadata import Metadata
from tokenbus.worker.files.layouts import GgufLayout

IDLE_LANES = 48
"""Lanes for the ends of cached prefixes. Each costs a row of logits in host memory."""
OTHER_ROWS = IDLE_LANES + 1
"""Rows of logits besides those of running sequences; one lane is for copies."""


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
    windowed = kv_memory.windowed_share(found)
    each = kv_memory.bytes_per_token(found, settings)
    trained, pools = found.number(f"{architecture}.context_length"), pooling_of(found) is not None
    embeds = not pools and settings.pooling != "none"
    return ModelFacts(
        weight_bytes=weight_bytes,
        kv_bytes_per_token=each - round(each * windowed),
        trained_context=trained,
        width=found.number(f"{architecture}.embedding_length"),
        vocab_size=len(found.texts("tokenizer.ggml.tokens")),
        rows=num_seqs + OTHER_ROWS + (kv_memory.embed_outputs(settings) if embeds else 0),
        state_bytes=kv_memory.states_bytes(found, num_seqs),
        heads=kv_memory.num_heads(found),
        window_bytes_per_token=round(each * windowed),
        window_tokens=kv_memory.window_tokens(found, settings, num_seqs),
        embed_tokens=kv_memory.embed_tokens(settings, trained) if embeds else 0,
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
            kind, _, rest = name.partition(".")
            if kind == "blk":
                number = int(rest.partition(".")[0])
                layers[number] = layers.get(number, 0) + size
            else:
                outside[name] = size
    output = sum(size for name, size in outside.items() if name.startswith("output"))
    if "output.weight" not in outside:  # the embedding also serves as the output matrix
        output += outside.get("token_embd.weight", 0)
    return [layers[number] for number in sorted(layers)], output


def _tensor_sizes(path: Path) -> Sequence[tuple[str, int]]:
    """Returns the bytes of each tensor of a file, up to where the next one begins."""
    tensors = sorted(gguf_metadata.read_tensors(path).items(), key=lambda item: item[1].start)
    ends = [one.start for _, one in tensors[1:]] + [_size(path)]
    return [(name, end - one.start) for (name, one), end in zip(tensors, ends, strict=True)]


def _parts(weights: Path) -> list[Path]:
    return [weights.with_name(name) for name in GgufLayout().parts_of(weights.name)]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
