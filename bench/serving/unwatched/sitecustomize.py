"""Removes metrics and logs from a Python process, for comparison in `bench.serving.observability`."""

from typing import Any

from tokenbus.protocol.telemetry import metrics
from tokenbus.worker.engine.process import ipc, step_timer
from tokenbus.worker.telemetry.metrics import ReplicaMetrics

_STATS = ipc.StepStats(ipc.StepKind.DECODE, 0.0, 0.0, 0, 0)


def _nothing(*_: Any, **__: Any) -> None: ...


def _fixed_stats(*_: Any) -> ipc.StepStats:
    return _STATS


for kind, names in (
    (metrics.Counter, ("inc",)),
    (metrics.Gauge, ("inc", "set")),
    (metrics.Histogram, ("observe",)),
    (ReplicaMetrics, ("observe_step", "request_finished", "count_load")),
):
    for name in names:
        assert hasattr(kind, name), name
        setattr(kind, name, _nothing)
setattr(step_timer.StepTimer, "record", _fixed_stats)  # noqa: B010  # as a method it would have to take what it ignores
