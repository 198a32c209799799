"""The memory that a replica is planned to take, as the worker shows it."""

import msgspec


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The totals of a plan, in bytes. With GPUs, host and GPUs together."""

    weight_bytes: int
    kv_bytes: int
    compute_bytes: int
    host_cache_bytes: int
    """Room for prefixes that no sequence uses."""
    reserve_bytes: int
    """The host memory that is left for others."""
    total_bytes: int
    """The host's total memory."""
    free_bytes: int
    """The part of it that was free, or already taken by the engine."""
    gpu_bytes: int = 0
    """The part of the above that is on GPUs."""
    gpu_layers: int = 0
    """The layers on GPUs; one more than the model has if the output layer is there too."""

    def parts(self) -> dict[str, int]:
        """Returns what the replica takes, by part."""
        return {
            "weights": self.weight_bytes,
            "kv": self.kv_bytes,
            "buffers": self.compute_bytes,
            "host_cache": self.host_cache_bytes,
        }

    @property
    def planned_bytes(self) -> int:
        """Everything that the replica takes, including the weights."""
        return sum(self.parts().values())
