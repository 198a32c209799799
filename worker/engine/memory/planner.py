"""Plans the memory of models, before one is loaded and again before each of its replicas is made.

What a model takes is said by its engine (`MemoryModel`); what there is, and what others have claimed, is the same for
all engines (decision 0064)."""

import itertools
import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import structlog

from tokenbus.protocol.process.cores import usable_cores
from tokenbus.worker.contract.contract import MemoryPlan
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.memory import fit
from tokenbus.worker.engine.memory.claims import HOST_CACHE, MemoryClaims
from tokenbus.worker.engine.memory.fit import DevicePlacement, MemoryNeed, ModelFacts, Room, Rooms, Sizes, estimate
from tokenbus.worker.files import device_memory
from tokenbus.worker.files.device_memory import HOST, DeviceMemory

_FIRST_REPLICA = "first replica"
"""The name of the claim for a model's first replica while the model is loading. One is loaded at a time."""
_part_numbers = itertools.count(1)


class MemoryModel(Protocol):
    """The memory of one model, as its engine knows it."""

    @property
    def part(self) -> str:
        """The name under which its weights are claimed. A path stands for files that all processes share."""
        ...

    @property
    def weight_bytes(self) -> int:
        """The memory of its weights."""
        ...

    @property
    def loading_bytes(self) -> int:
        """The memory of its weights while they are loading."""
        ...

    def facts(self, settings: EngineSettings) -> ModelFacts:
        """Returns its facts without the weights."""
        ...

    def gpus(self, settings: EngineSettings) -> Sequence[DeviceMemory]:
        """Returns the memory of each GPU that it may use."""
        ...

    def place(self, facts: ModelFacts, settings: EngineSettings, gpu: Room, num_gpus: int) -> DevicePlacement:
        """Returns the part of it that goes to GPUs."""
        ...

    def sized(self, settings: EngineSettings, need: MemoryNeed, placement: DevicePlacement) -> EngineSettings:
        """Returns the settings of a replica that takes no more than that. Raises ModelError if they can't be met."""
        ...


class PlannedReplica(NamedTuple):
    """The settings of a replica with all sizes filled in, and the totals behind them."""

    settings: EngineSettings
    memory: MemoryPlan
    part: str
    """The name of its claim."""


class MemoryPlanner:
    """Plans for one engine process, alongside others on this machine."""

    def __init__(self, claims: MemoryClaims | None = None) -> None:
        self.claims = claims or MemoryClaims(None)

    def __repr__(self) -> str:
        return f"<MemoryPlanner {self.claims!r}>"

    def plan_weights(self, model: MemoryModel, settings: EngineSettings) -> DevicePlacement:
        """Returns where a model's layers go, and claims memory for them and for a first replica.

        Raises ModelTooLargeError if not even a replica with a short context would fit."""
        facts = model.facts(settings)._replace(weight_bytes=model.loading_bytes)
        with self.claims.planning():
            gpus = self._gpus(model, settings, model.part)
            placement = DevicePlacement()
            if gpus:
                placement = model.place(facts, settings, _together(gpus), len(gpus))
            need = _need(facts, settings, self._rooms(settings, model.part, gpus, placement))
            self._claim(model.part, MemoryNeed(model.loading_bytes, 0, 0), placement, gpus)
            # so that others leave room for it until it is planned
            coming = need._replace(weight_bytes=0)
            self._claim(_FIRST_REPLICA, coming, placement._replace(weight_bytes=0), gpus)
        return placement

    def plan_replica(self, model: MemoryModel, placement: DevicePlacement, settings: EngineSettings) -> PlannedReplica:
        """Chooses the sizes of a replica of a loaded model, and claims its memory.

        Raises ModelTooLargeError if what the settings ask for no longer fits."""
        part, size = f"replica {os.getpid()}.{next(_part_numbers)}", model.weight_bytes
        own = placement._replace(weight_bytes=0)  # the model has claimed them
        with self.claims.planning():
            self.claims.release(_FIRST_REPLICA)
            gpus = self._gpus(model, settings, part)
            self._claim(model.part, MemoryNeed(size, 0, 0), placement, gpus)  # what was needed for loading is free
            self.claims.took(model.part)
            rooms = self._rooms(settings, part, gpus, own)
            facts = model.facts(settings)
            need = _need(facts, settings, rooms)
            sized = model.sized(settings, need, placement)
            if not settings.keep_cache:
                sized = msgspec.structs.replace(sized, host_cache_limit_bytes=max(1, need.host_cache_bytes))
            kv_tokens = min(need.kv_tokens, sized.kv_tokens or need.kv_tokens)
            length = sized.context_length or need.context_length
            need = estimate(facts, sized, Sizes(length, kv_tokens, need.host_cache_bytes))
            self._claim(part, need, own, gpus, _greedy_threads(settings, placement))
            self._warn_of_threads()
        host = rooms.host
        memory = MemoryPlan(
            weight_bytes=size,
            kv_bytes=need.kv_bytes,
            compute_bytes=need.compute_bytes,
            host_cache_bytes=need.host_cache_bytes,
            reserve_bytes=fit.reserve_bytes(host.total_bytes),
            total_bytes=host.total_bytes,
            free_bytes=host.free_bytes + max(0, size - placement.weight_bytes),
            gpu_bytes=need.gpu_bytes(placement),
            gpu_layers=placement.gpu_layers,
        )
        return PlannedReplica(sized, memory, part)

    def release_weights(self, model: MemoryModel) -> None:
        """Notes that a model, which may never have been loaded, no longer takes anything."""
        self.claims.release(model.part)
        self.claims.release(_FIRST_REPLICA)

    def _rooms(self, settings: EngineSettings, part: str, gpus: dict[str, Room], placement: DevicePlacement) -> Rooms:
        share = settings.memory_share or 1.0
        host = self.claims.host_room(device_memory.host_limits(), part, share)
        chosen = max(0, host.chosen_bytes - settings.memory_kept_bytes) // max(1, settings.memory_parts)
        host = host._replace(chosen_bytes=chosen)
        return Rooms(host, _together(gpus) if placement.gpu_layers else None, placement)

    def _gpus(self, model: MemoryModel, settings: EngineSettings, part: str) -> dict[str, Room]:
        """Returns the room on each GPU that a model may use."""
        found = [one for one in model.gpus(settings) if one.total_bytes]
        return {one.device: self._room(one, settings, part) for one in found}

    def _room(self, device: DeviceMemory, settings: EngineSettings, part: str) -> Room:
        found = self.claims.room(device, part, settings.memory_share or 1.0)
        return found._replace(chosen_bytes=found.chosen_bytes // max(1, settings.memory_parts))

    def _claim(
        self, part: str, need: MemoryNeed, placement: DevicePlacement, gpus: dict[str, Room], greedy_threads: int = 0
    ) -> None:
        sizes = {HOST: need.host_bytes(placement) - need.host_cache_bytes, HOST_CACHE: need.host_cache_bytes}
        if placement.gpu_layers:
            sizes |= {name: need.gpu_bytes(placement) // len(gpus) for name in gpus}
        self.claims.claim(part, sizes, greedy_threads)

    def _warn_of_threads(self) -> None:
        """Says if other engines of this machine want all of its cores, too: a step takes as long as its slowest thread,
        which then waits for a core. Call it while `planning`."""
        threads, cores = self.claims.greedy_threads()
        if threads > cores:
            advice = "divide the cores among the workers of this machine with --threads"
            structlog.get_logger().warning("cores_oversubscribed", threads=threads, cores=cores, reason=advice)


def _greedy_threads(settings: EngineSettings, placement: DevicePlacement) -> int:
    """Returns how many threads a replica computes with, if it wants all cores, and 0 if it leaves some to others."""
    cores = usable_cores()
    threads = settings.threads or cores
    return threads if threads >= cores > 1 and not placement.gpu_layers else 0


def _need(facts: ModelFacts, settings: EngineSettings, rooms: Rooms) -> MemoryNeed:
    """Returns what a replica takes. If another engine chose its sizes, it has these regardless of free memory."""
    if settings.memory_share:
        return fit.fit(facts, settings, rooms)
    return estimate(facts, settings, fit.wished(facts, settings, rooms))


def _together(rooms: dict[str, Room]) -> Room:
    return Room(*(sum(sizes) for sizes in zip(*rooms.values(), strict=True))) if rooms else Room(0, 0, 0)
