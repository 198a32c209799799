"""Every engine keeps every rule of the contract."""

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from protocol import errors
from tests.contracts import kit
from tests.support.arithmetic import ArithmeticRunner
from tests.support.engines import DEMO, ONNX, demo_engine, grouped_demo, thread_engine
from worker import contract
from worker.engine.runner import ModelError, Runner

FACTORIES: dict[str, Callable[[], contract.Engine]] = {
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


async def test_every_open_stream_ends_in_worker_lost_when_the_engine_dies() -> None:
    engine = demo_engine()
    config = await engine.start("kit")
    asked = [kit.request(kit.prompt(config, number), max_tokens=300) for number in range(6)]
    recorders = [kit.start(engine, request) for request in asked]
    await recorders[0].until(lambda seen: len(seen.token_ids) >= 2)
    assert engine._link is not None
    engine._link.kill()
    async with asyncio.timeout(5):
        assert "closed" in await engine.died()
    for recorder in recorders:
        terminal = recorder.terminals[0]
        assert terminal.error is not None
        assert terminal.error.code is errors.Code.WORKER_LOST
    with pytest.raises(errors.RequestError):
        engine.generate(kit.request(kit.prompt(config)), lambda output: None)
    await engine.cleanup()
