"""A model that is loaded while others serve is loaded as a whole, or leaves nothing behind; and nothing that a process
needs ends unnoticed while models load."""

import asyncio
import errno

import pytest

from tokenbus.protocol.wire import errors, internal
from tokenbus.worker.contract.engine_errors import ModelTooLargeError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.replica.drain import Drain
from tokenbus.worker.serve import WorkerProcess
from tokenbus.worker.settings.settings import ModelToServe, WorkerSettings

SIM = EngineSettings(model="steps-of-50ms", engine="sim")


class StubFrontend:
    def __init__(self) -> None:
        self.drain = Drain()


class StubReplica:
    """A replica that serves at once."""

    worker_id = "w"

    def __init__(self) -> None:
        self.frontend = StubFrontend()


async def test_a_replica_that_can_not_be_made_gives_its_memory_back_and_ends_those_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = WorkerProcess(WorkerSettings(models=(ModelToServe("m", SIM),), memory_budget_bytes=1 << 40))
    await worker._on_demand.prepare()
    plan, made = worker._on_demand._plan, list[StubReplica]()
    budget_bytes = plan.budget_bytes

    def add(*_: object) -> StubReplica:
        if made:
            raise OSError(errno.EMFILE, "too many open files")
        made.append(StubReplica())
        return made[0]

    async def wait(*_: object) -> None: ...

    monkeypatch.setattr(worker, "_add_replica", add)
    monkeypatch.setattr(worker, "_wait_started", wait)
    replies: list[internal.ControlReply] = []
    worker.load(internal.Control(op="load", model=SIM.model, served_name="n", replicas=2), replies.append)
    async with asyncio.timeout(10):
        while not replies or replies[-1].ok:
            await asyncio.sleep(0.01)
    assert replies[-1].error is not None
    assert replies[-1].error.code is errors.Code.INTERNAL
    assert made[0].frontend.drain.requested.is_set()
    assert plan.budget_bytes == budget_bytes - sum(worker._taken_bytes.values())


@pytest.mark.parametrize("fits_then", [True, False])
async def test_what_finds_no_memory_is_tried_out_again_once_there_is_room_and_never_loaded_untried(
    monkeypatch: pytest.MonkeyPatch, fits_then: bool
) -> None:
    worker = WorkerProcess(WorkerSettings(models=(ModelToServe("m", SIM),), memory_budget_bytes=1 << 40))
    await worker._on_demand.prepare()
    plan, done = worker._on_demand._plan, list[str]()
    budget_bytes = plan.budget_bytes

    async def run(*_: object) -> None:
        done.append(f"tried with {budget_bytes - plan.budget_bytes > 0}")
        if len(done) == 1 or not fits_then:
            raise ModelTooLargeError("it needs more")

    def add(*_: object) -> StubReplica:
        done.append("loaded")
        return StubReplica()

    async def wait(*_: object) -> None: ...

    monkeypatch.setattr(worker._trials, "run", run)
    monkeypatch.setattr(worker, "_add_replica", add)
    monkeypatch.setattr(worker, "_wait_started", wait)
    replies: list[internal.ControlReply] = []
    worker.load(internal.Control(op="load", model=SIM.model, served_name="n"), replies.append)
    async with asyncio.timeout(10):
        while not replies or (replies[-1].ok and replies[-1].progress != 1.0):
            await asyncio.sleep(0.01)
    assert done == ["tried with False", "tried with True", *(["loaded"] if fits_then else [])]
    assert replies[-1].ok is fits_then
    if not fits_then:
        assert replies[-1].error is not None
        assert "it needs more" in replies[-1].error.message
        assert plan.budget_bytes == budget_bytes


async def test_replicas_that_are_being_loaded_count_with_those_that_are() -> None:
    worker = WorkerProcess(WorkerSettings(models=(ModelToServe("m", SIM),), memory_budget_bytes=1 << 40))
    replies: list[internal.ControlReply] = []
    for name in ("a", "b"):
        worker.load(internal.Control(op="load", model=SIM.model, served_name=name, replicas=40), replies.append)
    assert [reply.ok for reply in replies] == [True, False]
    assert replies[1].error is not None
    assert "replicas must be 1 to 24" in replies[1].error.message
    for task in worker._loads:
        task.cancel()


async def test_a_process_whose_connection_is_closed_for_good_ends_though_its_first_models_still_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = WorkerProcess(WorkerSettings(models=(ModelToServe("m", SIM),)))

    async def close() -> None:
        raise ConnectionError("closed")

    async def load() -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(worker._line, "run", close)
    monkeypatch.setattr(worker, "_start_first", load)
    async with asyncio.timeout(10):
        with pytest.raises(ConnectionError):
            await worker._serve_replicas()
