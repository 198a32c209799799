"""Whatever fails while a model is measured, loaded or unloaded, those who ask for models are answered."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import msgspec
import pytest

from tests.support.engines import DEMO
from tests.support.recording_bus import RecordingBus
from tokenbus.protocol.telemetry.tracing import NoopTracer
from tokenbus.protocol.wire import errors, internal, subjects
from tokenbus.worker.broker.lifeline import Lifeline
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.memory.fit import ModelFacts
from tokenbus.worker.on_demand.models import LoadListener, OnDemandModels, OnDemandReplica
from tokenbus.worker.settings.settings import ModelToServe, WorkerSettings
from tokenbus.worker.telemetry.metrics import WorkerMetrics

SIM = EngineSettings(model="steps-of-50ms", engine="sim")


class StubReplica:
    """A replica whose engine starts at once and can't be unloaded."""

    worker_id = "worker"
    load_progress = 0.0

    def __init__(self, served_name: str, listener: LoadListener) -> None:
        self.served_name = served_name
        self.listener = listener
        self.is_added = False
        self.idle_since: float | None = None

    def set_context_length(self, tokens: int) -> None: ...

    def load(self, kv_limit_bytes: int) -> None:
        self.idle_since = 0.0
        self.listener.model_loaded(self.served_name)

    async def unload(self) -> None:
        raise RuntimeError("the engine does not end")

    def kill_engine(self) -> None:
        self.listener.model_unloaded(self.served_name)


Serve = Callable[..., dict[str, StubReplica]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Serves models of these settings on demand, with room for one."""
    running: list[asyncio.Task[None]] = []

    def start(**models: EngineSettings) -> dict[str, StubReplica]:
        served = tuple(ModelToServe(name, engine, on_demand=True) for name, engine in models.items())
        settings = WorkerSettings(models=served, memory_budget_bytes=150 << 20)
        on_demand = OnDemandModels(settings, WorkerMetrics(), "worker")
        replicas = {name: StubReplica(name, on_demand) for name in models}

        async def run() -> None:
            await on_demand.prepare()
            for replica in replicas.values():
                on_demand.add(cast(OnDemandReplica, replica))
                replica.is_added = True
            await on_demand.run()

        running.append(asyncio.create_task(run()))
        return replicas

    yield start
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def answer(replica: StubReplica, *, until: Callable[[internal.ControlReply], bool]) -> internal.ControlReply:
    """Asks for a model, as routers do, until the answer is of this kind."""
    async with asyncio.timeout(10):
        while True:
            await asyncio.sleep(0.01)
            if replica.is_added and until(reply := replica.listener.want(replica.served_name)):
                return reply


async def test_settings_that_the_model_can_not_have_are_named_to_those_who_ask(serve: Serve) -> None:
    replicas = serve(wrong=msgspec.structs.replace(DEMO, cache_type_k="q6_0"), right=SIM)
    refused = await answer(replicas["wrong"], until=lambda reply: reply.error is not None)
    assert refused.error is not None
    assert refused.error.code is errors.Code.NO_WORKER
    assert "q8_0" in refused.error.message
    assert "got q6_0" in refused.error.message
    await answer(replicas["right"], until=lambda reply: reply.progress == 1.0)


async def test_an_error_that_nobody_expected_is_an_answer_too(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("tokenbus.worker.on_demand.model_sizes.read_facts", fail)
    refused = await answer(serve(wrong=SIM)["wrong"], until=lambda reply: reply.error is not None)
    assert refused.error is not None
    assert refused.error.code is errors.Code.NO_WORKER


async def test_models_that_are_fetched_to_be_measured_hold_up_nothing_else_and_end_with_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The event loop's own threads resolve the broker's name when a connection is lost."""
    num_fetching, ended = 0, threading.Semaphore(0)

    def fetch(_: EngineSettings, progress: Callable[[float], None]) -> None:
        nonlocal num_fetching
        num_fetching += 1
        try:
            while True:
                time.sleep(0.01)
                progress(0.5)
        finally:
            ended.release()

    monkeypatch.setattr("tokenbus.worker.on_demand.model_sizes.read_facts", fetch)
    served = tuple(ModelToServe(f"m{number}", SIM, on_demand=True) for number in range(40))
    on_demand = OnDemandModels(WorkerSettings(models=served), WorkerMetrics(), "worker")
    await on_demand.prepare()
    running = asyncio.create_task(on_demand.run())
    for one in served:
        on_demand.add(cast(OnDemandReplica, StubReplica(one.served_name, on_demand)))
    async with asyncio.timeout(10):
        while num_fetching < 32:
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(lambda: "free") == "free"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for _ in range(num_fetching):
            assert await asyncio.to_thread(ended.acquire, timeout=5)


async def test_a_model_that_can_not_be_unloaded_does_not_keep_others_out(serve: Serve) -> None:
    replicas = serve(first=SIM, second=SIM)
    await answer(replicas["first"], until=lambda reply: reply.progress == 1.0)
    await answer(replicas["second"], until=lambda reply: reply.progress == 1.0)


async def test_a_model_that_was_never_loaded_shows_the_context_that_it_will_have() -> None:
    model = ModelToServe("m", SIM, on_demand=True)
    on_demand = OnDemandModels(WorkerSettings(models=(model,)), WorkerMetrics(), "worker")
    line = Lifeline(RecordingBus(), RecordingBus(), subjects.Subjects(), "w1")  # type: ignore[arg-type]
    worker = (WorkerSettings(models=(model,)), line, model, "w1", WorkerMetrics(), NoopTracer())
    replica = OnDemandReplica(*worker, lambda control, on_progress: None, on_demand)
    running = asyncio.create_task(replica._run_engines())
    await replica.started
    replica.set_context_length(4_096)
    listing = replica.frontend.announcer.listing
    assert listing is not None
    assert listing.context_length == 4_096
    running.cancel()


async def test_models_that_are_all_pinned_leave_the_rest_of_the_budget_to_loads() -> None:
    pinned = ModelToServe("pinned", DEMO, replicas=2)
    on_demand = OnDemandModels(
        WorkerSettings(models=(pinned,), memory_budget_bytes=10 << 30), WorkerMetrics(), "worker"
    )
    await on_demand.prepare()
    each = await on_demand.take(ModelToServe("other", DEMO))
    assert each > 96 << 20
    assert on_demand._plan.budget_bytes == (10 << 30) - 3 * each


async def test_pinned_models_that_take_more_than_the_budget_are_refused() -> None:
    pinned = ModelToServe("pinned", DEMO, replicas=2)
    on_demand = OnDemandModels(
        WorkerSettings(models=(pinned,), memory_budget_bytes=200 << 20), WorkerMetrics(), "worker"
    )
    with pytest.raises(ModelError, match="the pinned models take more than the budget"):
        await on_demand.prepare()


async def test_a_budget_into_which_no_model_fits_is_refused_and_one_into_which_any_fits_is_not() -> None:
    short = msgspec.structs.replace(DEMO, host_cache_mib=0)
    long = msgspec.structs.replace(short, kv_tokens=1 << 20)
    large, small = (ModelToServe(name, engine, on_demand=True) for name, engine in (("large", long), ("small", short)))
    for models, budget in (((large,), 10 << 30), ((large, small), 200 << 20)):
        settings = WorkerSettings(models=models, memory_budget_bytes=budget)
        await OnDemandModels(settings, WorkerMetrics(), "worker").prepare()
    none = WorkerSettings(models=(large, small), memory_budget_bytes=40 << 20)
    with pytest.raises(ModelError, match="no model fits into the 40 MiB that are left for them: small needs"):
        await OnDemandModels(none, WorkerMetrics(), "worker").prepare()


async def test_a_model_on_the_hub_is_not_waited_for_to_check_a_budget() -> None:
    absent = ModelToServe("m", msgspec.structs.replace(DEMO, model="org/repo"), on_demand=True)
    settings = WorkerSettings(models=(absent,), memory_budget_bytes=1 << 20)
    await OnDemandModels(settings, WorkerMetrics(), "worker").prepare()


async def test_a_model_whose_files_never_come_is_refused_and_one_that_comes_slowly_is_not(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def read(settings: EngineSettings, progress: Callable[[float], None]) -> None:
        while not ended.wait(0.001 if settings is SIM else None):
            progress(0.5)

    monkeypatch.setattr("tokenbus.worker.on_demand.measuring._TIMEOUT_S", 0.2)
    monkeypatch.setattr("tokenbus.worker.on_demand.model_sizes.read_facts", read)
    try:
        replicas = serve(slow=SIM, stuck=msgspec.structs.replace(SIM, model="elsewhere"))
        refused = await answer(replicas["stuck"], until=lambda reply: reply.error is not None)
        assert refused.error is not None
        assert "elsewhere: nothing of its files came for 0.2 s" in refused.error.message
        assert replicas["slow"].listener.want("slow").ok
    finally:
        ended.set()


async def test_the_wait_for_files_begins_with_their_thread(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is measured after others may wait for hours: they are downloaded."""
    may_end, second_began = threading.Event(), threading.Event()

    def read(settings: EngineSettings, progress: Callable[[float], None]) -> ModelFacts:
        if settings is SIM:
            while not may_end.wait(0.001):
                progress(0.5)
        else:
            second_began.set()
        return ModelFacts(0, 0, 0, 0, 0, 0)

    rounds = 0
    own_wait = asyncio.wait

    async def wait(*given: Any, **named: Any) -> Any:
        nonlocal rounds
        rounds += 1
        if rounds == 5:
            may_end.set()
        return await own_wait(*given, **named)

    monkeypatch.setattr("tokenbus.worker.on_demand.measuring.asyncio.wait", wait)
    monkeypatch.setattr("tokenbus.worker.on_demand.measuring._MAX_MEASURED", 1)
    monkeypatch.setattr("tokenbus.worker.on_demand.measuring._TIMEOUT_S", 0.05)
    monkeypatch.setattr("tokenbus.worker.on_demand.model_sizes.read_facts", read)
    replicas = serve(first=SIM, second=msgspec.structs.replace(SIM, model="steps-of-60ms"))
    reply = await answer(replicas["second"], until=lambda reply: reply.error is not None or second_began.is_set())
    assert (reply.error, may_end.is_set()) == (None, True)


async def test_a_model_behind_others_whose_files_never_come_is_refused(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr("tokenbus.worker.on_demand.measuring._MAX_MEASURED", 1)
    monkeypatch.setattr("tokenbus.worker.on_demand.measuring._TIMEOUT_S", 0.05)
    monkeypatch.setattr("tokenbus.worker.on_demand.model_sizes.read_facts", lambda *_: ended.wait())
    try:
        replicas = serve(first=SIM, second=SIM)
        refused = await answer(replicas["second"], until=lambda reply: reply.error is not None)
        assert refused.error is not None
        assert "1 other models are on mounts that do not answer" in refused.error.message
    finally:
        ended.set()
