"""Reads from a model's files the facts from which its memory is estimated, but no weights."""

import mmap
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.gguf import model_facts as gguf_facts
from tokenbus.worker.engine.memory import need
from tokenbus.worker.engine.memory.need import ModelFacts
from tokenbus.worker.files import gguf_metadata, model_config
from tokenbus.worker.files.model_files import Layout, ModelFiles, is_hub_name
from tokenbus.worker.models import registry

_F16_BYTES, _F32_BYTES = 2, 4
_TYPE_BITS = {"f32": 32.0, "q8": 8.5, "q6": 6.6, "q5": 5.7, "q4": 4.9, "iq4": 4.5, "q3": 4.0, "q2": 3.0}
"""Bits per weight by the prefix of a conversion's type, a little more than usual; 16 for all others."""


def read(settings: EngineSettings, progress: Callable[[float], None]) -> ModelFacts:
    """Returns a model's facts, downloading it if it is only on the Hub; `progress` gets the fraction downloaded.

    Raises ModelError, saying what to do, if it can't be found or read."""
    engine = registry.engine_of(settings.model) if settings.engine == "auto" else settings.engine
    if engine == "sim":
        return ModelFacts(0, 0, 0, 0, 0, 0)
    layouts = registry.layouts(engine)
    files = registry.find_as(settings.model, layouts, progress)
    num_seqs = settings.max_num_seqs if settings.max_num_seqs > 0 else 16
    if files.weights.suffix == ".gguf":
        size = gguf_facts.weight_bytes(files.weights)
        return gguf_facts.read(gguf_metadata.read(files.weights), size, settings, num_seqs)
    config = model_config.read_sizes(files.sidecars.get("config.json"), model_config.ModelSizes)
    weight_bytes = _size(files, layouts)
    if engine == "onnx":
        facts = _of_config(config, weight_bytes + files.weights.stat().st_size, _F32_BYTES, num_seqs)
        named = model_config.read_onnx_config(files.sidecars)
        facts = facts._replace(
            copies_lanes=True, heads=named.num_heads, trained_context=named.context_length or 0, width=named.width
        )
        if _keeps_cache_in_place(files.weights):
            return facts._replace(score_copies=1, max_score_bytes=need.GQA_SCORE_BYTES)
        return facts._replace(
            kv_bytes_per_token=2 * facts.kv_bytes_per_token,
            trained_context=min(facts.trained_context or named.sliding_window or 0, named.sliding_window or 1 << 30),
            padding_tokens=need.PADDING_TOKENS,
            score_copies=need.SCORE_COPIES,
            max_score_bytes=need.MAX_SCORE_BYTES,
        )
    weight_bytes = int(weight_bytes * _bits_of(settings.quantize or "f16") / config.weight_bits)
    return _of_config(config, weight_bytes, _F16_BYTES, num_seqs + gguf_facts.OTHER_ROWS)


def weight_bytes(settings: EngineSettings) -> int:
    """Returns the size of a model's weights; 0 for one on the Hub, from which nothing is fetched, and for one that
    can't be found, which is reported when it is loaded."""
    if is_hub_name(settings.model):
        return 0
    layouts = registry.layouts(registry.engine_of(settings.model) if settings.engine == "auto" else settings.engine)
    try:
        return _size(registry.find_as(settings.model, layouts, lambda _: None), layouts)
    except (ModelError, OSError):
        return 0


def _of_config(config: model_config.ModelSizes, weight_bytes: int, value_bytes: int, rows: int) -> ModelFacts:
    return ModelFacts(
        weight_bytes=weight_bytes,
        kv_bytes_per_token=2 * config.num_hidden_layers * config.kv_heads * config.head_size * value_bytes,
        trained_context=config.trained_context,
        width=config.hidden_size,
        vocab_size=config.vocab_size,
        rows=rows,
    )


def _size(files: ModelFiles, layouts: Sequence[Layout]) -> int:
    """Returns the size of all weight files."""
    folder, name = files.weights.parent, files.weights.name
    layout = next((one for one in layouts if one.is_weights(name)), layouts[0])
    parts = layout.parts_of(name, [path.name for path in folder.iterdir()])
    return sum(_bytes_of(folder / part) for part in parts)


def _keeps_cache_in_place(graph: Path) -> bool:
    """Whether a graph has the nodes that need one copy of the cache. Reading it would take the frontend a library."""
    with graph.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(b"GroupQueryAttention") >= 0


def _bytes_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _bits_of(kind: str) -> float:
    return next((bits for name, bits in _TYPE_BITS.items() if kind.lower().startswith(name)), 16.0)
