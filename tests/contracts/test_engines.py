"""Every engine keeps every rule of the contract."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from protocol import errors
from tests.contracts import kit
from tests.support.arithmetic import ArithmeticRunner
from tests.support.engines import DEMO, ONNX, demo_engine, grouped_demo, thread_engine
from worker import contract
from worker.engine.runner import ModelError, Runner
from worker.front.engine import ChildEngine

FACTORIES: dict[str, Callable[[], ChildEngine]] = {
    "arithmetic": lambda: thread_engine(lambda _: ArithmeticRunner(step_s=0.002)),
    "gguf": demo_engine,
    "onnx-plain": lambda: demo_engine(ONNX),
    "onnx-grouped": lambda: demo_engine(msgspec.structs.replace(ONNX, model=str(grouped_demo()))),
    "sim": lambda: demo_engine(msgspec.structs.replace(DEMO, model="dynamo", engine="sim", sim_speedup=20.0)),
}


@pytest.fixture(params=FACTORIES)
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[contract.Engine]:
    engine = FACTORIES[request.param]()
    yield engine
    await engine.cleanup()


@pytest.mark.parametrize("rule", kit.RULES, ids=lambda rule: rule.__name__)
async def test_engine(engine: contract.Engine, rule: kit.Check) -> None:
    config = await engine.start("kit")
    async with asyncio.timeout(60):
        await rule(engine, config)


@pytest.mark.parametrize("rule", kit.LIFECYCLE_RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("name", FACTORIES)
async def test_life_of_engine(name: str, rule: kit.LifecycleCheck) -> None:
    await rule(FACTORIES[name])


async def test_a_model_that_cannot_be_loaded_fails_the_start_with_its_reason() -> None:
    def refuse(_: Callable[[float], None]) -> Runner:
        raise ModelError("model.gguf: is no model; fetch it again")

    engine = thread_engine(refuse)
    with pytest.raises(contract.EngineStartError, match="fetch it again"):
        await engine.start("kit")
    await engine.cleanup()


@pytest.mark.parametrize("name", ["gguf", "onnx-plain", "sim"])
async def test_streams_of_an_engine_that_dies_go_on_in_the_next_where_they_were(name: str) -> None:
    first, second = FACTORIES[name](), FACTORIES[name]()
    config = await first.start("kit")
    asked = [kit.request(kit.prompt(config, number), max_tokens=100) for number in range(4)]
    calm = [(await kit.run(first, request)).token_ids for request in asked]
    recorders = [kit.start(first, request) for request in asked]
    await recorders[0].until(lambda seen: len(seen.token_ids) >= 2)
    os.kill(config.pid, signal.SIGKILL)
    async with asyncio.timeout(5):
        assert "closed" in await first.died()
    assert not any(recorder.terminals for recorder in recorders)
    with pytest.raises(errors.RequestError):
        first.generate(kit.request(kit.prompt(config)), lambda output: None)
    await second.start("kit")
    second.take_over(first)
    for recorder in recorders:
        assert (await recorder.terminal()).finish_reason == "length"
    assert [recorder.token_ids for recorder in recorders] == calm
    for engine in (first, second):
        await engine.cleanup()


async def test_streams_of_an_engine_that_died_end_in_worker_lost_when_nobody_takes_them_over() -> None:
    engine = demo_engine()
    config = await engine.start("kit")
    recorders = [kit.start(engine, kit.request(kit.prompt(config, number), max_tokens=300)) for number in range(6)]
    await recorders[0].until(lambda seen: len(seen.token_ids) >= 2)
    os.kill(config.pid, signal.SIGKILL)
    async with asyncio.timeout(5):
        await engine.died()
    await engine.cleanup()
    for recorder in recorders:
        (terminal,) = recorder.terminals
        assert terminal.error is not None
        assert terminal.error.retryable
