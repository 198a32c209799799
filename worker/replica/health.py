"""Reads the memory and the uptime of a replica's processes and devices, every few seconds."""

import os
import time

from tokenbus.protocol.process.memory import resident_bytes
from tokenbus.protocol.wire import messages
from tokenbus.worker.contract import contract
from tokenbus.worker.engine_client.client import EngineClient
from tokenbus.worker.files import device_memory

INTERVAL_S = 5.0


class HealthMonitor:
    """The health of one replica as last read."""

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self._engine_began_at = 0.0
        self._config: contract.EngineConfig | None = None
        self._due_at = 0.0
        self.latest = self._read(None)

    def __repr__(self) -> str:
        return f"<HealthMonitor {self.latest}>"

    def engine_started(self, engine: EngineClient, config: contract.EngineConfig) -> None:
        """Reads the memory of this engine from now on."""
        self._config, self._engine_began_at, self._due_at = config, time.monotonic(), 0.0
        self._ask(engine)

    def engine_died(self) -> None:
        """Notes that there is no engine for now."""
        self._config, self._due_at = None, 0.0

    def tick(self, now: float, engine: EngineClient | None) -> bool:
        """Reads everything if it is due; returns whether it was."""
        if now < self._due_at:
            return False
        self._due_at = now + INTERVAL_S
        self.latest = self._read(engine)
        if engine is not None:
            self._ask(engine)  # for the next time
        return True

    def _ask(self, engine: EngineClient) -> None:
        if self._config is not None and any(one.name != device_memory.HOST for one in self._config.devices):
            engine.read_memory()

    def _read(self, engine: EngineClient | None) -> messages.WorkerHealth:
        now, config = time.monotonic(), self._config
        return messages.WorkerHealth(
            devices=self._devices(engine),
            front_bytes=resident_bytes(),
            engine_bytes=resident_bytes(config.pid) if config is not None and config.pid != os.getpid() else 0,
            uptime_s=round(now - self._began_at, 1),
            engine_uptime_s=0.0 if config is None else round(now - self._engine_began_at, 1),
        )

    def _devices(self, engine: EngineClient | None) -> list[messages.DeviceHealth]:
        """Returns the host and the devices whose memory the engine has read."""
        known = {} if self._config is None else {one.name: one for one in self._config.devices}
        host = device_memory.host()
        found = [] if host is None else [host]
        if engine is not None and self._config is not None:
            found += engine.device_memory
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
