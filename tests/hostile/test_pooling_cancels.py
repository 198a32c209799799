"""A request for embeddings or ranked documents ends when it is cancelled, wherever it is, and frees its worker."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.hostile.forged_worker import Stage
from tests.sim.clients import ClientProcess
from tests.sim.system import FrontendProcess
from tokenbus.protocol.wire import errors

Ask = Callable[..., "asyncio.Task[Any]"]
ASKS: list[Ask] = [ClientProcess.embed, ClientProcess.rerank]


@pytest.fixture
def worker(stage: Stage) -> FrontendProcess:
    """A worker that takes 5 s for the inputs of a request."""
    worker = FrontendProcess(stage.world, stage.broker, "w")
    stage.world.run(0.5)
    assert worker.engine is not None
    worker.engine.pooling_s = 5.0
    return worker


def cancel(stage: Stage, request_id: str) -> "asyncio.Task[bool]":
    return stage.client.process.spawn(stage.client.client.cancel(request_id))


def num_pooling(worker: FrontendProcess) -> int:
    assert worker.engine is not None
    return worker.engine.num_pooling


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("after_ms", [0, 0.5, 1, 1.5, 2, 3, 5, 100, 600])
def test_a_cancel_ends_the_request_and_frees_its_worker_whenever_it_comes(
    stage: Stage, worker: FrontendProcess, ask: Ask, after_ms: float
) -> None:
    asked = ask(stage.client, request_id="mine")
    other = ask(stage.client, request_id="another")
    stage.world.run(after_ms / 1e3)
    cancelled = cancel(stage, "mine")
    stage.world.run_until(lambda: asked.done() and cancelled.done(), 1.0)
    with pytest.raises(errors.RequestError) as ended:
        asked.result()
    assert (ended.value.error.code, cancelled.result()) == (errors.Code.CANCELLED, True)
    stage.world.run(0.1)
    assert num_pooling(worker) == 1
    stage.world.run_until(other.done, 10.0)
    assert not other.result().error
    stage.check()


@pytest.mark.parametrize("ask", ASKS)
def test_a_caller_that_is_cancelled_frees_the_worker(stage: Stage, worker: FrontendProcess, ask: Ask) -> None:
    asked = ask(stage.client)
    stage.world.run(0.5)
    assert num_pooling(worker) == 1
    stage.client.process.call(asked.cancel)
    stage.world.run(0.1)
    assert num_pooling(worker) == 0
    stage.check()


@pytest.mark.parametrize("ask", ASKS)
def test_a_request_that_waits_for_a_worker_is_cancelled(stage: Stage, worker: FrontendProcess, ask: Ask) -> None:
    worker.engine_dies()
    asked = ask(stage.client, request_id="mine")
    stage.world.run(0.1)
    cancelled = cancel(stage, "mine")
    stage.world.run_until(lambda: asked.done() and cancelled.done(), 0.15)
    with pytest.raises(errors.RequestError, match="cancelled"):
        asked.result()
    assert cancelled.result()
    stage.check()


def test_nobody_answers_the_cancel_of_a_request_that_has_ended(stage: Stage, worker: FrontendProcess) -> None:
    asked = stage.client.embed(request_id="mine")
    stage.world.run_until(asked.done, 10.0)
    cancelled = cancel(stage, "mine")
    stage.world.run_until(cancelled.done, 10.0)
    assert not cancelled.result()


def test_a_cancel_ends_all_requests_with_its_id(stage: Stage, worker: FrontendProcess) -> None:
    asked = [ask(stage.client, request_id="mine") for ask in (*ASKS, *ASKS)]
    stage.world.run(0.5)
    assert num_pooling(worker) == 4
    cancel(stage, "mine")
    stage.world.run(0.1)
    assert [one.done() for one in asked] == [True] * 4
    assert num_pooling(worker) == 0
