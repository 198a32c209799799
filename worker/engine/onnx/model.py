"""An ONNX model in memory: its graph, its tokenizer and what its files say. Any number of caches can share it."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import onnx
import onnxruntime
import structlog
import xxhash

from tokenbus.worker.contract import contract
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.device import features
from tokenbus.worker.engine.device.loaded_models import LoadedModels
from tokenbus.worker.engine.device.runner import Embedder
from tokenbus.worker.engine.memory.fit import MAX_SCORE_BYTES, DevicePlacement, MemoryNeed, ModelFacts, Room
from tokenbus.worker.engine.memory.planner import MemoryPlanner
from tokenbus.worker.engine.onnx import device, graph, lora, model_facts, settings_resolution
from tokenbus.worker.engine.onnx.device import Device
from tokenbus.worker.engine.onnx.graph import Graph, external_files
from tokenbus.worker.engine.onnx.lora import OnnxAdapter, no_adapters
from tokenbus.worker.engine.onnx.model_facts import OnnxFacts
from tokenbus.worker.engine.onnx.session import GraphRunner, Session
from tokenbus.worker.engine.onnx.settings_resolution import CacheSize
from tokenbus.worker.files import model_config, model_files
from tokenbus.worker.files.device_memory import DeviceMemory
from tokenbus.worker.files.model_config import OnnxModelConfig
from tokenbus.worker.files.model_files import ModelFiles, source_name
from tokenbus.worker.files.regular import open_regular
from tokenbus.worker.tokenizers.onnx_tokenizer import OnnxTokenizer

_SAMPLES = 64
_SAMPLE_BYTES = 4_096


class OnnxMemory:
    """The memory of a model on one device, from its graph and its files. Its weights are read, not mapped: each
    process has its own.

    Measured with onnxruntime on a CPU (decision 0064), with F32 and 4-bit weights, two and 24 layers:

        weights in files beside the graph   0.6 to 1.0 of their size
        weights in the graph's own file     2.0 of their size; 3.8 while they are loading
        GroupQueryAttention                 no scores of all heads: the same buffers at 512 and at 20,000 tokens
        plain attention                     3.0 to 3.7 buffers with the scores of all heads"""

    def __init__(
        self, weights: Path, model: onnx.ModelProto, graph: Graph, config: OnnxModelConfig, on: Device
    ) -> None:
        own = weights.stat().st_size
        beside = sum((weights.parent / name).stat().st_size for name in set(external_files(model)))
        self.part = f"weights of {os.path.realpath(weights)}"
        self.weight_bytes = model_facts.weight_bytes(own, beside)
        self.loading_bytes = model_facts.loading_bytes(own, beside)
        self.known = OnnxFacts(
            config=config,
            uses_gqa=graph.uses_gqa,
            generates=graph.logits is not None,
            token_bytes=graph.bytes_per_token,
            vocab_size=graph.vocab_size or 0,
            on_cpu=on.kind == "cpu",
        )
        self._num_layers = len(graph.kv) // 2
        self._device = on

    def __repr__(self) -> str:
        return f"<OnnxMemory, {self.part}>"

    def max_run_tokens(self, num_columns: int) -> int:
        """Returns the most tokens of a prompt that a run computes, whose last one attends to that many."""
        if self.known.uses_gqa:
            return 1 << 30
        return max(1, MAX_SCORE_BYTES // (4 * self.known.num_heads * num_columns))

    def facts(self, settings: EngineSettings) -> ModelFacts:
        return self.known.read(settings)

    def gpus(self, settings: EngineSettings) -> Sequence[DeviceMemory]:
        found = device.memory(self._device) if self._device.kind != "cpu" else None
        return [] if found is None else [found]

    def place(self, facts: ModelFacts, settings: EngineSettings, gpu: Room, num_gpus: int) -> DevicePlacement:
        """A graph is on one device as a whole."""
        return DevicePlacement(self._num_layers + 1, facts.weight_bytes, 1.0, num_gpus)

    def sized(self, settings: EngineSettings, need: MemoryNeed, placement: DevicePlacement) -> EngineSettings:
        if settings.kv_pool_bytes:  # which decides how many rows there are
            return settings
        length = settings.context_length or need.context_length
        if not self.known.generates:
            return msgspec.structs.replace(settings, context_length=length)
        if not settings.context_length and self._device.kind != "cpu":
            length = settings_resolution.short_enough(length, need.kv_tokens)
        return msgspec.structs.replace(settings, context_length=length, kv_tokens=need.kv_tokens)


class OnnxModelKey(NamedTuple):
    """The properties that replicas must have in common to share a model."""

    weights: Path
    device: Device
    device_memory_mib: int


def model_key(files: ModelFiles, settings: EngineSettings, device: Device) -> OnnxModelKey:
    return OnnxModelKey(Path(os.path.realpath(files.weights)), device, settings.onnx.device_memory_mib)


class OnnxModel:
    """A loaded model. Raises ModelError for one that can't be served, saying why and what would work."""

    def __init__(self, files: ModelFiles, settings: EngineSettings, device: Device, planner: MemoryPlanner) -> None:
        where = str(files.weights)
        self.device = device
        self.files = files
        self.model_config = model_config.read_onnx_config(files.sidecars)
        self.generation_config = model_config.read_generation_config(files.sidecars, {})
        self._follow_links = settings.follow_links
        model = graph.load(files.weights, follow_links=self._follow_links)
        self.graph = graph.read(model, where, self.model_config.head_sizes)
        self.tokenizer = OnnxTokenizer(files.sidecars, self.graph.vocab_size, where)
        self.chat_format = features.infer_chat_format(self.tokenizer.rules) if self.graph.logits is not None else None
        self.fingerprint = _fingerprint(files.weights, model)
        self._planner = planner
        self.memory = OnnxMemory(files.weights, model, self.graph, self.model_config, device)
        self.placement = planner.plan_weights(self.memory, settings)
        try:
            self._open(model, settings)
        except BaseException:
            planner.release_weights(self.memory)
            raise

    def __repr__(self) -> str:
        return f"<OnnxModel {self.files.weights}>"

    def _open(self, model: onnx.ModelProto, settings: EngineSettings) -> None:
        generates = self.graph.logits is not None
        self.projections = lora.find_projections(model, self.graph.kv_width) if generates else ()
        self.adapters: LoadedModels[OnnxAdapter] = LoadedModels()
        """The adapters of all replicas of the model."""
        self._settings = settings
        self.takes_adapters = False
        """Whether the graph has inputs for adapters."""
        self._opening = threading.Lock()
        last_logits_only = self._edit(model)
        session = Session(model, self.files.weights, settings, self.device)
        self.graph_runner = GraphRunner(self.graph, session, self.tokenizer.size, last_logits_only=last_logits_only)
        structlog.get_logger().info(
            "onnx_loaded", provider=self.device.kind, gqa=self.graph.uses_gqa, last_logits_only=last_logits_only
        )
        self._held = model_files.hold_weights(self.files.weights)

    def describe(
        self, settings: EngineSettings, size: CacheSize, features: tuple[str, ...], embedder: Embedder | None
    ) -> contract.EngineConfig:
        """Returns the configuration of an engine that serves this model with a cache of that size."""
        return contract.EngineConfig(
            engine="onnx",
            engine_version=f"onnxruntime {onnxruntime.__version__} on {self.device.kind}",
            source=source_name(settings.model),
            fingerprint=settings.fingerprint or self.fingerprint,
            context_length=size.context_length,
            max_num_seqs=size.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            kv_block_size=size.block_size,
            total_kv_blocks=size.total_blocks,
            kv_tokens=size.kv_tokens if self.graph.logits is not None else 0,
            prefix_cache=self.graph.logits is not None,
            vocab_size=self.tokenizer.size,
            features=(*features, "embed") if embedder is not None else features,
            defaults=self.generation_config.defaults,
            versions={"onnxruntime": onnxruntime.__version__},
            pid=os.getpid(),
            files=self.files.to_paths(),
            devices=(device.describe(self.device),),
            kv_bytes=size.kv_tokens * self.memory.known.bytes_per_token,
            embeddings=None if embedder is None else embedder.describe(),
            chat_format=self.chat_format,
        )

    def device_memory(self) -> list[DeviceMemory]:
        """Returns the memory of its GPU, if it has one."""
        found = device.memory(self.device) if self.device.kind != "cpu" else None
        return [] if found is None else [found]

    def close(self) -> None:
        """Frees the session's memory, by dropping the last reference to it."""
        self._held.close()
        del self.graph_runner
        self._planner.release_weights(self.memory)

    def take_adapters(self) -> None:
        """Reopens the graph with inputs for adapters, unless it has them already: a graph without is a little faster.
        Steps continue meanwhile. Raises ModelError."""
        with self._opening:
            if self.takes_adapters:
                return
            path = self.files.weights
            model = graph.load(path, follow_links=self._follow_links)
            if _fingerprint(path, model) != self.fingerprint:
                raise ModelError(f"{path}: is no longer the model that was loaded; restart the worker")
            self._edit(model)
            lora.add_inputs(model, self.graph.kv_width)
            session = Session(model, path, self._settings, self.device)
            self.graph_runner.replace(session, no_adapters(self.projections))
            self.takes_adapters = True
        structlog.get_logger().info("onnx_takes_adapters", projections=len(self.projections))

    def _edit(self, model: onnx.ModelProto) -> bool:
        """Exposes the hidden states if possible. Returns whether the graph computes only the last token's logits."""
        logits = self.graph.logits
        if logits is None:
            return False
        if self.graph.hidden in (None, graph.HIDDEN) and graph.expose_hidden_states(model, logits):
            self.graph = self.graph._replace(hidden=graph.HIDDEN)
        return self.graph.keep_logits is None and graph.keep_last_logits(model, logits)


def _fingerprint(path: Path, model: onnx.ModelProto) -> str:
    """Hashes samples of the graph and of each file with weights, which takes a few ms regardless of their size."""
    digest = xxhash.xxh3_64()
    for file in (path, *sorted(path.parent / name for name in set(graph.external_files(model)))):
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with os.fdopen(open_regular(file), "rb") as data:
            for sample in range(_SAMPLES):
                data.seek(size * sample // _SAMPLES)
                digest.update(data.read(_SAMPLE_BYTES))
    return digest.hexdigest()
