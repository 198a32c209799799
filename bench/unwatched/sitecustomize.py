"""Makes a Python process count and log nothing: what `bench.watching` compares the real one with."""

from typing import Any

from tokenbus.protocol.telemetry import metrics
from tokenbus.worker.engine.process import frames, watch
from tokenbus.worker.frontend.metrics import ReplicaMetrics

_NOTE = frames.StepNote(frames.StepKind.DECODE, 0.0, 0.0, 0, 0)


def _nothing(*_: Any, **__: Any) -> None: ...


def _one_note(*_: Any) -> frames.StepNote:
    return _NOTE


for kind, names in (
    (metrics.Number, ("add", "set")),
    (metrics.Times, ("observe",)),
    (ReplicaMetrics, ("interval", "step", "finished", "refused", "take_load")),
):
    for name in names:
        assert hasattr(kind, name), name
        setattr(kind, name, _nothing)
setattr(watch.StepWatch, "note", _one_note)  # noqa: B010  # as a method it would have to take what it ignores
