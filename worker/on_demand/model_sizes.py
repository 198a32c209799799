"""Reads from a model's files the facts from which its memory is estimated, but no weights; chooses the sizes of a model
that takes turns with others.

A model that took all available memory would force the others out each time. So it gets a context that is long enough
for most uses, or a short one if that would take more than half of the budget (decision 0064).
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.gguf import model_facts as gguf_facts
from tokenbus.worker.engine.host_cache import slot_store
from tokenbus.worker.engine.memory import fit
from tokenbus.worker.engine.memory.fit import MemoryNeed, ModelFacts, Sizes, estimate
from tokenbus.worker.engine.onnx import model_facts as onnx_facts
from tokenbus.worker.engine.onnx.model_facts import OnnxFacts
from tokenbus.worker.files import device_memory, gguf_metadata, model_config
from tokenbus.worker.files.layouts import SAFETENSORS_SUFFIX
from tokenbus.worker.files.model_files import Layout, ModelFiles, is_hub_name
from tokenbus.worker.files.regular import open_regular
from tokenbus.worker.models import registry

_F16_BYTES, _F32_BYTES = 2, 4
_GQA = b"GroupQueryAttention"
_MAX_GRAPH_BYTES, _CHUNK_BYTES = 2 << 30, 1 << 20
"""The most that a graph may have, and what is read of it at a time: the event loop gets its turns in between."""
_TYPE_BITS = {"f32": 32.0, "q8": 8.5, "q6": 6.6, "q5": 5.7, "q4": 4.9, "iq4": 4.5, "q3": 4.0, "q2": 3.0}
"""Bits per weight by the prefix of a conversion's type, a little more than usual; 16 for all others and for none."""


def read_facts(settings: EngineSettings, progress: Callable[[float], None]) -> ModelFacts:
    """Returns a model's facts, downloading it if it is only on the Hub; `progress` gets the fraction downloaded.

    Raises ModelError, saying what to do, if it can't be found or read."""
    engine = registry.engine_of(settings.model, settings.engine)
    if engine == "sim":
        return ModelFacts(0, 0, 0, 0, 0, 0)
    layouts = registry.layouts(engine)
    files = registry.find_as(settings.model, layouts, progress, follow_links=settings.follow_links)
    num_seqs = settings.max_num_seqs if settings.max_num_seqs > 0 else 16
    if engine == "gguf" and files.weights.suffix != SAFETENSORS_SUFFIX:
        size = gguf_facts.weight_bytes(files.weights)
        return gguf_facts.read(gguf_metadata.read_sizes(files.weights), size, settings, num_seqs)
    config = model_config.read_sizes(files.sidecars.get("config.json"), model_config.ModelSizes)
    weight_bytes = _size(files, layouts)
    if engine == "onnx":
        return _onnx_facts(files, config, weight_bytes, settings)
    return ModelFacts(
        weight_bytes=int(weight_bytes * _bits_of(settings.quantize) / config.weight_bits),
        kv_bytes_per_token=2 * config.num_hidden_layers * config.kv_heads * config.head_size * _F16_BYTES,
        trained_context=config.trained_context,
        width=config.hidden_size,
        vocab_size=config.vocab_size,
        rows=num_seqs + gguf_facts.OTHER_ROWS,
    )


def weight_bytes(settings: EngineSettings) -> int:
    """Returns the size of a model's weights; 0 for one on the Hub, from which nothing is fetched, and for one that
    can't be found, which is reported when it is loaded."""
    if is_hub_name(settings.model):
        return 0
    layouts = registry.layouts(registry.engine_of(settings.model, settings.engine))
    try:
        return _size(registry.find_as(settings.model, layouts, lambda _: None), layouts)
    except (ModelError, OSError):
        return 0


def _onnx_facts(
    files: ModelFiles, config: model_config.ModelSizes, file_bytes: int, settings: EngineSettings
) -> ModelFacts:
    """Returns the facts of a model that generates on a CPU, in 32 bits, since its graph is not read."""
    named, own = model_config.read_onnx_config(files.sidecars), files.weights.stat().st_size
    kv_heads, head_width = named.head_sizes.kv_heads or 0, named.head_sizes.head_width or 0
    known = OnnxFacts(
        config=named,
        uses_gqa=_keeps_cache_in_place(files.weights),
        generates=True,
        token_bytes=2 * config.num_hidden_layers * kv_heads * head_width * _F32_BYTES,
        vocab_size=config.vocab_size,
        on_cpu=True,
    )
    return known.read(settings, onnx_facts.weight_bytes(own, file_bytes - own))


def _size(files: ModelFiles, layouts: Sequence[Layout]) -> int:
    """Returns the size of all weight files."""
    folder, name = files.weights.parent, files.weights.name
    layout = next((one for one in layouts if one.is_weights(name)), layouts[0])
    parts = layout.parts_of(name, [path.name for path in folder.iterdir()])
    return sum(_bytes_of(folder / part) for part in parts)


def _keeps_cache_in_place(graph: Path) -> bool:
    """Whether a graph has the nodes that need one copy of the cache. Reading it would take the frontend a library."""
    before = b""
    with os.fdopen(open_regular(graph), "rb") as file:
        for _ in range(_MAX_GRAPH_BYTES // _CHUNK_BYTES):
            chunk = file.read(_CHUNK_BYTES)
            if _GQA in before + chunk:
                return True
            if not chunk:
                break
            before = chunk[-len(_GQA) :]
    return False


def _bytes_of(path: Path) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0


def _bits_of(kind: str) -> float:
    return next((bits for name, bits in _TYPE_BITS.items() if kind.lower().startswith(name)), 16.0)


_LONG_CONTEXT = 32_768
_SHORT_CONTEXT = 8_192
_CONSTRAINT_BYTES = 35 << 20
_CONSTRAINT_TOKEN_BYTES = 540
"""The process in which a model's constraints are tried, and what it takes for each token of the vocabulary. It outlives
the first constraint; for a model that stays it comes out of the reserve."""
_MAX_SHARED_TOKENS = 16_384
"""Less than a model that stays gets (`memory/fit.py`)."""


def choose_sizes(facts: ModelFacts, settings: EngineSettings, budget_bytes: int) -> MemoryNeed:
    """Returns a model's memory need within a budget for all; 0 means the machine's memory."""
    longest = min(facts.trained_context or _SHORT_CONTEXT, _LONG_CONTEXT)
    need = _need(facts, settings, longest)
    if need.total_bytes > _budget(budget_bytes) // 2:
        need = _need(facts, settings, min(longest, _SHORT_CONTEXT))
    return need


def with_sizes(settings: EngineSettings, need: MemoryNeed) -> EngineSettings:
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
