"""Memory and uptime of a replica are read every five seconds, and at once when its engine has changed."""

import os
from pathlib import Path

import pytest

from tests.support.arithmetic import make_config
from tokenbus.protocol.process.memory import resident_bytes
from tokenbus.protocol.wire import messages
from tokenbus.worker.contract.contract import EngineDevice
from tokenbus.worker.files.device_memory import DeviceMemory
from tokenbus.worker.replica.health import HEALTH_INTERVAL_S, MAX_AGE_S, HealthMonitor, MemoryReadings
from tokenbus.worker.telemetry.metrics import ReplicaMetrics, WorkerMetrics

GPU = DeviceMemory("CUDA0", 100, 40)


class Engine:
    """An engine whose memory can be read."""

    def __init__(self) -> None:
        self.device_memory: list[DeviceMemory] = []
        self.num_reads = 0

    def read_memory(self) -> None:
        self.num_reads += 1
        self.device_memory = [GPU]


def started(monitor: HealthMonitor, engine: Engine, *devices: EngineDevice) -> None:
    monitor.engine_started(engine, make_config(pid=os.getppid(), devices=devices))  # type: ignore[arg-type]


def tick(monitor: HealthMonitor, now: float, engine: Engine | None = None) -> bool:
    return monitor.tick(now, engine or Engine())  # type: ignore[arg-type]


def test_without_an_engine_there_are_the_host_and_the_frontend() -> None:
    health = HealthMonitor().latest
    assert [(one.name, one.kind, one.layers) for one in health.devices] == [("host", "cpu", None)]
    assert 0 < health.devices[0].free_bytes <= health.devices[0].total_bytes
    assert health.front_bytes > 1 << 20
    assert (health.engine_bytes, health.engine_uptime_s) == (0, 0.0)


def test_it_is_read_every_five_seconds_and_when_an_engine_has_started_or_died() -> None:
    monitor, engine = HealthMonitor(), Engine()
    assert [tick(monitor, now) for now in (0.0, HEALTH_INTERVAL_S - 0.1, HEALTH_INTERVAL_S)] == [True, False, True]
    started(monitor, engine)
    assert tick(monitor, HEALTH_INTERVAL_S + 0.1, engine)
    monitor.engine_died()
    assert tick(monitor, HEALTH_INTERVAL_S + 0.2)
    assert not tick(monitor, HEALTH_INTERVAL_S + 0.3)


def test_an_engine_is_asked_for_the_memory_of_its_gpus_and_one_without_any_is_not() -> None:
    monitor, engine = HealthMonitor(), Engine()
    started(monitor, engine, EngineDevice(name="host", kind="cpu", layers=24))
    tick(monitor, 0.0, engine)
    assert engine.num_reads == 0
    assert [(one.name, one.layers) for one in monitor.latest.devices] == [("host", 24)]
    gpu = EngineDevice(name="CUDA0", kind="gpu", description="NVIDIA H100", layers=20)
    started(monitor, engine, EngineDevice(name="host", kind="cpu", layers=4), gpu)
    tick(monitor, 1.0, engine)
    host, device = monitor.latest.devices
    assert host.layers == 4
    assert (device.name, device.kind, device.layers, device.description) == ("CUDA0", "gpu", 20, "NVIDIA H100")
    assert (device.total_bytes, device.free_bytes) == (100, 40)
    assert monitor.latest.engine_bytes > 0
    assert engine.num_reads == 2


def test_replicas_of_a_process_read_the_same_files_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def host() -> DeviceMemory:
        read.append("host")
        return DeviceMemory("host", 100, 10)

    monkeypatch.setattr("tokenbus.worker.files.device_memory.host", host)
    readings = MemoryReadings()
    for now in (0.0, 0.1, MAX_AGE_S - 0.1):
        assert readings.host(now) == DeviceMemory("host", 100, 10)
    assert read == ["host"]
    readings.host(MAX_AGE_S)
    assert read == ["host", "host"]
    assert readings.resident_bytes(os.getpid(), MAX_AGE_S) > 1 << 20


def test_a_device_that_vanishes_is_not_shown_any_more() -> None:
    monitor, engine = HealthMonitor(), Engine()
    started(monitor, engine, EngineDevice(name="CUDA0", kind="gpu"))
    tick(monitor, 0.0, engine)
    engine.device_memory = []
    tick(monitor, HEALTH_INTERVAL_S, engine)
    assert [one.name for one in monitor.latest.devices] == ["host"]


def test_a_process_that_is_gone_takes_no_memory() -> None:
    numbers = {int(path.name) for path in Path("/proc").glob("[0-9]*")}
    assert resident_bytes(max(numbers) + 100_000) == 0
    assert resident_bytes() == pytest.approx(resident_bytes(os.getpid()), rel=0.1)


def test_the_memory_of_a_device_that_vanishes_is_not_exported_any_more() -> None:
    metrics = WorkerMetrics()
    replica, other = (ReplicaMetrics(metrics, "m", name) for name in ("w1", "w2"))

    def tell(replica: ReplicaMetrics, *names: str) -> None:
        devices = [messages.DeviceHealth(name=name, kind="gpu", total_bytes=10, free_bytes=4) for name in names]
        replica.update_health(
            messages.WorkerHealth(devices=devices, front_bytes=1, engine_bytes=2, uptime_s=3.0, engine_uptime_s=0.0)
        )

    def shown() -> dict[tuple[str, str, str], float]:
        return {
            (one.labels["worker_id"], one.labels["device"], one.labels["state"]): one.value
            for family in metrics.device_memory.collect()
            for one in family.samples
        }

    tell(replica, "host", "CUDA0")
    tell(other, "CUDA0")
    assert shown()["w1", "CUDA0", "used"] == 6
    tell(replica, "host")
    assert shown().keys() == {
        (worker, device, state) for worker, device in (("w1", "host"), ("w2", "CUDA0")) for state in ("used", "free")
    }
