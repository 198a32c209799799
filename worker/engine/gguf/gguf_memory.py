"""The memory of a GGUF model, as its planner asks for it."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from llama_cpp import llama_cpp as llama

from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.gguf import devices, kv_memory, model_facts
from tokenbus.worker.engine.memory import fit
from tokenbus.worker.engine.memory.fit import Room
from tokenbus.worker.engine.memory.need import DevicePlacement, MemoryNeed, ModelFacts
from tokenbus.worker.files.device_memory import DeviceMemory
from tokenbus.worker.files.gguf_metadata import Metadata


class GgufMemory:
    """The memory of the model in these files, whose weights are mapped: all processes share them."""

    def __init__(self, weights: Path, metadata: Metadata) -> None:
        self.part = str(weights.resolve())
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
        there = devices.all_devices()
        if settings.devices:
            devices.select(settings.devices, there)
            there = {name: there[name] for name in settings.devices if name != devices.NONE}
        elif settings.split_mode == "none":
            there = dict(list(there.items())[settings.main_gpu : settings.main_gpu + 1])
        return devices.memory(there)

    def place(self, facts: ModelFacts, settings: EngineSettings, gpu: Room, num_gpus: int) -> DevicePlacement:
        layers, output = model_facts.layer_bytes(self._weights)
        return fit.place(layers, output, facts, settings, gpu, num_gpus)

    def sized(self, settings: EngineSettings, need: MemoryNeed, placement: DevicePlacement) -> EngineSettings:
        settings = msgspec.structs.replace(settings, gpu_layers=placement.gpu_layers)
        if not self.facts(settings).pools:
            settings = msgspec.structs.replace(settings, kv_tokens=need.kv_tokens)
            settings = kv_memory.fit_to_budget(settings, self._metadata, need.context_length)
        return msgspec.structs.replace(settings, context_length=settings.context_length or need.context_length)
