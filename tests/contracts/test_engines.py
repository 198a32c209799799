"""Every engine keeps every rule of the contract."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from _pytest.mark.structures import ParameterSet

from tests.contracts import adapter_rules, cache_rules, constraint_rules, kit, reasoning_rules, stream_rules
from tests.contracts.driving import prompt, request, run, settled, start
from tests.support import encoder
from tests.support.arithmetic import ArithmeticRunner, exchanging, make_config
from tests.support.engines import DEMO, ONNX, demo_engine, exact_demo, gqa_demo, stateful, thread_engine
from tests.support.hostile_constraints import ALL as ALL_HOSTILE
from tests.support.models import random_encoder
from tests.support.models.random_encoder import EncoderShape
from tokenbus.protocol.wire import codec, errors, internal
from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.worker.contract import contract, engine_request
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings, SchedulerSettings
from tokenbus.worker.engine.device.runner import Runner
from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine_client.client import EngineClient
from tokenbus.worker.engine_client.listener import EngineListener, Observation

_SIM = msgspec.structs.replace(DEMO, model="dynamo", engine="sim", sim_speedup=20.0)
FACTORIES: dict[str, Callable[[], EngineClient]] = {
    "arithmetic": lambda: thread_engine(lambda _: ArithmeticRunner(exchanging(make_config()), step_s=0.002)),
    "gguf": demo_engine,
    "onnx-plain": lambda: demo_engine(ONNX),
    "onnx-gqa": lambda: demo_engine(msgspec.structs.replace(ONNX, model=str(gqa_demo()), kv_pool_bytes=64 << 20)),
    "hybrid": lambda: demo_engine(stateful("hybrid")),
    "recurrent": lambda: demo_engine(stateful("recurrent")),
    "window": lambda: demo_engine(stateful("window")),
    "sim": lambda: demo_engine(_SIM),
    "sim-with-copies": lambda: demo_engine(msgspec.structs.replace(_SIM, host_cache_mib=1)),
}


FATAL_RULES = (stream_rules.ends_every_stream_at_cleanup,)
OTHER_RULES = [rule for rule in kit.RULES if rule not in FATAL_RULES]
Started = tuple[EngineClient, contract.EngineConfig]


WHOLLY = ("arithmetic", "gguf", "onnx-gqa")
"""The engines of which `make test` tries every rule. It tries a fifth of the rules of each of the others, and every one
that depends most on how an engine keeps what it has computed; `make test-long` tries the rest."""
OF_THE_CACHE = (
    stream_rules.keeps_eight_interleaved_streams_apart,
    cache_rules.computes_what_is_cached_only_once,
    cache_rules.shares_a_prefix_with_what_runs,
    cache_rules.keeps_caches_apart,
    cache_rules.tells_which_blocks_it_holds,
    *cache_rules.EXCHANGE_RULES,
)


def pairs() -> Iterator[ParameterSet]:
    """Yields each engine with each rule."""
    for at, name in enumerate(FACTORIES):
        for number, rule in enumerate(OTHER_RULES):
            is_quick = name in WHOLLY or rule in OF_THE_CACHE or number % 5 == at % 5
            marks = () if is_quick else (pytest.mark.long,)
            yield pytest.param(name, rule, id=f"{name}-{rule.__name__}", marks=marks)


class Shared:
    """Has one engine at a time, for all rules that leave it running: to start one takes longer than most rules."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._started: Started | None = None

    async def started(self, name: str) -> Started:
        if self._started is None or self._name != name:
            await self.cleanup()
            engine = FACTORIES[name]()
            self._name, self._started = name, (engine, await engine.start("kit"))
        return self._started

    async def cleanup(self) -> None:
        if self._started is not None:
            (engine, _), self._started = self._started, None
            await engine.cleanup()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Shared]:
    engines = Shared()
    yield engines
    await engines.cleanup()


async def empty(engine: EngineClient, config: contract.EngineConfig) -> None:
    """Leaves nothing cached, and returns once the engine has said so."""
    engine.on_kv_events = lambda removed, stored: None
    engine.clear_cache()
    await run(engine, request(prompt(config), cache=False, max_tokens=1))
    await settled(engine)
    assert engine.load().free_blocks == config.total_kv_blocks


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("name", "rule"), [*pairs()])
async def test_engine(shared: Shared, name: str, rule: kit.Check) -> None:
    engine, config = await shared.started(name)
    if rule in adapter_rules.RULES and config.checkpoint_sizes is not None:
        pytest.skip("there are no adapters of this model")
    try:
        async with asyncio.timeout(60):
            await empty(engine, config)
            await rule(engine, config)
    except BaseException:
        await shared.cleanup()  # of what is broken, the next rules would say nothing
        raise


@pytest.mark.parametrize("rule", FATAL_RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("name", FACTORIES)
async def test_end_of_engine(name: str, rule: kit.Check) -> None:
    engine = FACTORIES[name]()
    async with asyncio.timeout(60):
        await rule(engine, await engine.start("kit"))


@pytest.mark.parametrize("rule", kit.LIFECYCLE_RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("name", FACTORIES)
async def test_life_of_engine(name: str, rule: kit.LifecycleCheck) -> None:
    await rule(FACTORIES[name])


async def embedding_engine(name: str, folder: Path) -> EngineClient:
    if name == "onnx-encoder":
        encoder.write(folder)
        return demo_engine(EngineSettings(model=str(folder), threads=1))
    path = folder / f"{name}.gguf"
    random_encoder.write(path, EncoderShape(*name.split("-")))
    # Flash attention on a CPU rounds by where in its batch an input stands, to 16 bits.
    return demo_engine(EngineSettings(model=str(path), threads=1, flash_attention="off"))


@pytest.mark.parametrize("name", ["onnx-encoder", "bert-mean", "bert-cls", "qwen3-last", "qwen3-mean"])
async def test_a_model_that_only_embeds_keeps_the_rule_of_embeddings(name: str, tmp_path: Path) -> None:
    engine = await embedding_engine(name, tmp_path)
    config = await engine.start("kit")
    async with asyncio.timeout(60):
        await kit.embeds_each_input_by_itself(engine, config)
        with pytest.raises(errors.RequestError, match="generates nothing"):
            engine.generate(request(prompt(config)), lambda output: None)
    await engine.cleanup()


@pytest.mark.parametrize("name", ["bert-rank", "qwen3-rank"])
async def test_a_model_that_only_scores_keeps_the_rule_of_scores(name: str, tmp_path: Path) -> None:
    engine = await embedding_engine(name, tmp_path)
    config = await engine.start("kit")
    async with asyncio.timeout(60):
        await kit.scores_each_document_by_itself(engine, config)
        await kit.embeds_each_input_by_itself(engine, config)
        with pytest.raises(errors.RequestError, match="generates nothing"):
            engine.generate(request(prompt(config)), lambda output: None)
        with pytest.raises(errors.RequestError, match=r"documents\[1\] has with the query") as long:
            await engine.rerank(internal.Rerank(query="a", documents=["a", "fox " * 40], remaining_ms=10_000))
    assert (long.value.error.code, long.value.error.param) == (errors.Code.PROMPT_TOO_LONG, "documents[1]")
    await engine.cleanup()


@pytest.mark.parametrize("name", ["onnx-encoder", "bert-mean", "qwen3-last"])
async def test_a_call_whose_engine_dies_before_it_has_embedded_anything_is_answered_by_the_next_one(
    name: str, tmp_path: Path
) -> None:
    engine = await embedding_engine(name, tmp_path)
    config = await engine.start("kit")
    os.kill(config.pid, signal.SIGSTOP)  # so that it dies in the middle
    inputs: list[str | list[int]] = [prompt(config, number, 12) for number in range(50)]
    call = asyncio.create_task(engine.embed(internal.Embed(inputs=inputs, remaining_ms=60_000)))
    await asyncio.sleep(0)
    os.kill(config.pid, signal.SIGKILL)
    await engine.died()
    await engine.start("kit")
    assert (await call).prompt_tokens == 600
    assert (await engine.embed(internal.Embed(inputs=inputs, remaining_ms=60_000))).prompt_tokens == 600
    await engine.cleanup()


async def test_a_model_that_cannot_be_loaded_fails_the_start_with_its_reason() -> None:
    def refuse(_: Callable[[float], None]) -> Runner:
        raise ModelError("model.gguf: is no model; fetch it again")

    engine = thread_engine(refuse)
    with pytest.raises(ModelError, match="fetch it again"):
        await engine.start("kit")
    await engine.cleanup()


@pytest.mark.parametrize("name", ["gguf", "onnx-plain", "sim"])
async def test_streams_of_an_engine_that_dies_go_on_in_the_next_where_they_were(name: str) -> None:
    engine = FACTORIES[name]()
    config = await engine.start("kit")
    asked = [request(prompt(config, number), max_tokens=100) for number in range(4)]
    calm = [(await run(engine, request)).token_ids for request in asked]
    recorders = [start(engine, request) for request in asked]
    await recorders[0].until(lambda seen: len(seen.token_ids) >= 2)
    os.kill(config.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        assert "closed" in await engine.died()
    assert not any(recorder.terminals for recorder in recorders)
    with pytest.raises(errors.RequestError):
        engine.generate(request(prompt(config)), lambda output: None)
    await engine.start("kit")
    for recorder in recorders:
        assert (await recorder.terminal()).finish_reason == "length"
    assert [recorder.token_ids for recorder in recorders] == calm
    await engine.cleanup()


_FIELDS = {f"field_{n}": {"type": "string", "maxLength": 8} for n in range(12)}
_LONG_SCHEMA = {"type": "object", "properties": _FIELDS, "required": list(_FIELDS), "additionalProperties": False}


def long_constrained(
    config: contract.EngineConfig, number: int, logprobs: int | None = None
) -> engine_request.EngineRequest:
    """A request for some 200 tokens, half of which are forced."""
    schema = constraint_rules.json_schema(_LONG_SCHEMA)
    return constraint_rules.constrained(prompt(config, number), schema, max_tokens=400, seed=number)


@pytest.mark.parametrize("settings", [exact_demo, lambda: ONNX], ids=["gguf", "onnx-plain"])
async def test_constrained_streams_of_an_engine_that_dies_go_on_in_the_next_where_they_were(
    settings: Callable[[], EngineSettings],
) -> None:
    engine = demo_engine(settings())
    try:
        config = await engine.start("kit")
        asked = [long_constrained(config, number) for number in range(4)]
        calm = [(await run(engine, request)).token_ids for request in asked]
        recorders = [start(engine, request) for request in asked]
        await recorders[0].until(lambda seen: len(seen.token_ids) >= 20)
        os.kill(config.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            await engine.died()
        assert not any(recorder.terminals for recorder in recorders)
        await engine.start("kit")
        for recorder in recorders:
            assert (await recorder.terminal()).finish_reason == "stop"
            assert sum(output.is_constraint_ready for output in recorder.outputs) == 1
        assert [recorder.token_ids for recorder in recorders] == calm
    finally:
        await engine.cleanup()


async def test_reasoning_is_closed_at_the_same_token_by_the_next_engine_when_one_dies() -> None:
    engine = demo_engine(exact_demo())
    try:
        config = await engine.start("kit")
        asked = [
            reasoning_rules.reasoning(config, most, number, message="Enough.", max_tokens=200)
            for number, most in enumerate((0, 4, 30, 100))
        ]
        calm = [await run(engine, request) for request in asked]
        recorders = [start(engine, request) for request in asked]
        await recorders[0].until(lambda seen: len(seen.token_ids) >= 10)
        os.kill(config.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            await engine.died()
        await engine.start("kit")
        for recorder, whole in zip(recorders, calm, strict=True):
            usage = (await recorder.terminal()).usage
            assert (recorder.token_ids, recorder.text) == (whole.token_ids, whole.text)
            assert usage is not None
            assert whole.outputs[-1].usage is not None
            assert usage.reasoning_tokens == whole.outputs[-1].usage.reasoning_tokens
    finally:
        await engine.cleanup()


class _CountsPreemptions(EngineListener):
    def __init__(self) -> None:
        self.count = 0

    def observe(self, seen: Observation) -> None:
        if isinstance(seen, ipc.StepStats):
            self.count += seen.preemptions


async def answers(settings: EngineSettings, *, together: bool) -> tuple[list[list[int]], int]:
    """Returns the answers to requests for some 120 tokens each, and the number of preemptions. Most are drawn, some are
    constrained where the engine can, the reasoning of some is limited, and one is not cached."""
    engine = demo_engine(settings)
    engine.listener = listener = _CountsPreemptions()
    config = await engine.start("kit")
    asked = [
        request(prompt(config, number), max_tokens=120, temperature=number % 2, seed=number, cache=number != 4)
        for number in range(5)
    ]
    if "structured_output" in config.features:
        asked += [long_constrained(config, number) for number in range(3)]
    if "reasoning_budget" in config.features:
        asked += [reasoning_rules.reasoning(config, 36 * number, number, max_tokens=120) for number in range(3)]
    if "lora" in config.features:  # a step is decoded in several parts
        used = (Adapter(await adapter_rules.load(engine, 1), 1.0),)
        asked[::2] = [codec.replace(one, adapters=used) for one in asked[::2]]
    recorders = []
    for one in asked:
        recorders.append(start(engine, one))
        if not together:
            await recorders[-1].terminal()
    for recorder in recorders:
        assert (await recorder.terminal(60)).error is None
    await settled(engine)
    await engine.cleanup()
    return [recorder.token_ids for recorder in recorders], listener.count


PREEMPTED: dict[str, tuple[Callable[[], EngineSettings], tuple[int | None, ...]]] = {
    "gguf": (exact_demo, (None, 0)),
    "sim": (lambda: _SIM, (None,)),
}
"""Settings, and the amounts of host memory in MiB with which sequences are preempted; None: that of the settings."""


@pytest.mark.parametrize("name", PREEMPTED)
async def test_streams_are_the_same_when_they_are_preempted(name: str) -> None:
    make, amounts = PREEMPTED[name]
    settings = msgspec.structs.replace(make(), kv_block_size=16)
    alone, _ = await answers(settings, together=False)
    beside, calm_count = await answers(settings, together=True)
    assert (beside, calm_count) == (alone, 0)
    tight = msgspec.structs.replace(settings, kv_tokens=512, scheduler=SchedulerSettings(expected_tokens=1))
    for mebibytes in amounts:
        host = {} if mebibytes is None else {"host_cache_mib": mebibytes}
        preempted, count = await answers(msgspec.structs.replace(tight, **host), together=True)
        assert preempted == alone, host
        assert count > 0


async def test_hostile_constraints_disturb_no_running_stream() -> None:
    engine = demo_engine()
    config = await engine.start("kit")
    neighbours = [request(prompt(config, number), max_tokens=400) for number in range(2)]
    running = [start(engine, one) for one in neighbours]
    hostile = []
    for kind, source in [*ALL_HOSTILE.values()][::4]:
        constraint = engine_request.Constraint(kind=engine_request.ConstraintKind(kind), source=source, param="it")
        hostile.append(start(engine, constraint_rules.constrained(prompt(config), constraint, max_tokens=20)))
    for recorder in running:
        assert (await recorder.terminal()).finish_reason == "length"
        assert len(recorder.token_ids) == 400
    for recorder in hostile:
        error = (await recorder.terminal(60)).error
        assert error is None or (error.code, error.param) == (errors.Code.INVALID_REQUEST, "it")
    await settled(engine)
    await engine.cleanup()


async def test_streams_of_an_engine_that_died_end_in_worker_lost_when_nobody_takes_them_over() -> None:
    engine = demo_engine()
    config = await engine.start("kit")
    recorders = [start(engine, request(prompt(config, number), max_tokens=300)) for number in range(6)]
    await recorders[0].until(lambda seen: len(seen.token_ids) >= 2)
    os.kill(config.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        await engine.died()
    await engine.cleanup()
    for recorder in recorders:
        (terminal,) = recorder.terminals
        assert terminal.error is not None
        assert terminal.error.retryable
