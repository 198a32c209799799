"""The memory and the uptime of a replica, which routers are told every five seconds."""

import os
import time
from collections.abc import Callable
from typing import Any

from tokenbus.protocol.process.memory import resident_bytes
from tokenbus.protocol.wire import messages
from tokenbus.worker.contract import contract
from tokenbus.worker.engine_client.client import EngineClient
from tokenbus.worker.files import device_memory
from tokenbus.worker.files.device_memory import DeviceMemory

HEALTH_INTERVAL_S = 5.0
MAX_AGE_S = 2.0
"""Seconds after which readings that replicas of a process share are made again."""


class MemoryReadings:
    """The memory of processes and of the host, as the replicas of one process read it: each of them needs the same few
    files of the system."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, Any]] = {}

    def __repr__(self) -> str:
        return f"<MemoryReadings {list(self._kept)}>"

    def host(self, now: float) -> DeviceMemory | None:
        found: DeviceMemory | None = self._read("host", device_memory.host, now)
        return found

    def resident_bytes(self, pid: int, now: float) -> int:
        """Returns the resident memory of a process; 0 if there is none."""
        found: int = self._read(str(pid), lambda: resident_bytes(pid), now)
        return found

    def _read(self, name: str, read: Callable[[], Any], now: float) -> Any:
        if name not in self._kept or now - self._kept[name][0] >= MAX_AGE_S:
            self._kept = {one: kept for one, kept in self._kept.items() if now - kept[0] < MAX_AGE_S}
            self._kept[name] = now, read()
        return self._kept[name][1]


OF_PROCESS = MemoryReadings()
"""Those that all replicas of this process share."""


class HealthMonitor:
    """The health of one replica as last read."""

    def __init__(self, readings: MemoryReadings = OF_PROCESS) -> None:
        self._readings = readings
        self._began_at = time.monotonic()
        self._engine_began_at = 0.0
        self._config: contract.EngineConfig | None = None
        self._due_at = 0.0
        self.latest = self._read([])

    def __repr__(self) -> str:
        return f"<HealthMonitor {self.latest}>"

    def engine_started(self, engine: EngineClient, config: contract.EngineConfig) -> None:
        """Reads the memory of this engine from now on."""
        self._config, self._engine_began_at, self._due_at = config, time.monotonic(), 0.0
        self._ask(engine)

    def engine_died(self) -> None:
        """Notes that there is no engine for now."""
        self._config, self._due_at = None, 0.0

    def tick(self, now: float, engine: EngineClient) -> bool:
        """Reads everything if it is due; returns whether it was."""
        if now < self._due_at:
            return False
        self._due_at = now + HEALTH_INTERVAL_S
        self.latest = self._read(engine.device_memory)
        self._ask(engine)  # for the next time
        return True

    def _ask(self, engine: EngineClient) -> None:
        if self._config is not None and any(one.name != device_memory.HOST for one in self._config.devices):
            engine.read_memory()

    def _read(self, read: list[DeviceMemory]) -> messages.WorkerHealth:
        now, config = time.monotonic(), self._config
        return messages.WorkerHealth(
            devices=self._devices(read, now),
            front_bytes=self._readings.resident_bytes(os.getpid(), now),
            engine_bytes=self._readings.resident_bytes(config.pid, now)
            if config is not None and config.pid != os.getpid()
            else 0,
            uptime_s=round(now - self._began_at, 1),
            engine_uptime_s=0.0 if config is None else round(now - self._engine_began_at, 1),
        )

    def _devices(self, read: list[DeviceMemory], now: float) -> list[messages.DeviceHealth]:
        """Returns the host and the devices whose memory the engine has read."""
        known = {} if self._config is None else {one.name: one for one in self._config.devices}
        host = self._readings.host(now)
        found = [] if host is None else [host]
        if self._config is not None:
            found += read
        shown = []
        for memory in found:
            device = known.get(memory.device)
            shown.append(
                messages.DeviceHealth(
                    name=memory.device,
                    kind="cpu" if memory.device == device_memory.HOST else "gpu",
                    total_bytes=memory.total_bytes,
                    free_bytes=memory.free_bytes,
                    description=device.description if device is not None else "",
                    layers=device.layers if device is not None else None,
                )
            )
        return shown
