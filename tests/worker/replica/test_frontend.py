"""A frontend looks after each of its parts whatever fails, and announces that it has stopped if it can."""

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from tests.hostile.forged_worker import Stage
from tests.sim.system import FrontendProcess
from tests.sim.world import world
from tests.support.arithmetic import ArithmeticRunner, make_config
from tests.support.engines import thread_engine
from tests.support.recording_bus import RecordingBus
from tokenbus.protocol.telemetry import tracing
from tokenbus.protocol.wire import subjects
from tokenbus.worker.broker.lifeline import Lifeline
from tokenbus.worker.replica.frontend import Frontend
from tokenbus.worker.settings.settings import FrontendSettings
from tokenbus.worker.telemetry.metrics import ReplicaMetrics, WorkerMetrics


async def test_a_closed_connection_does_not_hide_why_a_frontend_ended() -> None:
    bus = RecordingBus()
    names = subjects.Subjects()
    line = Lifeline(bus, bus, names, "w1")  # type: ignore[arg-type]
    metrics = ReplicaMetrics(WorkerMetrics(), "demo", "w1")
    frontend = Frontend(line, names, "demo", "w1", FrontendSettings(), metrics, tracing.NoopTracer())
    frontend.engine_started(thread_engine(lambda _: ArithmeticRunner()), make_config())
    bus.take()
    bus.is_closed = True
    frontend.announce_stopped()
    assert not bus.batches
    bus.is_closed = False
    frontend.announce_stopped()
    assert bus.take()[0].subject == names.card("demo", "w1")


@pytest.fixture
def stage() -> Iterator[Stage]:
    with world(seed=7) as made:
        yield Stage(made)


def test_a_part_that_fails_at_each_tick_ends_nothing_and_is_logged_now_and_then(stage: Stage) -> None:
    worker = FrontendProcess(stage.world, stage.broker, "w1")
    ticks: list[float] = []

    def fail(now: float, gap_s: float) -> None:
        ticks.append(now)
        raise LookupError("gone")

    worker.frontend.on_tick = fail
    stage.world.run(0.5)
    with capture_logs() as lines:
        stage.client.ask(150)  # 15 s
        assert stage.until_ended(20.0) == ["length"]
    assert len(ticks) > 50
    logged = [line for line in lines if line["event"] == "task_failed"]
    assert 1 <= len(logged) <= 2
    assert {line["task"] for line in logged} == {"tick of engine"}
