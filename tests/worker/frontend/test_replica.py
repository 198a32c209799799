"""A replica says so if a setting has no effect on its engine."""

import pytest
from structlog.testing import capture_logs

from tests.support.arithmetic import ArithmeticRunner, make_config
from tests.support.engines import thread_engine
from tests.support.recording_bus import RecordingBus
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import subjects
from tokenbus.worker.engine.process.settings import EngineSettings
from tokenbus.worker.frontend.frontend import Frontend
from tokenbus.worker.frontend.metrics import ReplicaMetrics, WorkerMetrics
from tokenbus.worker.frontend.replica import MAX_FAILURES, Replica
from tokenbus.worker.frontend.settings import FrontendSettings, ServedModel, WorkerSettings


@pytest.mark.parametrize(("path", "host_kv_blocks", "expected"), [("f", 0, ["f"]), ("f", 64, []), ("", 0, [])])
async def test_a_cache_file_that_the_engine_can_not_use_is_warned_of(
    path: str, host_kv_blocks: int, expected: list[str]
) -> None:
    metrics, engine = WorkerMetrics(), EngineSettings(model="demo")
    made_of = (engine, None, metrics, tracing.NoopTracer(), path)
    replica = Replica(WorkerSettings(models=()), ServedModel("demo", engine), "w0", *made_of)  # type: ignore[arg-type]
    shown = ReplicaMetrics(metrics, "demo", "w0")
    made_for = (subjects.Subjects(), "demo", "w0", FrontendSettings(), shown, tracing.NoopTracer())
    replica.frontend = Frontend(RecordingBus(), *made_for)  # type: ignore[arg-type]
    with capture_logs() as logs:
        replica.engine_started(thread_engine(lambda _: ArithmeticRunner()), make_config(host_kv_blocks=host_kv_blocks))
    assert [line["path"] for line in logs if line["event"] == "host_cache_unused"] == expected


def test_failures_in_a_row_are_counted_until_a_request_succeeds() -> None:
    families = WorkerMetrics()
    shown = ReplicaMetrics(families, "demo", "w0")
    for _ in range(MAX_FAILURES):
        shown.request_finished("internal", None, None, has_failed=True)
    assert shown.failures_in_a_row == MAX_FAILURES
    shown.request_finished("stop", None, None)
    assert shown.failures_in_a_row == 0
