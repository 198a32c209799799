"""The memory of an ONNX model, as its planner asks for it: from its graph and its files.

Measured with onnxruntime on a CPU (decision 0064), with F32 and 4-bit weights, two and 24 layers:

    weights in files beside the graph   0.6 to 1.0 of their size
    weights in the graph's own file     2.0 of their size; 3.8 while they are loading
    GroupQueryAttention                 no scores of all heads: the same buffers at 512 and at 20,000 tokens
    plain attention                     3.0 to 3.7 buffers with the scores of all heads
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import onnx

from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.memory.fit import Room
from tokenbus.worker.engine.memory.need import (
    GQA_SCORE_BYTES,
    MAX_SCORE_BYTES,
    PADDING_TOKENS,
    SCORE_COPIES,
    DevicePlacement,
    MemoryNeed,
    ModelFacts,
)
from tokenbus.worker.engine.onnx import device, settings_resolution
from tokenbus.worker.engine.onnx.device import Device
from tokenbus.worker.engine.onnx.graph import Graph, external_files
from tokenbus.worker.engine.settings_resolution import AUTO
from tokenbus.worker.files.device_memory import DeviceMemory
from tokenbus.worker.files.model_config import OnnxModelConfig

_OWN_FILE_COPIES = 2
_OWN_FILE_LOADING_COPIES = 4
"""The copies in memory of weights in the graph's own file, once they are loaded and before: onnxruntime keeps what it
has read, and arranges weights for its kernels."""
_MAX_EMBED_TOKENS = 2_048
_UNKNOWN_HEADS = 16


class OnnxMemory:
    """The memory of a model on one device. Its weights are read, not mapped: each process has its own."""

    def __init__(
        self, weights: Path, model: onnx.ModelProto, graph: Graph, config: OnnxModelConfig, on: Device
    ) -> None:
        own = weights.stat().st_size
        beside = sum((weights.parent / name).stat().st_size for name in set(external_files(model)))
        self.part = f"weights of {weights.resolve()}"
        self.weight_bytes = beside + _OWN_FILE_COPIES * own
        self.loading_bytes = beside + _OWN_FILE_LOADING_COPIES * own
        self._graph = graph
        self._config = config
        self._device = on

    def __repr__(self) -> str:
        return f"<OnnxMemory, {self.part}>"

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a token's keys and values. A run of plain attention reads one copy and writes another."""
        return self._graph.bytes_per_token * (1 if self._graph.uses_gqa else 2)

    @property
    def trained_context(self) -> int:
        """The tokens that one sequence may have; 0 if the files don't say.

        A plain graph applies its window to columns, including padding, so a row must not be longer than the window."""
        trained, window = self._config.context_length or 0, self._config.sliding_window
        if self._graph.uses_gqa or window is None:
            return trained
        return min(trained or window, window)

    @property
    def num_heads(self) -> int:
        return self._config.num_heads or _UNKNOWN_HEADS

    def padding_tokens(self, settings: EngineSettings) -> int:
        """Returns the most tokens of padding in a batch; 0 if rows have none."""
        if self._graph.uses_gqa or self._graph.logits is None:
            return 0
        asked = settings.onnx.max_paddings
        return PADDING_TOKENS if asked == AUTO else asked

    def max_run_tokens(self, num_columns: int) -> int:
        """Returns the most tokens of a prompt that a run computes, whose last one attends to that many."""
        if self._graph.uses_gqa:
            return 1 << 30
        return max(1, MAX_SCORE_BYTES // (4 * self.num_heads * num_columns))

    def facts(self, settings: EngineSettings) -> ModelFacts:
        generates = self._graph.logits is not None
        num_seqs = settings.max_num_seqs if settings.max_num_seqs > 0 else 16
        embeds = generates and settings.pooling != "none"
        return ModelFacts(
            weight_bytes=0,
            kv_bytes_per_token=self.bytes_per_token if generates else 0,
            trained_context=self.trained_context or (0 if generates else settings_resolution.DEFAULT_INPUT),
            width=self._config.width or self.num_heads * 64,
            vocab_size=self._graph.vocab_size or 0,
            rows=num_seqs,
            kv_tokens=self._pool_tokens(settings) if generates else 0,
            heads=self.num_heads,
            embed_tokens=embed_tokens(settings, self.trained_context) if embeds else 0,
            pools=not generates,
            copies_lanes=generates and settings_resolution.has_own_rows(settings, self._device),
            padding_tokens=self.padding_tokens(settings),
            batch_tokens=settings.max_num_batched_tokens,
            score_copies=1 if self._graph.uses_gqa else SCORE_COPIES,
            max_score_bytes=GQA_SCORE_BYTES if self._graph.uses_gqa else MAX_SCORE_BYTES if generates else 0,
        )

    def gpus(self, settings: EngineSettings) -> Sequence[DeviceMemory]:
        found = device.memory(self._device) if self._device.kind != "cpu" else None
        return [] if found is None else [found]

    def place(self, facts: ModelFacts, settings: EngineSettings, gpu: Room, num_gpus: int) -> DevicePlacement:
        """A graph is on one device as a whole."""
        return DevicePlacement(len(self._graph.kv) // 2 + 1, facts.weight_bytes, 1.0, num_gpus)

    def sized(self, settings: EngineSettings, need: MemoryNeed, placement: DevicePlacement) -> EngineSettings:
        if settings.kv_pool_bytes:  # which decides how many rows there are
            return settings
        length = settings.context_length or need.context_length
        if self._graph.logits is None:
            return msgspec.structs.replace(settings, context_length=length)
        if not settings.context_length and self._device.kind != "cpu":
            length = settings_resolution.short_enough(length, need.kv_tokens)
        return msgspec.structs.replace(settings, context_length=length, kv_tokens=need.kv_tokens)

    def _pool_tokens(self, settings: EngineSettings) -> int:
        """Returns the tokens of KV memory that are this replica's share of a pool; 0 without one."""
        limit = settings.kv_limit_bytes or settings.kv_pool_bytes
        return limit // self.bytes_per_token if settings.kv_pool_bytes else 0


def embed_tokens(settings: EngineSettings, context_length: int) -> int:
    """Returns the most tokens of an input that a generating model embeds."""
    return settings.max_embed_tokens or min(context_length or _MAX_EMBED_TOKENS, _MAX_EMBED_TOKENS)
