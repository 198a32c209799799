"""With the demo model: answers do not depend on what the cache did."""

from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from tests.support.engines import DEMO, Recorder, demo_engine, gguf_runner
from tokenbus import demo
from tokenbus.protocol.wire import internal
from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.engine_settings import EngineSettings, SchedulerSettings
from tokenbus.worker.engine.kv.ops import Offload, Onload
from tokenbus.worker.engine_client.client import EngineClient

STORY = "Once upon a time there was a little fox who lived by the river. " * 6
QUESTIONS = ("The fox said", "One day", "The capital of", "12 + 30 =", "Then the old woman", "In the morning")
TOKENS = 40
ONLY_HOST = 300
"""A block size so large that no unused block stays on the device."""
NEAR_TIE = 1e-3

Make = Callable[..., object]


class Asker:
    """An engine to which a test sends prompts."""

    def __init__(self, engine: EngineClient) -> None:
        self.engine = engine
        self._number = 0

    async def start(self, prompt: str, *, salt: str, cache: bool = True, max_tokens: int = TOKENS) -> Recorder:
        token_ids = await self.engine.tokenize(internal.Tokenize(text=prompt))
        self._number += 1
        recorder = Recorder()
        sampling = engine_request.Sampling(max_tokens=max_tokens, ignore_eos=True, logprobs=2)
        self.engine.generate(
            engine_request.EngineRequest(
                key=f"r{self._number}", token_ids=token_ids, sampling=sampling, cache_salt=salt, cache_prompt=cache
            ),
            recorder,
        )
        return recorder

    async def ask(self, prompt: str, *, salt: str, cache: bool = True) -> Recorder:
        recorder = await self.start(prompt, salt=salt, cache=cache)
        await recorder.terminal()
        await self.engine.drain()
        return recorder


def cached(recorder: Recorder) -> int:
    usage = recorder.outputs[-1].usage
    assert usage is not None
    return usage.cached_tokens


def differ_only_in_near_ties(one: Recorder, other: Recorder) -> bool:
    """Whether two answers are the same, or differ only from a token on that the model all but tied."""
    for place, (token_id, other_id) in enumerate(zip(one.token_ids, other.token_ids, strict=True)):
        if token_id != other_id:
            logprobs = [logprob for output in one.outputs for logprob in output.logprobs]
            (_, first), (_, second) = logprobs[place].top
            print(f"parted at {place}: {first - second:.2e} between the two likeliest")
            return first - second < NEAR_TIE
    return True


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    engines: list[EngineClient] = []

    async def make(**changes: object) -> Asker:
        engine = demo_engine(msgspec.structs.replace(DEMO, **changes))
        engines.append(engine)
        await engine.start("test")
        return Asker(engine)

    yield make
    for engine in engines:
        await engine.cleanup()


async def test_greedy_answers_do_not_depend_on_what_the_cache_did(make: Make) -> None:
    plain = await make()  # type: ignore[misc]
    cold = [await plain.ask(STORY + question, salt="", cache=False) for question in QUESTIONS]
    assert [cached(answer) for answer in cold] == [0] * len(QUESTIONS)

    warm = [await plain.ask(STORY + question, salt="warm") for question in QUESTIONS]
    assert all(cached(answer) > 100 for answer in warm[1:])

    to_host = await make(kv_block_size=ONLY_HOST)  # type: ignore[misc]
    for question in QUESTIONS:
        await to_host.ask(STORY + question, salt="host")
    restored = []
    for question in QUESTIONS:
        between = await to_host.start("x", salt="", cache=False, max_tokens=2)
        await between.until(lambda seen: len(seen.token_ids) >= 1)
        assert to_host.engine.load().cached_blocks == 0, "something was left on the device"
        await between.terminal()
        restored.append(await to_host.ask(STORY + question, salt="host"))
    assert all(cached(answer) > 100 for answer in restored)

    running = [await plain.start(STORY + question, salt="shared") for question in QUESTIONS]
    for answer in running:
        await answer.terminal()
    assert all(cached(answer) > 100 for answer in running[1:])

    small = await make(  # type: ignore[misc]
        kv_tokens=512, context_length=256, scheduler=SchedulerSettings(expected_tokens=1), host_cache_mib=0
    )
    squeezed = [await small.start(STORY[:330] + question, salt=question, max_tokens=100) for question in QUESTIONS]
    roomy = [await plain.start(STORY[:330] + question, salt="", cache=False, max_tokens=100) for question in QUESTIONS]
    for answer in squeezed + roomy:
        await answer.terminal()
    assert small.engine.load().computed_tokens > plain_tokens(squeezed), "nobody was preempted"

    pairs = [*zip(cold * 3, warm + restored + running, strict=True), *zip(roomy, squeezed, strict=True)]
    assert all(differ_only_in_near_ties(one, other) for one, other in pairs)


def plain_tokens(answers: list[Recorder]) -> int:
    """The number of tokens that would have been computed if no sequence had been preempted."""
    usages = [answer.outputs[-1].usage for answer in answers]
    return sum(usage.total_tokens - usage.cached_tokens - 1 for usage in usages if usage is not None)


def test_an_empty_lane_is_saved_and_restored() -> None:
    runner = gguf_runner(EngineSettings(model=str(demo.MODEL_PATH), threads=1, kv_tokens=2_048))
    try:
        assert runner.copies is not None
        runner.copies.open()
        runner.apply([Offload(1, 0, 0, 0), Onload(1, 1, 0, 0)])
        runner.copies.close()
    finally:
        runner.close()


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "f32"])
async def test_quantized_kv_is_shared_saved_and_restored_too(make: Make, kind: str) -> None:
    one = await make(cache_type_k=kind, cache_type_v=kind, kv_block_size=ONLY_HOST)  # type: ignore[misc]
    first = await one.ask(STORY + QUESTIONS[0], salt="s")
    second = await one.ask(STORY + QUESTIONS[0], salt="s")
    assert cached(second) > 100
    assert differ_only_in_near_ties(first, second)
