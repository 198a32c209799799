"""While the send buffer is full, no part of a router ends and no answer is lost."""

from array import array

from nats.aio.msg import Msg

from tests.hostile.forged_worker import ForgedWorker, Stage, refuses, says
from tests.sim.system import FrontendProcess
from tokenbus.protocol.wire import errors, internal, messages

EMBEDDED = internal.EmbedResult(vectors=array("f", [1.0, 2.0]).tobytes(), prompt_tokens=1)


def test_a_router_that_can_publish_nothing_for_a_while_goes_on_asking_for_snapshots(stage: Stage) -> None:
    stage.router.bus.is_busy = True
    forged = ForgedWorker(stage.world, stage.broker, "w1", seq=5, snapshot=says(b""))
    stage.world.run(3.0)
    assert forged.heard == [], "it could not be asked"
    stage.router.bus.is_busy = False
    stage.world.run_until(lambda: "snapshot" in forged.heard, 3.0)
    stage.check()


def test_an_embedding_that_comes_while_the_router_is_busy_is_answered_as_soon_as_it_is_not(stage: Stage) -> None:
    forged = ForgedWorker(stage.world, stage.broker, "w1", features=("embed",), embed=says(EMBEDDED))
    stage.world.run(0.5)
    asked = stage.client.embed()
    stage.world.run_until(lambda: "embed" in forged.heard)
    stage.router.bus.is_busy = True
    stage.world.run(5.0)
    assert not asked.done()
    stage.router.bus.is_busy = False
    stage.world.run_until(asked.done, 1.0)
    assert asked.result().embeddings == [[1.0, 2.0]]
    stage.check()


def test_a_terminal_that_a_router_is_too_busy_to_send_is_sent_as_soon_as_it_is_not(stage: Stage) -> None:
    forged = ForgedWorker(stage.world, stage.broker, "w1", run=refuses(errors.Code.UNSUPPORTED))
    stage.world.run(0.5)
    stage.client.ask(5)
    stage.world.run_until(lambda: "run" in forged.heard)
    stage.router.bus.is_busy = True
    stage.world.run(1.5)
    assert stage.client.open()
    stage.router.bus.is_busy = False
    stage.world.run(0.5)
    assert stage.until_ended(0.1) == ["unsupported"]


def test_a_request_that_is_refused_while_the_router_is_busy_is_told_so_as_soon_as_it_is_not(stage: Stage) -> None:
    ForgedWorker(stage.world, stage.broker, "w1", state=messages.WorkerState.DRAINING)
    stage.world.run(0.5)
    stage.router.bus.is_busy = True
    stage.client.ask(5)
    stage.world.run(1.5)
    stage.router.bus.is_busy = False
    stage.world.run(0.5)
    assert stage.until_ended(0.1) == ["no_worker"]


def test_an_embedding_that_a_worker_is_too_busy_to_send_is_sent_as_soon_as_it_is_not(stage: Stage) -> None:
    frontend = FrontendProcess(stage.world, stage.broker, "w1")
    stage.world.run(0.5)

    def be_busy(message: Msg) -> None:
        frontend.bus.is_busy = frontend.bus.is_busy or message.subject.endswith(".embed")

    frontend.incoming.tap = be_busy
    asked = stage.client.embed()
    stage.world.run_until(lambda: frontend.bus.is_busy)
    stage.world.run(0.8)
    assert not asked.done()
    frontend.incoming.tap = lambda message: None
    frontend.bus.is_busy = False
    stage.world.run_until(asked.done, 0.5)
    assert asked.result().embeddings == [[0.0, 0.0]]
    stage.check()
