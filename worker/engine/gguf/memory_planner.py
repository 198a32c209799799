"""Plans the memory of GGUF models, before one is loaded and again before each of its contexts is made."""

from __future__ import annotations  # llama_cpp names its handle types for type checkers only

import itertools
import os
from pathlib import Path
from typing import NamedTuple

import msgspec
from llama_cpp import llama_cpp as llama

from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.contract.memory_plan import MemoryPlan
from tokenbus.worker.engine.gguf import devices, kv_memory, model_facts
from tokenbus.worker.engine.memory import fit, room
from tokenbus.worker.engine.memory.claims import HOST_CACHE, MemoryClaims
from tokenbus.worker.engine.memory.fit import Rooms
from tokenbus.worker.engine.memory.need import DevicePlacement, MemoryNeed, ModelFacts, Sizes, estimate
from tokenbus.worker.engine.memory.room import Room
from tokenbus.worker.files import device_memory
from tokenbus.worker.files.device_memory import HOST, DeviceMemory
from tokenbus.worker.files.gguf_metadata import Metadata

_FIRST_REPLICA = "first replica"
"""The name of the claim for a model's first replica while the model is loading. One is loaded at a time."""
_part_numbers = itertools.count(1)


class PlannedContext(NamedTuple):
    """The settings of a replica with all sizes filled in, and the totals behind them."""

    settings: EngineSettings
    memory: MemoryPlan
    part: str
    """The name of its claim."""


class MemoryPlanner:
    """Plans for one engine process, alongside others on this machine."""

    def __init__(self, claims: MemoryClaims | None = None) -> None:
        self._claims = claims or MemoryClaims(None)

    def __repr__(self) -> str:
        return f"<MemoryPlanner {self._claims!r}>"

    def plan_weights(self, weights: Path, found: Metadata, settings: EngineSettings) -> DevicePlacement:
        """Returns where a model's layers go, and claims memory for them and for a first replica.

        Raises ModelError if not even a replica with a short context would fit."""
        size = model_facts.weight_bytes(weights)
        facts = _facts(found, size, settings)
        with self._claims.planning():
            gpus = self._gpus(settings, _part_of(weights))
            placement = DevicePlacement()
            if gpus:
                layers, output = model_facts.layer_bytes(weights)
                placement = fit.place(layers, output, facts, settings, _together(gpus), len(gpus))
            rooms = self._rooms(settings, _part_of(weights), gpus, placement)
            need = _need(facts, settings, rooms)
            self._claim(_part_of(weights), MemoryNeed(size, 0, 0), placement, gpus)
            # so that others leave room for it until it is planned
            coming = need._replace(weight_bytes=0)
            self._claim(_FIRST_REPLICA, coming, placement._replace(weight_bytes=0), gpus)
        return placement

    def plan_context(
        self, weights: Path, found: Metadata, placement: DevicePlacement, settings: EngineSettings
    ) -> PlannedContext:
        """Chooses the sizes of a replica of a loaded model, and claims its memory.

        Raises ModelError if what the settings ask for no longer fits."""
        part, size = f"replica {os.getpid()}.{next(_part_numbers)}", model_facts.weight_bytes(weights)
        own = placement._replace(weight_bytes=0)  # the model has claimed them
        with self._claims.planning():
            self._claims.release(_FIRST_REPLICA)
            self._claims.took(_part_of(weights))
            gpus = self._gpus(settings, part)
            rooms = self._rooms(settings, part, gpus, own)
            facts = _facts(found, 0, settings)
            need = _need(facts, settings, rooms)
            sized = msgspec.structs.replace(
                settings,
                kv_tokens=settings.kv_tokens if facts.pools else need.kv_tokens,
                host_cache_limit_bytes=max(1, need.host_cache_bytes),
                gpu_layers=placement.gpu_layers,
            )
            if not facts.pools:
                sized = kv_memory.fit_to_budget(sized, found, need.context_length)
            sized = msgspec.structs.replace(sized, context_length=sized.context_length or need.context_length)
            kv_tokens = min(need.kv_tokens, sized.kv_tokens or need.kv_tokens)
            need = estimate(facts, sized, Sizes(sized.context_length, kv_tokens, need.host_cache_bytes))
            self._claim(part, need, own, gpus)
        host = rooms.host
        memory = MemoryPlan(
            weight_bytes=size,
            kv_bytes=need.kv_bytes,
            compute_bytes=need.compute_bytes,
            host_cache_bytes=need.host_cache_bytes,
            reserve_bytes=room.reserve_bytes(host.total_bytes),
            total_bytes=host.total_bytes,
            free_bytes=host.free_bytes + max(0, size - placement.weight_bytes),
            gpu_bytes=need.gpu_bytes(placement),
            gpu_layers=placement.gpu_layers,
        )
        return PlannedContext(sized, memory, part)

    def took(self, part: str) -> None:
        """Notes that a part has its memory."""
        self._claims.took(part)

    def release(self, part: str) -> None:
        """Notes that a part no longer takes anything."""
        self._claims.release(part)

    def release_weights(self, weights: Path) -> None:
        """Notes that a model, which may never have been loaded, no longer takes anything."""
        self._claims.release(_part_of(weights))
        self._claims.release(_FIRST_REPLICA)

    def _rooms(self, settings: EngineSettings, part: str, gpus: dict[str, Room], placement: DevicePlacement) -> Rooms:
        share = settings.memory_share or 1.0
        host = self._claims.host_room(device_memory.host_limits(), part, share)
        chosen = max(0, host.chosen_bytes - settings.memory_kept_bytes) // max(1, settings.memory_parts)
        host = host._replace(chosen_bytes=chosen)
        return Rooms(host, _together(gpus) if placement.gpu_layers else None, placement)

    def _gpus(self, settings: EngineSettings, part: str) -> dict[str, Room]:
        """Returns the room on each GPU that a model may use."""
        if not settings.gpu_layers or not llama.llama_supports_gpu_offload():
            return {}
        there = devices.all_devices()
        if settings.devices:
            devices.select(settings.devices, there)
            there = {name: there[name] for name in settings.devices if name != devices.NONE}
        elif settings.split_mode == "none":
            there = dict(list(there.items())[settings.main_gpu : settings.main_gpu + 1])
        found = [one for one in devices.memory(there) if one.total_bytes]
        return {one.device: self._room(one, settings, part) for one in found}

    def _room(self, device: DeviceMemory, settings: EngineSettings, part: str) -> Room:
        found = self._claims.room(device, part, settings.memory_share or 1.0)
        return found._replace(chosen_bytes=found.chosen_bytes // max(1, settings.memory_parts))

    def _claim(self, part: str, need: MemoryNeed, placement: DevicePlacement, gpus: dict[str, Room]) -> None:
        sizes = {HOST: need.host_bytes(placement) - need.host_cache_bytes, HOST_CACHE: need.host_cache_bytes}
        if placement.gpu_layers:
            sizes |= {name: need.gpu_bytes(placement) // len(gpus) for name in gpus}
        self._claims.claim(part, sizes)


def _part_of(weights: Path) -> str:
    """Returns the claim name of a weights file, which is the same in every process."""
    return str(weights.resolve())


def _need(facts: ModelFacts, settings: EngineSettings, rooms: Rooms) -> MemoryNeed:
    """Returns what a replica takes. If another engine chose its sizes, it has these regardless of free memory."""
    if settings.memory_share:
        return fit.fit(facts, settings, rooms)
    return estimate(facts, settings, fit.wished(facts, settings, rooms))


def _facts(found: Metadata, weight_bytes: int, settings: EngineSettings) -> ModelFacts:
    return model_facts.read(found, weight_bytes, settings, settings.max_num_seqs if settings.max_num_seqs > 0 else 16)


def _together(rooms: dict[str, Room]) -> Room:
    return Room(*(sum(sizes) for sizes in zip(*rooms.values(), strict=True))) if rooms else Room(0, 0, 0)
