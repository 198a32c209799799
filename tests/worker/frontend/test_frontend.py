"""A frontend announces that it has stopped if it can, and hides no error if it can't."""

from tests.support.arithmetic import ArithmeticRunner, make_config
from tests.support.engines import thread_engine
from tests.support.recording_bus import RecordingBus
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import subjects
from tokenbus.worker.frontend.frontend import Frontend
from tokenbus.worker.frontend.metrics import ReplicaMetrics, WorkerMetrics
from tokenbus.worker.frontend.settings import FrontendSettings


async def test_a_closed_connection_does_not_hide_why_a_frontend_ended() -> None:
    line = RecordingBus()
    metrics = ReplicaMetrics(WorkerMetrics(), "demo", "w1")
    names = subjects.Subjects()
    frontend = Frontend(line, names, "demo", "w1", FrontendSettings(), metrics, tracing.NoopTracer())  # type: ignore[arg-type]
    frontend.engine_started(thread_engine(lambda _: ArithmeticRunner()), make_config())
    line.take()
    line.is_closed = True
    frontend.announce_stopped()
    assert not line.batches
    line.is_closed = False
    frontend.announce_stopped()
    assert line.take()[0].subject == names.card("demo", "w1")
