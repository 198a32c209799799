"""A GGUF model in memory: its weights, its tokenizer and what its files say. Any number of contexts can share it."""

from __future__ import annotations  # llama_cpp names its handle types for type checkers only

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import llama_cpp
import msgspec
from llama_cpp import llama_cpp as llama

from tokenbus.protocol.prompt import tokenizer_bundle
from tokenbus.worker.contract import contract
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.device import features
from tokenbus.worker.engine.device.loaded_models import LoadedModels
from tokenbus.worker.engine.gguf import backend, context, model_facts, settings_resolution, weight_types
from tokenbus.worker.engine.gguf.adapters import ContextAdapters, LlamaAdapter
from tokenbus.worker.engine.memory import fit
from tokenbus.worker.engine.memory.fit import DevicePlacement, MemoryNeed, ModelFacts, Room
from tokenbus.worker.engine.memory.planner import MemoryPlanner
from tokenbus.worker.files import gguf_metadata, model_config, model_files
from tokenbus.worker.files.device_memory import DeviceMemory
from tokenbus.worker.files.gguf_metadata import Metadata
from tokenbus.worker.files.layouts import GgufLayout
from tokenbus.worker.files.model_files import ModelFiles, source_name
from tokenbus.worker.tokenizers import gguf_bundle, model_tokenizer
from tokenbus.worker.tokenizers.gguf_tokenizer import GgufTokenizer

_MAX_DEVICES = 128
"""More devices than llama.cpp can use. It reads one share for each device that it finds."""


class GgufMemory:
    """The memory of the model in these files, whose weights are mapped: all processes share them."""

    def __init__(self, weights: Path, metadata: Metadata) -> None:
        self.part = os.path.realpath(weights)
        self.weight_bytes = self.loading_bytes = model_facts.weight_bytes(weights)
        self._weights = weights
        self._metadata = metadata

    def __repr__(self) -> str:
        return f"<GgufMemory of {self.part}>"

    def facts(self, settings: EngineSettings) -> ModelFacts:
        num_seqs = settings.max_num_seqs if settings.max_num_seqs > 0 else 16
        return model_facts.read(self._metadata, 0, settings, num_seqs)

    def gpus(self, settings: EngineSettings) -> Sequence[DeviceMemory]:
        if not settings.gpu_layers or not llama.llama_supports_gpu_offload():
            return []
        there = backend.all_devices()
        if settings.devices:
            backend.select_devices(settings.devices, there)
            there = {name: there[name] for name in settings.devices if name != backend.NO_DEVICE}
        elif settings.split_mode == "none":
            there = dict(list(there.items())[settings.main_gpu : settings.main_gpu + 1])
        return backend.device_memory(there)

    def place(self, facts: ModelFacts, settings: EngineSettings, gpu: Room, num_gpus: int) -> DevicePlacement:
        layers, output = model_facts.layer_bytes(self._weights)
        return fit.place(layers, output, facts, settings, gpu, num_gpus)

    def sized(self, settings: EngineSettings, need: MemoryNeed, placement: DevicePlacement) -> EngineSettings:
        settings = msgspec.structs.replace(settings, gpu_layers=placement.gpu_layers)
        if not self.facts(settings).pools:
            settings = msgspec.structs.replace(settings, kv_tokens=need.kv_tokens)
            settings = model_facts.fit_to_budget(settings, self._metadata, need.context_length)
        return msgspec.structs.replace(settings, context_length=settings.context_length or need.context_length)


class GgufModelKey(NamedTuple):
    """The properties that replicas must have in common to share a model."""

    weights: Path
    fingerprint: str
    devices: tuple[str, ...]
    gpu_layers: int
    split_mode: str
    main_gpu: int
    tensor_split: tuple[float, ...]


def model_key(files: ModelFiles, settings: EngineSettings) -> GgufModelKey:
    return GgufModelKey(
        Path(os.path.realpath(files.weights)),
        files.fingerprint,
        settings.devices,
        settings.gpu_layers if llama.llama_supports_gpu_offload() else 0,
        settings.split_mode,
        settings.main_gpu,
        settings.tensor_split,
    )


class GgufModel:
    """A loaded model. `progress` gets the fraction loaded, from 0 to 1.

    Raises ModelError; if there is too little memory, before anything is loaded."""

    def __init__(
        self,
        files: ModelFiles,
        settings: EngineSettings,
        progress: Callable[[float], None],
        planner: MemoryPlanner | None = None,
    ) -> None:
        self.files = files
        self._planner = planner or MemoryPlanner()
        self.metadata = gguf_metadata.read(files.weights)
        if not self.metadata.num_tensors and self.metadata.number("split.count") <= 1:
            raise ModelError(f"{files.weights}: holds a vocabulary and no weights; name the whole model")
        self.generation_config = model_config.read_generation_config(files.sidecars, self.metadata.sampling_defaults())
        # Routers tokenize prompts, and a model that generates nothing gets none.
        self.pooling = model_facts.pooling_of(self.metadata)
        generates = self.pooling is None
        self.memory = GgufMemory(files.weights, self.metadata)
        self.placement = self._planner.plan_weights(self.memory, settings)
        with contextlib.ExitStack() as undo:
            undo.callback(self._planner.release_weights, self.memory)
            self.handle = _load(files.weights, settings, self.placement.gpu_layers, progress)
            undo.callback(llama.llama_model_free, self.handle)
            if problem := _unsupported_kind(self.handle, generates=generates):
                raise ModelError(f"{files.weights}: {problem}")
            self._describe_texts(generates=generates)
            self._held = model_files.hold_weights(files.weights)
            undo.pop_all()
        self._adapters: LoadedModels[LlamaAdapter] = LoadedModels()
        self._gpus = backend.computing_gpus(backend.gpus(), settings, self.placement.gpu_layers)
        """The addresses of the GPUs that compute it, by name."""

    def __repr__(self) -> str:
        return f"<GgufModel {self.files.weights}>"

    def _describe_texts(self, *, generates: bool) -> None:
        """Makes the tokenizer, and finds out what state sequences have and how the model's answers are written."""
        self.has_partial_state = generates and context.has_partial_state(self.handle)
        vocab = llama.llama_model_get_vocab(self.handle)
        assert vocab is not None
        self.tokenizer = GgufTokenizer(vocab, self.metadata)
        pretrained = model_tokenizer.read_tokenizer_json(self.files.sidecars.get("tokenizer.json"))
        agreeing = None
        if generates or self.tokenizer.recurses:
            agreeing = gguf_bundle.build(self.metadata, self.tokenizer, pretrained)
        self.tokenizer.encode_long_with(agreeing)
        self.bundle = agreeing if generates else None
        self.chat_format = features.infer_chat_format(self.tokenizer.rules)

    def describe(
        self, settings: EngineSettings, context_length: int, features: tuple[str, ...]
    ) -> contract.EngineConfig:
        """Returns the configuration of an engine that serves this model without any KV memory."""
        devices = backend.describe_devices(
            {name: backend.device_description(address) for name, address in self._gpus.items()},
            int(llama.llama_model_n_layer(self.handle)),
            self.placement.gpu_layers,
        )
        return contract.EngineConfig(
            engine="gguf",
            engine_version=f"llama-cpp-python {llama_cpp.__version__}",
            source=source_name(settings.model),
            fingerprint=settings.fingerprint or self.files.fingerprint or self.metadata.fingerprint,
            context_length=context_length,
            max_num_seqs=1,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            kv_block_size=context_length,
            total_kv_blocks=1,
            prefix_cache=False,
            vocab_size=self.tokenizer.size,
            features=features,
            defaults=self.generation_config.defaults,
            versions={"llama_cpp_python": llama_cpp.__version__},
            pid=os.getpid(),
            files=self.files.to_paths(),
            devices=devices,
            slow_weights=slow_weights(self.files.weights) if any(one.kind == "cpu" for one in devices) else "",
        )

    def device_memory(self) -> list[DeviceMemory]:
        """Returns the memory of the GPUs that compute it."""
        return backend.device_memory(self._gpus)

    def adapters_of(self, context: llama.llama_context_p) -> ContextAdapters:
        """Returns the adapters of a context, which has none yet."""
        weights = self.files.weights
        tensors: dict[str, gguf_metadata.TensorInfo] = {}
        for part in GgufLayout().parts_of(weights.name):
            tensors |= gguf_metadata.read_tensors(weights.with_name(part))
        architecture = self.metadata.text("general.architecture") or ""
        return ContextAdapters(self.handle, architecture, tensors, self._adapters, context)

    def close(self) -> None:
        """Frees the model's memory. No context may still use the model."""
        self._held.close()
        llama.llama_model_free(self.handle)
        self._planner.release_weights(self.memory)


def _load(
    path: Path, settings: EngineSettings, gpu_layers: int, progress: Callable[[float], None]
) -> llama.llama_model_p:
    params = llama.llama_model_default_params()
    params.n_gpu_layers = gpu_layers
    params.split_mode = settings_resolution.SPLIT_MODES[settings.split_mode]
    params.main_gpu = settings.main_gpu
    # Read while the model is loading, so it has to live as long as this function.
    there = backend.all_devices()
    selected = backend.select_devices(settings.devices, there)
    settings_resolution.check_tensor_split(settings, len(selected) if settings.devices else len(there))
    chosen = backend.as_device_array(selected)
    if settings.devices:
        params.devices = ctypes.cast(chosen, ctypes.c_void_p)
    if settings.tensor_split:
        params.tensor_split = (ctypes.c_float * _MAX_DEVICES)(*settings.tensor_split)

    def report(fraction: float, _: ctypes.c_void_p) -> bool:
        try:
            progress(fraction)
        except ConnectionError:  # the frontend is gone; False makes llama.cpp stop loading
            return False
        return True

    # ctypes keeps `report` alive through params, which outlives the call.
    params.progress_callback = llama.llama_progress_callback(report)
    backend.forget_errors()
    model: llama.llama_model_p | None = llama.llama_model_load_from_file(str(path).encode(), params)
    if model is None:
        raise ModelError(f"{path}: {_load_error(backend.last_error())}")
    return model


def _unsupported_kind(model: llama.llama_model_p, *, generates: bool) -> str:
    """Says why a model's kind is not supported; empty if it is. llama.cpp ends the process if such a model is used like
    others."""
    if llama.llama_model_is_diffusion(model):
        return "is a diffusion model, which does not generate token after token; such models are not supported"
    if llama.llama_model_has_encoder(model) and llama.llama_model_has_decoder(model):
        return "its decoder needs the output of an encoder; encoder-decoders and draft models are not supported"
    if generates and not llama.llama_model_has_decoder(model):
        return "has no decoder and names no pooling, so it neither generates nor makes embeddings"
    return ""


def _load_error(complaint: str) -> str:
    """Returns llama.cpp's reason for not loading a file, with a possible remedy."""
    reason = complaint.rpartition("error loading model: ")[2]
    if "unknown model architecture" in reason:
        remedy = "a later version may, or its ONNX export can be served"
        return f"{reason}; llama-cpp-python {llama_cpp.__version__} can't run it: {remedy}"
    if "file bounds" in reason or "corrupt" in reason:
        return f"{reason}; fetch the file again"
    return f"llama.cpp can't load it: {reason}"


def slow_weights(path: Path) -> str:
    """Says which types would be faster than a model's on this processor; empty if none. Raises ModelError."""
    return weight_types.slow_weights(model_facts.matrix_types(path), backend.processor_features())


def read_rules(path: Path) -> tokenizer_bundle.PromptRules:
    """Returns the rules for a model's prompts, without loading its weights. Raises ModelError."""
    found = gguf_metadata.read(path)
    backend.init()
    params = llama.llama_model_default_params()
    params.vocab_only = True
    model = llama.llama_model_load_from_file(str(path).encode(), params)
    if model is None:
        raise ModelError(f"{path}: llama.cpp can't load its vocabulary: {backend.last_error()}")
    try:
        vocab = llama.llama_model_get_vocab(model)
        assert vocab is not None
        return GgufTokenizer(vocab, found).rules
    finally:
        llama.llama_model_free(model)
